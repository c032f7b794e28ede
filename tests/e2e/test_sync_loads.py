"""Connectors that load KV in the very step that uses it.

vLLM's OffloadingConnector with a budget for such loads and its ExampleConnector, and the rig's own connector outside vLLM's
tree. Rig only: forked servers; OffloadingConnector copies without a GPU's streams.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rig import tampering
from rig.families import tiny
from rig.servers import serving

from e2e import pairs, reloads
from e2e.reloads import BLOCK, LOADED

pytestmark = pytest.mark.e2e

BYTES_PER_TOKEN = 2 * 2 * 64 * 4
"""In one layer: keys and values, heads, their size, float32."""

ASYNC = {
    "args": ("--async-scheduling",),
    "env": {"KV_CHECKSUM_RIG_ASYNC_SCHEDULING": "1"},
}
"""What makes a server schedule a step before the last one's output is there, which vLLM drops on CPUs."""

SERVERS = {
    "offloading": (
        "OffloadingConnector",
        {"extra": {**reloads.OFFLOADING, "sync_load_budget_bytes": 64 << 20}},
    ),
    "host-store": ("HostStore", {"transfer": reloads.HOST_STORE, **ASYNC}),
    "host-store-later": (
        "HostStore",
        {"transfer": reloads.HOST_STORE, "extra": {"asynchronous": True}},
    ),
}


@pytest.fixture(scope="module", params=SERVERS)
def served(request, common):
    """A fail-open server."""
    connector, options = SERVERS[request.param]
    server = reloads.instance(f"sync-{request.param}", connector, **options, **common)
    with serving(server):
        reloads.computed(server)
        yield server


def test_loads_are_verified(served):
    known = reloads.computed(served)
    answer = reloads.load_again(served, known.prompt)
    assert answer.judged == {("verified", "ledger"): 1}
    assert pairs.unverified(served, "sync_load") == 0


@pytest.mark.parametrize("kind", reloads.DAMAGE)
def test_damage_in_the_store_is_a_mismatch(kind, served):
    known, answer, report = reloads.damaged(served, kind)
    assert known.differing(served, answer) == {0: report["positions"]}
    assert answer.judged == {("mismatch", "ledger"): 1}
    # What is bad serves nobody else from the prefix cache.
    after = reloads.ask(served, known.prompt)
    assert after.local <= report["positions"][0] * BLOCK
    assert after.text == known.text


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    return tmp_path_factory.mktemp("example")


@pytest.fixture(scope="module")
def example(common, files):
    """ExampleConnector keeps a file per layer and prompt."""
    server = reloads.instance(
        "sync-example",
        "ExampleConnector",
        extra={"shared_storage_path": str(files)},
        **common,
    )
    with serving(server):
        yield server


def test_files_of_vllms_example(example, files):
    others = set(files.rglob("*.safetensors"))
    known = reloads.computed(example)
    again = reloads.load_again(example, known.prompt)
    assert again.judged == {("verified", "ledger"): 1}
    # Its tensors are in the order of tokens: the last byte is the last block's.
    # Other prompts, which evicted this one, are longer or shorter.
    size = LOADED * BYTES_PER_TOKEN
    file = min(
        set(files.rglob("*.safetensors")) - others,
        key=lambda path: abs(path.stat().st_size - size),
    )
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    answer = reloads.load_again(example, known.prompt)
    assert answer.external == LOADED
    assert known.differing(example, answer) == {0: [LOADED // BLOCK - 1]}
    assert answer.judged == {("mismatch", "ledger"): 1}


CLOSED = {
    "offloading": SERVERS["offloading"],
    "host-store": (
        "HostStore",
        {"transfer": reloads.HOST_STORE, **ASYNC},
    ),
}


def closed(name, mode, common):
    connector, options = CLOSED[name]
    return reloads.instance(
        f"sync-{name}-{mode}", connector, mode=mode, **options, **common
    )


@pytest.mark.parametrize("name", CLOSED)
@pytest.mark.parametrize("mode", ["fail", "recompute"])
def test_no_answer_rests_on_a_bad_load(mode, name, common):
    """Nor does one of a request that hits the blocks while they are being checked."""
    with serving(server := closed(name, mode, common)):
        reloads.computed(server)
        for number, kind in enumerate(("bit_flip", "other_prefix", "swapped")):
            settings = reloads.DAMAGE[kind]
            known = reloads.computed(server)
            longer = known.prompt + pairs.prompt_of(40, number)
            expected = [
                known.text,
                pairs.text_of(server.completions(longer, reloads.MAX_TOKENS)),
            ]
            reloads.evict(server)
            before = server.metric("vllm:kv_checksum_loads_total", verdict="mismatch")
            with tampering.damaged_load(server, kind, **settings):
                responses = together(server, [known.prompt, longer])
            after = server.metric("vllm:kv_checksum_loads_total", verdict="mismatch")
            assert after > before
            for response, text in zip(responses, expected, strict=True):
                if mode == "fail" and response.is_error:
                    pairs.assert_failed(response)
                else:
                    assert pairs.text_of(response) == text
            assert mode == "recompute" or responses[0].is_error
            again = reloads.load_again(server, known.prompt)
            assert again.text == known.text
            assert ("mismatch", "ledger") not in again.judged


def together(server, prompts):
    """Ask for prompts a moment after each other, while the first one's step runs."""
    with ThreadPoolExecutor() as pool:
        answers = []
        for prompt in prompts:
            answers.append(pool.submit(server.completions, prompt, reloads.MAX_TOKENS))
            time.sleep(0.03)
        return [answer.result() for answer in answers]


@pytest.mark.parametrize("mode", ["fail", "recompute"])
def test_a_bad_load_with_several_groups(mode, forks):
    """Stock vLLM has no way to go on here and its engine dies; this one answers right or not at all."""
    server = reloads.instance(
        f"sync-windows-{mode}",
        "HostStore",
        mode=mode,
        transfer=reloads.HOST_STORE,
        model=tiny("gemma3"),
        fork_server=forks,
        args=(*ASYNC["args"], "--num-gpu-blocks-override", "64"),
        env=ASYNC["env"],
    )
    with serving(server):
        reloads.computed(server)
        for group in range(3):
            options = {"group": group, "block": -1}
            known, answer, _ = reloads.damaged(server, "bit_flip", options)
            assert answer.judged == {("mismatch", "ledger"): 1}
            if mode == "fail" or answer.response.is_error:
                pairs.assert_failed(answer.response)
            else:
                assert answer.text == known.text
            assert reloads.load_again(server, known.prompt).text == known.text


@pytest.mark.xfail(
    strict=True,
    reason="vLLM 0.33.0 takes a running request back, and the worker of Model Runner V2 goes on where it was",
)
def test_vllm_recomputes_what_its_connector_could_not_load(common):
    """The path of vLLM's own for failed synchronous loads, without any checksum."""
    server = reloads.instance(
        "sync-noticed",
        "HostStore",
        extra={"notices": True},
        transfer={**reloads.HOST_STORE, "kv_load_failure_policy": "recompute"},
        **common,
    )
    with serving(server):
        reloads.computed(server)
        known = reloads.computed(server)
        reloads.evict(server)
        with tampering.damaged_load(server, "other_prefix", block=2):
            response = server.completions(known.prompt, reloads.MAX_TOKENS)
        assert "Recovered from KV load failure" in server.log_text()
        assert pairs.text_of(response) == known.text
