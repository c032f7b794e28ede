# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test every order of events, up to a number of unusual ones, around one or two loads.

What is real and which orders there are is said in `rig.orders.walk`. In each: one
verdict, failure or abort per load, and the counters say so; what is summed is what is
loaded; *verified* only with equal sums and those of all workers, and then the whole
prompt's KV is right, what was found locally included; fail-closed, nothing is
computed on bad KV; a payload that is sent is of what is in the blocks; in the end
nothing is left.
"""

from collections import Counter

import pytest

from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingSend

from .rig.orders.site import MODES, Setup
from .rig.orders.walk import walk

ASYNC_CARRIERS = ("kv_transfer_params", "connector", "stored", "none")


def setups():
    for ahead in (0, 1):
        for mode in MODES:
            for carrier in ASYNC_CARRIERS:
                yield Setup(mode, carrier, steps_ahead=ahead)
            # Loads in the step that uses them: whatever the carrier.
            yield Setup(mode, "stored", is_async=False, steps_ahead=ahead)
        yield Setup("open", "undeclared", steps_ahead=ahead)
        yield Setup("open", "undeclared", is_async=False, steps_ahead=ahead)
        for carrier in ("kv_transfer_params", "connector"):
            yield Setup("open", carrier, role="send", steps_ahead=ahead)
    for mode in MODES:
        for carrier in ("connector", "stored"):
            yield Setup(mode, carrier, steps_ahead=1, deferred=True)


SETUPS = list(setups())


def walk_all(model, log, names, most, setups=SETUPS):
    """Walk every setup; how many orders there were."""
    number, ends = 0, Counter()
    for setup in setups:
        orders, became = walk(model, setup, names, most)
        number += orders
        ends += became
        log.clear()
    print(f"{number} orders of {names!r} with up to {most} unusual events: {ends}")
    assert ends.keys() == {
        "verified",
        "mismatch",
        "unverified",
        "failed",
        "aborted",
        "declined",
    }
    return number


def test_one_unusual_event(model, log):
    assert walk_all(model, log, "a", 1) > 700
    assert walk_all(model, log, "ab", 1) > 1_500


@pytest.mark.campaign
def test_three_unusual_events_of_one_request(model, log):
    assert walk_all(model, log, "a", 3) > 40_000


@pytest.mark.campaign
@pytest.mark.parametrize("ahead", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_two_unusual_events_of_requests_that_share_a_prefix(model, log, ahead):
    setups = [setup for setup in SETUPS if setup.steps_ahead == ahead]
    assert walk_all(model, log, "ab", 2, setups) > 15_000


def test_a_rule_that_is_broken_is_seen(model, log, monkeypatch):
    """Sums of a load that one worker did not report are never good enough."""
    monkeypatch.setattr(PendingSend, "check_reports", lambda *_: None)
    with pytest.raises(AssertionError) as found:
        walk(model, Setup(carrier="stored"), "a", 1)
    assert "requests 'a', choices" in found.value.__notes__[0]
