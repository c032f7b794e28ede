# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test each kind of fault of the machinery, alone and with all, on every carrier.

What a run asserts is said in `rig.faults.machinery`, which also runs more of them.
"""

from collections import Counter

import pytest

from .rig.faults.machinery import CARRIERS, run
from .rig.faults.records import KINDS

pytestmark = pytest.mark.campaign

SEEDS = 4

TOOK_EFFECT = {
    "preempt": [
        "between chunks",
        "no block is free",
        "right after the load",
        "the final prefill step in flight",
        "while decoding",
    ],
    "stale": [
        "output of a preempted request",
        "output of a request that ended",
        "sums of a request that ended",
        "sums of an earlier prefill",
    ],
    "drop": ["one rank", "one PP stage", "all"],
    "duplicate": [
        "in one step",
        "while awaited",
        "after the verdict",
        "while its id is loaded or sent again",
    ],
    "garble": [
        "blocks",
        "entries",
        "group",
        "layers",
        "number",
        "request",
        "tokens",
    ],
    "late": [
        "one rank",
        "one PP stage",
        "all",
        "still awaited",
        "after the verdict",
    ],
    "worker": ["replaced between load and verdict"],
    "restart": [
        "D",
        "D's loads under way",
        "P",
        "P, whose KV was to be loaded",
        "an instance that stores",
    ],
    "payload": ["lost", "late", "twice", "another request's", "another prefix's value"],
    "abort": [
        "P, step in flight",
        "D, loading",
        "D, step in flight",
        "store, step in flight",
        "its id reused",
    ],
    "load": ["failed_recving", "invalid block ids"],
}


@pytest.mark.parametrize("kind", [*KINDS, "all"])
def test_the_machinery_misbehaves(model, kind):
    counts: Counter[str] = Counter()
    outcomes: Counter[tuple[str, str]] = Counter()
    for seed in range(SEEDS):
        for carrier in CARRIERS:
            outcomes += run(model, carrier, kind, seed, counts)
    expected = {f"{kind}: {what}" for what in TOOK_EFFECT.get(kind, ())}
    assert expected <= counts.keys(), expected - counts.keys()
    assert outcomes["intact", "verified"] and outcomes["damaged", "mismatch"]
    assert outcomes["intact, not checked", "unverified"]
