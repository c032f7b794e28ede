"""Test a real server that offloads KV to host memory (SimpleCPUOffloadConnector).

Rig only: forked, and blocks are copied at once where vLLM would queue copies between
device and host memory. Loads are damaged by the fault drill, or by those copies.
"""

from __future__ import annotations

import time

import pytest
from rig import tampering
from rig.model import tiny_qwen3
from rig.servers import Server, serving

from e2e import pairs, reloads
from e2e.reloads import LOADED

pytestmark = pytest.mark.e2e

PROMPT = pairs.prompt_of(200, 21)
MAX_TOKENS = 8


@pytest.fixture(scope="module")
def server(forks):
    options = {
        "cpu_bytes_to_use": 32 << 20,
        "kv_checksum_fault_drill": {
            "damage_kv_on_purpose": True,
            "connector": "SimpleCPUOffloadConnector",
            "faults": {"flip-": {"kind": "bit_flip", "skip": 2}},
        },
    }
    transfer = {
        "enable_kv_checksum": True,
        **pairs.MODES["recompute"],
        "kv_connector": "KVChecksumFaultDrill",
        "kv_connector_module_path": pairs.DRILL,
        "kv_connector_extra_config": options,
    }
    made = Server(
        "offload",
        "kv_both",
        model=tiny_qwen3(),
        connector="SimpleCPUOffloadConnector",
        transfer=transfer,
        fork_server=forks,
        env={"VLLM_SERVER_DEV_MODE": "1"},
    )
    with serving(made):
        yield made


def ask(server, request_id):
    """Ask for the prompt with nothing of it in the server's own prefix cache."""
    until = time.monotonic() + 10
    # Blocks that are being offloaded hold the cache for a moment.
    while not server.post("/reset_prefix_cache").json()["success"]:
        assert time.monotonic() < until
        time.sleep(0.1)
    return pairs.text_of(server.completions(PROMPT, MAX_TOKENS, request_id=request_id))


def counts(server):
    dropped = server.metric("vllm:kv_checksum_stored_blocks_dropped_total")
    return (*pairs.loads(server).values(), int(dropped))


def test_offloaded_blocks_are_verified_dropped_and_offloaded_anew(server):
    expected = ask(server, "first")
    assert counts(server) == (0, 0, 0, 0)
    assert ask(server, "clean") == expected
    assert counts(server) == (1, 0, 0, 0)
    assert server.metric("vllm:kv_checksum_blocks_compared_total") == 6
    # A flipped bit: found, the block dropped, the answer right all the same.
    assert ask(server, "flip-1") == expected
    assert counts(server) == (1, 1, 0, 1)
    assert "; recomputing from token 64" in server.log_text()
    # The recompute offloaded good KV.
    assert ask(server, "again") == expected
    assert counts(server) == (2, 1, 0, 1)
    assert "Loads of offloaded KV are checked" in server.log_text()


@pytest.fixture(scope="module")
def lazy(forks):
    """Blocks are stored when they are about to be evicted, and no checksums with them."""
    made = reloads.instance(
        "offload-lazy",
        "SimpleCPUOffloadConnector",
        extra={"cpu_bytes_to_use": 32 << 20, "lazy_offload": True},
        model=tiny_qwen3("float32"),
        dtype="float32",
        fork_server=forks,
    )
    with serving(made):
        yield made


def test_lazily_offloaded_blocks(lazy):
    prompt = pairs.prompt_of(reloads.LENGTH, 30)
    expected = reloads.ask(lazy, prompt).text
    reloads.evict(lazy)
    again = reloads.ask(lazy, prompt)
    assert (again.external, again.text) == (LOADED, expected)
    assert again.judged == {("verified", "ledger"): 1}
    reloads.evict(lazy)
    with tampering.damaged_load(lazy, "stale", block=1):
        again = reloads.ask(lazy, prompt)
    assert again.external == LOADED
    assert again.text != expected
    assert again.judged == {("mismatch", "ledger"): 1}
