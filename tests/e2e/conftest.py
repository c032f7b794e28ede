"""Start one fork server for every end-to-end test."""

from __future__ import annotations

import contextlib

import pytest
from rig.servers import fork_server


@pytest.fixture(scope="session")
def forks():
    with contextlib.closing(fork_server()) as server:
        yield server
