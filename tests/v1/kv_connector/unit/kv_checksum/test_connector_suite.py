# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test the suite for authors of connectors: right ones pass, broken ones are named."""

import pytest

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.testing import (
    ConnectorFactory,
    assert_conforms,
    check_connector,
)
from vllm.distributed.kv_transfer.kv_checksum.testing.problems import ADVICE, Fault

from .rig.authors import broken, folder, memory


@pytest.fixture
def factory(tmp_path):
    """Return a function that describes a connector of one of the authors' modules."""

    def describe(connector, carrier="CONNECTOR", **extra):
        made = ConnectorFactory()
        made.connector = connector.__name__
        made.module_path = connector.__module__
        made.extra_config = {"folder": str(tmp_path), "store": str(tmp_path), **extra}
        made.carrier = KVChecksumCarrier[carrier]
        return made

    return describe


@pytest.mark.parametrize(
    ("connector", "carrier", "extra"),
    [
        (folder.FolderConnector, "CONNECTOR", {}),
        (broken.InParams, "KV_TRANSFER_PARAMS", {}),
        (memory.MemoryConnector, "STORED", {}),
        (memory.UnstoredConnector, "LEDGER", {}),
        (memory.UnstoredConnector, "LEDGER", {"sync": True}),
    ],
)
def test_right_connectors_conform(factory, connector, carrier, extra):
    assert_conforms(factory(connector, carrier, **extra))


def found(factory):
    return {problem.name: problem for problem in check_connector(factory)}


BROKEN = {
    broken.Raises: "raised",
    broken.FindsNothing: "nothing_loaded",
    broken.NeverReports: "never_finished",
    broken.Fails: "load_failed",
    broken.ReportsTwice: "reported_twice",
    broken.ReportsEarly: "reported_before_arrival",
    broken.ShiftsABlock: "wrong_blocks",
    broken.WritesOtherBlocks: "other_blocks_written",
    broken.ReportsFromTheScheduler: "verdict_lost",
    broken.DeclaresNoLoads: "other_carrier",
    broken.DeclaresNoSends: "checksums_not_sent",
    broken.LosesChecksums: "checksums_lost",
    broken.SendsLate: "checksums_late",
    broken.CutsChecksums: "checksums_changed",
    broken.KeepsChecksumsByOrder: "checksums_of_another_request",
    broken.NamesTheProducer: "checksums_of_no_load",
    broken.WantsChecksums: "needs_both_sides",
    broken.DropsParams: "checksums_lost",
    broken.LeavesEntries: "stored_checksums_wrong",
    broken.SumsAnew: "damage_not_seen",
    broken.KeepsBadValues: "bad_values_kept",
    broken.IgnoresTheLimit: "limit_ignored",
}
"""What the suite says of connectors that are broken in one way."""

CARRIERS = {
    folder.FolderConnector: "CONNECTOR",
    broken.InParams: "KV_TRANSFER_PARAMS",
    memory.MemoryConnector: "STORED",
    memory.UnstoredConnector: "LEDGER",
}


def carrier_of(connector):
    return next(CARRIERS[c] for c in connector.__mro__ if c in CARRIERS)


@pytest.mark.parametrize("connector", BROKEN, ids=lambda connector: connector.__name__)
def test_a_broken_connector_is_named_for_what_it_does(factory, connector):
    made = factory(connector, carrier_of(connector))
    made.timeout_s = 1.0 if connector is broken.NeverReports else 30.0
    problems = found(made)
    assert list(problems) == [BROKEN[connector]], [*map(str, problems.values())]


def with_settings(made, **settings):
    """Let every instance of a factory have further settings."""
    plain = made.settings
    made.settings = lambda role: plain(role) | settings
    return made


def test_a_connector_whose_loads_nobody_checks_is_named(factory):
    made = factory(memory.UnstoredConnector, "LEDGER")
    (problem,) = check_connector(with_settings(made, kv_checksum_ledger_blocks=0))
    assert problem.name == "not_covered" and problem.cases == ["start"]
    assert "UnstoredConnector neither carries nor stores" in problem.detail


def test_a_load_that_cannot_be_compared_is_named_with_its_reason(factory):
    """Keep a ledger that forgets what a load needs."""
    made = factory(memory.UnstoredConnector, "LEDGER")
    (problem,) = check_connector(with_settings(made, kv_checksum_ledger_blocks=1))
    assert problem.name == "unverified" and "not_in_ledger" in problem.detail


def test_every_fault_has_a_connector_that_shows_it_and_advice():
    shown = {*BROKEN.values(), "not_covered", "unverified"}
    assert shown == {fault.value for fault in Fault} and {*ADVICE} == {*Fault}


def test_what_is_wrong_is_said_in_words(factory):
    with pytest.raises(AssertionError) as error:
        assert_conforms(factory(broken.ShiftsABlock))
    title, *lines = str(error.value).splitlines()
    assert title == "ShiftsABlock does not conform:"
    (line,) = lines
    assert line.startswith(
        "- wrong_blocks (a load of 48 tokens and 4 more cases): blocks at positions "
        "[0, 1, 2] of cmpl-1-0-bbbbbbbb do not hold its KV. Map block to block by "
    )


def test_an_exception_is_told_with_its_text(factory):
    (problem,) = check_connector(factory(broken.Raises))
    assert problem.detail == "AssertionError: cannot send"
