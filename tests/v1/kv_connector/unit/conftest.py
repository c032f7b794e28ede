# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Helpers beside the tests are imported by their plain names."""

import logging
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def log():
    """Lines that vLLM logs in this process, each after its level."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record):
            lines.append(f"{record.levelname} {record.getMessage()}")

    handler = Keep()
    logging.getLogger("vllm").addHandler(handler)
    yield lines
    logging.getLogger("vllm").removeHandler(handler)


@pytest.fixture(autouse=True)
def every_load_has_one_verdict():
    """Holds for every instance of every test, whatever the test is about."""
    import kv_checksum_instances

    made = kv_checksum_instances.MADE = []
    yield
    kv_checksum_instances.MADE = None
    for instance in made:
        instance.assert_every_load_has_one_verdict()


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    import kv_checksum_instances

    return kv_checksum_instances.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["pull", "push", "mooncake"])
def transport(request):
    """Each P/D path, with the connector's workers faked."""
    return request.param
