"""Test a rollout: every pair of {stock vLLM, patched off, patched on} keeps transferring, and only on/on verifies.

Stock is the same vLLM with the series reverted (`rig.stock`).
"""

from __future__ import annotations

import itertools

import pytest
from rig.model import tiny_qwen3
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
    """Return P or D of one kind; on: fail-open, so that unverified loads are served."""
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
            for length in (40, 150):
                prompt = pairs.prompt_of(length, 600 + seed)
                asked, expected = pairs.ask_anew(p, d, [prompt] * 5, MAX_TOKENS)
                assert pairs.text_of(asked.answer) == expected, (left, right)
                assert asked.external_tokens == length, (left, right)
                verdict = "verified" if left == "on" else "unverified"
                counted = {verdict: 1} if right == "on" else {}
                assert asked.counted == counted, (left, right)
    assert "KV checksums not verified: no_payload" in consumers["on"].log_text()
    for server in (producers["stock"], consumers["stock"]):
        assert "vllm-kv-checksum is installed but not applied" in server.log_text()
        assert "KV checksum" not in server.log_text()
