"""Test data parallel ranks that are instances of their own, between which a router balances.

vLLM starts them so for models with experts alone, and tells these by a number in their
configuration. The one here has none in its layers, as vLLM's CPU communicator cannot
exchange what experts compute (`all_gatherv`). All else is as with them: the ranks
compute in step, and while one serves, the others run empty batches.
"""

from __future__ import annotations

import itertools
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from rig.model import tiny_qwen3
from rig.routing import prefill_decode
from rig.servers import HOST, Server, free_port, serving

from e2e import pairs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAX_TOKENS = 4
RANKS = (0, 1)


@pytest.fixture(scope="module")
def site(forks, request):
    """Yield the ranks of a P, and those of a D."""
    common = {"connector": pairs.CONNECTORS[request.param], "fork_server": forks}
    name = f"external-{request.param}"

    def ranks(side, start, *mode):
        port, address = str(free_port()), ("--data-parallel-address", HOST)
        args = ("--data-parallel-size", str(len(RANKS)), *address)
        args += ("--data-parallel-rpc-port", port, "--data-parallel-rank")
        args = ("--hf-overrides", '{"num_experts": 4}', *args)
        # Ranks of one NUMA node; an engine that is one of several has its own process.
        env = {"VLLM_CPU_SIM_MULTI_NUMA": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
        return [
            start(
                f"{name}-{side}{rank}",
                tiny_qwen3(),
                *mode,
                args=[*args, str(rank)],
                env=env,
                **common,
            )
            for rank in RANKS
        ]

    ps = ranks("p", pairs.producer)
    ds = ranks("d", pairs.consumer, "recompute")
    with serving(*ps, *ds):
        yield ps, ds


def judged(server: Server) -> Counter[tuple[str, str]]:
    """Return how many loads had each verdict, with the label of the engine."""
    return Counter(
        {
            (dict(labels)["engine"], dict(labels)["verdict"]): int(value)
            for (name, labels), value in server.metrics().items()
            if name == "vllm:kv_checksum_loads_total" and value
        }
    )


@pytest.mark.parametrize("site", pairs.CONNECTORS, indirect=True)
def test_every_rank_verifies_every_rank(site):
    ps, ds = site
    kinds = {"clean": "verified", "flip": "mismatch"}
    cases = itertools.product(RANKS, RANKS, kinds.items())
    for number, (p_rank, d_rank, (begins, verdict)) in enumerate(cases):
        before = [judged(d) for d in ds]
        asked, expected = pairs.ask_anew(
            ps[p_rank],
            ds[d_rank],
            pairs.prompts_of(150, 4000 + number),
            MAX_TOKENS,
            f"{begins}-{number}",
        )
        assert pairs.text_of(asked.answer) == expected
        assert asked.counted == {verdict: 1}
        grown = [judged(d) - was for d, was in zip(ds, before, strict=True)]
        assert grown[d_rank] == Counter({(str(d_rank), verdict): 1})
        assert not grown[1 - d_rank], "a rank counts what another loaded"


@pytest.mark.parametrize("site", ["nixl_pull", "nixl_push"], indirect=True)
def test_a_router_balances_and_nothing_is_mixed_up(site):
    ps, ds = site
    prompts = [pairs.prompt_of(150 + n, 4500) for n in range(24)]
    expected = pairs.reference_texts(ps[0], prompts, MAX_TOKENS)
    before = [judged(d) for d in ds], [pairs.given_up(d) for d in ds]

    def ask(number):
        p, d = ps[number % 2], ds[number // 2 % 2]
        return prefill_decode(p, d, prompts[number], MAX_TOKENS)

    with ThreadPoolExecutor(6) as threads:
        answers = threads.map(ask, range(len(prompts)))
        assert [pairs.text_of(answer) for answer in answers] == expected
    for rank, d in enumerate(ds):
        loaded = len(prompts) // 2 - (pairs.given_up(d) - before[1][rank])
        grown = judged(d) - before[0][rank]
        assert grown == Counter({(str(rank), "verified"): loaded})
