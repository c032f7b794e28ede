# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hold the campaign's instances to the rules of the unit tests' instances."""

from collections.abc import Iterator

import pytest
from kv_checksum.rig import instances


@pytest.fixture(autouse=True)
def every_load_has_one_verdict() -> Iterator[None]:
    """Check every instance of every test, whatever the test is about."""
    with instances.every_load_has_one_verdict():
        yield
