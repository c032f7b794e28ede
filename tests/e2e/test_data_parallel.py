"""Test instances with several engines: the right engine's sums, and verdicts told by engine.

A request is given a rank on either side by vLLM's header, or none, and vLLM balances.
External load balancing vLLM refuses for models without experts: there, ranks are
instances of their own.
"""

from __future__ import annotations

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
from rig.model import tiny_qwen3
from rig.routing import prefill_decode
from rig.servers import serving

from e2e import pairs

pytestmark = pytest.mark.e2e

MAX_TOKENS = 4


@pytest.fixture(scope="module", params=pairs.CONNECTORS.values(), ids=pairs.CONNECTORS)
def site(forks, request):
    """Yield a P and a D of one engine, and a P and a D of two."""
    model = tiny_qwen3()
    options = {"connector": request.param, "fork_server": forks}
    ps, ds = [], []
    for dp in (1, 2):
        args = ["--api-server-count", "1"] if dp > 1 else []
        options |= {"dp": dp, "args": args}
        name = f"dp{dp}-{request.param}"
        ps.append(pairs.producer(f"{name}-p", model, **options))
        ds.append(pairs.consumer(f"{name}-d", model, "recompute", **options))
    with serving(*ps, *ds):
        yield ps, ds


def by_engine(server, verdict):
    """Return how many loads had a verdict, by the label of the engine."""
    return {
        dict(labels)["engine"]: int(value)
        for (name, labels), value in server.metrics().items()
        if name == "vllm:kv_checksum_loads_total"
        and dict(labels)["verdict"] == verdict
        and value
    }


@pytest.mark.parametrize(("p_dp", "d_dp"), [(2, 1), (1, 2), (2, 2)])
def test_every_rank_verifies_every_rank(site, p_dp, d_dp):
    p, d = site[0][p_dp - 1], site[1][d_dp - 1]
    kinds = {"clean": "verified", "flip": "mismatch"}
    cases = itertools.product(range(p_dp), range(d_dp), kinds.items())
    for number, (p_rank, d_rank, (begins, verdict)) in enumerate(cases):
        prompts = pairs.prompts_of(150, 3000 + 100 * p_dp + 50 * d_dp + number)
        name = f"{begins}-{p_dp}{d_dp}{number}"
        before = by_engine(d, verdict)
        asked, expected = pairs.ask_anew(
            p, d, prompts, MAX_TOKENS, name, ranks=(p_rank, d_rank)
        )
        assert pairs.text_of(asked.answer) == expected
        assert asked.counted == {verdict: 1}
        engine = str(d_rank)
        now = by_engine(d, verdict)
        assert now == before | {engine: before.get(engine, 0) + 1}


def test_vllm_balances_and_nothing_is_mixed_up(site):
    p, d = site[0][1], site[1][1]
    # Mooncake's router tells D the engine of P that it asks.
    ranks = [(n % 2, None) for n in range(24)]
    if p.connector != "MooncakeConnector":
        ranks = [(None, None)] * 24
    prompts = [pairs.prompt_of(150 + n, 3500) for n in range(24)]
    expected = pairs.reference_texts(p, prompts, MAX_TOKENS)
    before = by_engine(d, "verified"), pairs.loads(d), pairs.given_up(d)
    with ThreadPoolExecutor(6) as threads:
        asked = threads.map(
            lambda prompt, ranks: prefill_decode(p, d, prompt, MAX_TOKENS, ranks=ranks),
            prompts,
            ranks,
        )
        assert [pairs.text_of(answer) for answer in asked] == expected
    now = by_engine(d, "verified"), pairs.loads(d), pairs.given_up(d)
    assert all(now[0][e] > before[0].get(e, 0) for e in "01"), "one engine did all"
    grown = {verdict: now[1][verdict] - before[1][verdict] for verdict in now[1]}
    loaded = len(prompts) - (now[2] - before[2])
    assert grown == {"verified": loaded, "mismatch": 0, "unverified": 0}
