# SPDX-License-Identifier: Apache-2.0
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


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    import kv_checksum_instances

    return kv_checksum_instances.write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(params=["pull", "push", "mooncake"])
def transport(request):
    """Each P/D path, with the connector's workers faked."""
    return request.param
