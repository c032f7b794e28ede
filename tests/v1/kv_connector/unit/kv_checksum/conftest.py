# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check what holds for every test, and collect the lines that vLLM logs."""

import logging
import sys

import pytest


@pytest.fixture
def log():
    """Yield lines that vLLM logs in this process, each after its level."""
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
    """Check every instance of every test, whatever the test is about."""
    instances = sys.modules.get(f"{__package__}.rig.instances")
    if instances is None:  # no test module makes any
        yield
        return
    with instances.every_load_has_one_verdict():
        yield


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    from .rig import instances

    return instances.write_model(tmp_path_factory.mktemp("model"))


def pytest_generate_tests(metafunc):
    """Run tests that ask for a transport over each that is here, workers faked."""
    if "transport" in metafunc.fixturenames:
        from .rig import transports

        metafunc.parametrize("transport", transports.FAKES)
