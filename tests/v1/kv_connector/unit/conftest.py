# SPDX-License-Identifier: Apache-2.0
"""Helpers beside the tests are imported by their plain names."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
