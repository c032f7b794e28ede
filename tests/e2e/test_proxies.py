"""Test what routers between P and D make of the checksums.

The package index's vllm-router runs for real; the requests of others are replayed
from `data/routers.json`, which names their sources. No router makes a load *verified*
that is not, nor a good one a mismatch.
"""

from __future__ import annotations

from functools import partial

import pytest
from rig.exchanges import read, replay, text_of
from rig.model import tiny_qwen3
from rig.router import vllm_router
from rig.routing import prefill
from rig.servers import SERVED_NAME, free_port, serving

from e2e import pairs

pytestmark = pytest.mark.e2e

MAX_TOKENS = 4

EXCHANGES = read()

P_BLOCKS = 72
"""So few that a few other prompts overwrite what a request left in P."""


def exchanges_of(connector):
    return [
        pytest.param(exchange, id=exchange.router)
        for exchange in EXCHANGES
        if exchange.connector == connector
    ]


@pytest.fixture(scope="module")
def nixl(forks):
    """Yield a P with a small cache and two Ds that pull from it; one computes bad loads again."""
    model = tiny_qwen3()
    options = {"fork_server": forks}
    few = ["--num-gpu-blocks-override", str(P_BLOCKS)]
    p = pairs.producer("proxy-p", model, args=few, **options)
    modes = {"proxy-d": "fail-open", "proxy-other-d": "recompute"}
    ds = [
        pairs.consumer(name, model, mode, drill=False, **options)
        for name, mode in modes.items()
    ]
    with serving(p, *ds):
        yield p, *ds


@pytest.fixture(scope="module", params=["nixl_push", "mooncake"])
def known_before(forks, request):
    """Yield a P and a D whose router knows P's address and engine beforehand."""
    model = tiny_qwen3()
    options = {"fork_server": forks}
    options["connector"] = pairs.CONNECTORS[request.param]
    side_channel = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
    p = pairs.producer(f"proxy-{request.param}-p", model, env=side_channel, **options)
    p.transfer["engine_id"] = "the-engine-of-p"
    d = pairs.consumer(
        f"proxy-{request.param}-d", model, "fail-open", drill=False, **options
    )
    with serving(p, d):
        yield request.param, p, d


def check(exchange, p, d):
    """Replay it; what the client gets is right, and D's verdict what the file says."""
    number = EXCHANGES.index(exchange)
    prompt = pairs.prompt_of(150, 720 + number)
    (expected,) = pairs.reference_texts(p, [prompt], MAX_TOKENS)
    route = partial(replay, exchange)
    asked = pairs.ask(p, d, prompt, MAX_TOKENS, f"replayed-{number}", route)
    assert text_of(asked.answer) == expected
    if exchange.becomes == "no load":
        assert (asked.counted, asked.external_tokens) == ({}, 0)
    else:
        assert asked.counted == {exchange.becomes: 1}
        assert asked.external_tokens == len(prompt)


@pytest.mark.parametrize("exchange", exchanges_of("nixl_pull"))
def test_a_router_of_nixl_pull(nixl, exchange):
    p, d, _ = nixl
    check(exchange, p, d)


def test_routers_that_know_p_beforehand(known_before):
    connector, p, d = known_before
    found = [x for x in EXCHANGES if x.connector == connector]
    assert found
    for exchange in found:
        check(exchange, p, d)


def test_what_a_router_drops_is_said_once(nixl):
    p, _, d = nixl
    (dropping,) = [x for x in EXCHANGES if x.becomes == "unverified"]
    assert "KV checksums not verified" not in d.log_text()
    for number in range(2):
        prompt = pairs.prompt_of(150, 710 + number)
        route = partial(replay, dropping)
        asked = pairs.ask(p, d, prompt, MAX_TOKENS, f"dropping-{number}", route)
        assert asked.counted == {"unverified": 1}
    assert pairs.unverified(d, "no_payload") == 2
    line = "KV checksums not verified: no_payload"
    assert d.log_text().count(line) == 1, "the reason is said once"


def test_vllm_router_forwards_the_payload(nixl):
    p, d, _ = nixl
    with vllm_router(p, d) as router:

        def route(p, d, prompt, max_tokens, *, request_id):
            body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0}
            return router.post("/v1/completions", json={"model": SERVED_NAME} | body)

        for n in (40, 400):
            prompt = pairs.prompt_of(n, 700)
            (expected,) = pairs.reference_texts(p, [prompt], MAX_TOKENS)
            asked = pairs.ask(p, d, prompt, MAX_TOKENS, route=route)
            assert pairs.text_of(asked.answer) == expected
            assert (asked.counted, asked.external_tokens) == ({"verified": 1}, n)


def using(params):
    """Return a route that asks D alone, with what P answered before."""

    def route(p, d, prompt, max_tokens, *, request_id):
        return d.completions(prompt, max_tokens, params, request_id=request_id)

    return route


@pytest.mark.parametrize("overwritten", [False, True])
def test_an_answer_of_p_that_is_used_again_at_another_d(nixl, overwritten):
    """P frees the blocks when the first D has read them, and may give them to others.

    So does a router that does not hear from one D and asks the next.
    """
    p, d, other = nixl
    prompt = pairs.prompt_of(150, 730 + overwritten)
    (expected,) = pairs.reference_texts(p, [prompt], MAX_TOKENS)
    params = prefill(p, prompt, request_id=f"again-{overwritten}")
    route = using(params)

    first = pairs.ask(p, d, prompt, MAX_TOKENS, "first", route)
    if overwritten:
        others = [
            pairs.prompt_of(600, 740 + n) for n in range(2 * P_BLOCKS * 32 // 600)
        ]
        pairs.reference_texts(p, others, 1)
    second = pairs.ask(p, other, prompt, MAX_TOKENS, "second", route)
    assert [pairs.text_of(x.answer) for x in (first, second)] == [expected] * 2
    assert first.counted == {"verified": 1}
    assert second.counted == {"mismatch" if overwritten else "verified": 1}


def test_an_answer_of_p_that_is_used_again_at_the_same_d(nixl):
    """What D has itself it does not load; the rest is compared by the same payload."""
    p, d, _ = nixl
    prompt = pairs.prompt_of(150, 750)
    (expected,) = pairs.reference_texts(p, [prompt], MAX_TOKENS)
    params = prefill(p, prompt, request_id="twice")
    route = using(params)

    for external in (150, 150 - 128):
        asked = pairs.ask(p, d, prompt, MAX_TOKENS, f"twice-{external}", route)
        assert pairs.text_of(asked.answer) == expected
        assert (asked.counted, asked.external_tokens) == ({"verified": 1}, external)
