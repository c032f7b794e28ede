"""Rolling out: every pair of {stock vLLM, patched off, patched on} keeps transferring, and only on/on verifies.

Stock is the same vLLM with the series reverted (`rig.stock`).
"""

from __future__ import annotations

import itertools

import pytest
from rig.model import tiny_qwen3
from rig.routing import prefill_decode
from rig.servers import Server, serving
from rig.stock import stock_fork_server

from e2e import pairs

pytestmark = pytest.mark.e2e

KINDS = ("stock", "off", "on")

MAX_TOKENS = 4


@pytest.fixture(scope="module")
def stock():
    forks, env = stock_fork_server()
    with forks:
        yield {"fork_server": forks, "env": env}


def instance(side: str, kind: str, carrier: str, forks, stock) -> Server:
    """P or D of one kind; on: fail-open, so that unverified loads are served."""
    origin = stock if kind == "stock" else {"fork_server": forks}
    return Server(
        f"mixed-{carrier}-{side}-{kind}",
        {"p": "kv_producer", "d": "kv_consumer"}[side],
        model=tiny_qwen3(),
        connector=pairs.CONNECTORS[carrier],
        transfer={"enable_kv_checksum": True} if kind == "on" else {},
        **origin,
    )


@pytest.mark.parametrize("carrier", pairs.CONNECTORS)
def test_every_pair_transfers_and_only_on_on_verifies(carrier, forks, stock):
    producers, consumers = (
        {kind: instance(side, kind, carrier, forks, stock) for kind in KINDS}
        for side in "pd"
    )
    with serving(*producers.values(), *consumers.values()):
        for seed, (left, right) in enumerate(itertools.product(KINDS, KINDS)):
            p, d = producers[left], consumers[right]
            before = pairs.loads(d)
            external = pairs.external_tokens(d)
            for length in (40, 150):
                prompt = pairs.prompt_of(length, 600 + seed)
                expected = pairs.reference_texts(p, [prompt], MAX_TOKENS)
                answer = prefill_decode(p, d, prompt, MAX_TOKENS)
                assert [pairs.text_of(answer)] == expected, (left, right)
            assert pairs.external_tokens(d) == external + 190, (left, right)
            counted = {k: v - before[k] for k, v in pairs.loads(d).items()}
            verified, unverified = 2 * (left == right == "on"), 2 * (right == "on")
            assert counted == {
                "verified": verified,
                "mismatch": 0,
                "unverified": unverified - verified,
            }, (left, right)
    assert "KV checksums not verified: no_payload" in consumers["on"].log_text()
    for server in (producers["stock"], consumers["stock"]):
        assert "vllm-kv-checksum is installed but not applied" in server.log_text()
        assert "KV checksum" not in server.log_text()
