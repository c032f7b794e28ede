"""Start one fork server for every end-to-end test."""

from __future__ import annotations

import contextlib

import pytest
from rig.model import tiny_qwen3
from rig.servers import fork_server


@pytest.fixture(scope="session")
def forks():
    with contextlib.closing(fork_server()) as server:
        yield server


@pytest.fixture(scope="module")
def common(forks):
    """Return settings of servers of one small model, as several files have them."""
    return {
        "model": tiny_qwen3("float32"),
        "dtype": "float32",
        "fork_server": forks,
    }
