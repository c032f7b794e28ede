# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test requests that are to be loaded and sent on: an ordinary load, offered once."""

import pytest
import torch

from .rig import instances as rig
from .rig import transports
from .rig.instances import pair, tokens

CARRIERS = [name for name in ("pull", "push") if name in transports.FAKES]

CLOSED = {
    policy: dict(kv_checksum_fail_closed=True, policy=policy)
    for policy in ("fail", "recompute")
}


def load_to_be_sent_on(p, d, damaged):
    """Return D's request, once no step changes anything any more."""
    prompt = tokens(100)
    params = rig.prefill(p, "p", prompt) | {"do_remote_decode": True}

    def damage(req_id, block_ids):
        d.kv[0][block_ids[0][0]].view(torch.uint8).bitwise_xor_(0x40)

    if damaged:
        d.loaded = damage
    request = d.add("r", prompt, params, max_tokens=2)
    for _ in range(12):
        p.step(d)
        d.step(p)
    return request


@pytest.mark.parametrize("policy", CLOSED)
@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_damaged_load_of_a_request_to_be_sent_on_ends(model, carrier, policy):
    p, d = pair(model, None, CLOSED[policy], transport=carrier)
    request = load_to_be_sent_on(p, d, damaged=True)
    assert request.is_finished(), "it waits for a load that nobody started"
    assert d.loads("mismatch") == d.stats["loads_started"] == 1
    ended = {"fail": "FINISHED_ERROR", "recompute": "FINISHED_LENGTH_CAPPED"}
    assert request.status.name == ended[policy]


@pytest.mark.parametrize("carrier", CARRIERS)
def test_a_clean_load_of_a_request_to_be_sent_on_is_verified(model, carrier):
    p, d = pair(model, None, CLOSED["fail"], transport=carrier)
    request = load_to_be_sent_on(p, d, damaged=False)
    assert request.status.name == "FINISHED_LENGTH_CAPPED"
    assert d.loads("verified") == d.stats["loads_started"] == 1
