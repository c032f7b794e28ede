# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run a connector through the suite."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.testing import tiers, transfers
from vllm.distributed.kv_transfer.kv_checksum.testing.problems import Problem
from vllm.distributed.kv_transfer.kv_checksum.testing.suite import (
    Suite,
    SuiteEndedError,
)

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_checksum.testing.factory import (
        ConnectorFactory,
    )

_TIERS = (KVChecksumCarrier.STORED, KVChecksumCarrier.LEDGER)


def check_connector(factory: ConnectorFactory) -> list[Problem]:
    """Run a connector through the suite and return what it does wrong.

    Args:
        factory: says how to make it.

    """
    cases = tiers if factory.carrier in _TIERS else transfers
    with ExitStack() as stack:
        suite = Suite(factory, stack)
        with suppress(SuiteEndedError), suite.case("start"):
            cases.check(suite)
        return list(suite.problems.values())


def assert_conforms(factory: ConnectorFactory) -> None:
    """Raise `AssertionError` with a line for each thing that a connector does wrong.

    Args:
        factory: says how to make it.

    """
    problems = check_connector(factory)
    if problems:
        lines = "\n".join(f"- {problem}" for problem in problems)
        raise AssertionError(f"{factory.connector} does not conform:\n{lines}")
