# SPDX-License-Identifier: Apache-2.0
"""Send damaged parameters as a client can: none of them quarantines a good engine."""

from collections import Counter
from random import Random

import msgspec
import numpy as np
import pybase64 as base64
import pytest

from fuzz.base import quiet
from fuzz.loads import Case, Load, right_payload
from fuzz.mutate import OTHERS, mutate
from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.scheduler.peers import Peer

CASE = Case(fail_closed=False)
RIGHT = wire.encode_text(right_payload(CASE))
TREE = wire.encode(right_payload(CASE))
GOOD = {"remote_engine_id": "good", "remote_host": "h", "do_remote_prefill": True}


def cut(random):
    """Return a payload that ends too early, or none at all."""
    return random.choice((RIGHT[: random.randrange(len(RIGHT))], random.choice(OTHERS)))


def noise(random):
    return base64.b64encode(random.randbytes(random.randrange(300))).decode()


def of_another_prompt(random):
    """Return a payload that fits in form, with a digest and sums of another prompt."""
    payload = _other_sums(random)
    other = payload.prompt.whole ^ random.randrange(1, 2**64)
    payload.prompt = payload.prompt._replace(whole=other or 1)
    return wire.encode_text(payload)


def with_other_sums(random):
    """Return a payload of the right prompt with sums that the client made up.

    So does one that is sent again when its producer has given the blocks away.
    """
    return wire.encode_text(_other_sums(random))


def _other_sums(random):
    payload = right_payload(CASE)
    values = payload.groups[0].values.copy()
    for _ in range(random.randrange(1, 4)):
        at, change = random.randrange(len(values)), random.randrange(1, 2**64)
        values[at] ^= np.uint64(change)
    payload.groups[0].values = values
    return payload


def with_another_node(random):
    tree = mutate(msgspec.msgpack.decode(TREE, strict=False), random)
    return base64.b64encode(msgspec.msgpack.encode(tree)).decode()


HARMLESS = (cut, noise, of_another_prompt)
ALL = (*HARMLESS, with_other_sums, with_another_node)

MANY = [
    pytest.param(10_000, id="10 thousand"),
    pytest.param(500_000, id="500 thousand", marks=pytest.mark.slow),
]
"""Both settings together send twice as many."""


def consumer(from_requests):
    settings = {
        "kv_checksum_quarantine": 1,
        "kv_checksum_quarantine_from_requests": from_requests,
    }
    return Load(CASE, True, **settings)


def send(load, number, kinds):
    """Return how the loads of a client's requests ended, each of another request."""
    random, outcomes = Random(number), Counter()
    quarantine = load.scheduler._quarantine
    with quiet():
        for n in range(number):
            text = random.choice(kinds)(random)
            params = {**GOOD, "remote_request_id": f"{n}", "kv_checksums": text}
            verdict = load.run(params)
            outcomes["other" if verdict.other_prompt else verdict.outcome] += 1
            if len(quarantine):
                break
    return outcomes


@pytest.mark.parametrize("number", MANY)
@pytest.mark.parametrize("from_requests", [False, True])
def test_damaged_parameters_quarantine_nobody(number, from_requests):
    load = consumer(from_requests)
    outcomes = send(load, number, HARMLESS if from_requests else ALL)
    assert sum(outcomes.values()) == number and outcomes["other"] > number // 10
    assert outcomes["unverified"] > number // 10
    assert (outcomes["mismatch"] > number // 10) == (not from_requests)
    quarantine = load.scheduler._quarantine
    assert len(quarantine) == 0 and not quarantine.holds(Peer("good", "h"))


def test_the_same_load_counts_where_the_operator_trusts_requests():
    """Else the tests above could not fail."""
    load = consumer(from_requests=True)
    assert send(load, 1, [with_other_sums]) == {"mismatch": 1}
    assert load.scheduler._quarantine.holds(Peer("good", "h"))
