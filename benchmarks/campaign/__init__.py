# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Parts of the fault campaign; `fault_campaign.py` runs it."""

import sys
from pathlib import Path

# Instances, caches and states that the unit tests use, too.
sys.path.insert(
    0, str(Path(__file__).parents[2] / "tests" / "v1" / "kv_connector" / "unit")
)
