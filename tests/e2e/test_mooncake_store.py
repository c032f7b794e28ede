"""Test real servers that store KV in a real Mooncake store over TCP, and load it from there.

The servers are forked from one process that imported vLLM (rig only). Values are
damaged by a real client of the store.
"""

from __future__ import annotations

import json
import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from rig import processes
from rig.model import tiny_qwen3
from rig.mooncake_store import MooncakeStore, key
from rig.servers import Server, free_port, serving

from e2e import pairs

pytestmark = pytest.mark.e2e

MAX_TOKENS = 8
BLOCK = 32
NONE = {"verified": 0, "mismatch": 0, "unverified": 0, "dropped": 0}
LENGTHS = (70, 100, 161, 225, 400, 1500)
LEASE_S = 2
"""For how long Mooncake keeps a value for whoever is about to read it."""

CHECKED = {"enable_kv_checksum": True, **pairs.MODES["recompute"]}


@pytest.fixture(scope="module")
def model():
    return tiny_qwen3("float32")


@pytest.fixture(scope="module")
def hashes():
    """Return the block hashes of a prompt, as the servers compute them."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        init_none_hash(sha256)

    def compute(prompt):
        hasher = get_request_block_hasher(BLOCK, sha256)
        params = SamplingParams(max_tokens=1)
        request = Request("r", list(prompt), params, None, block_hasher=hasher)
        return list(request.block_hashes)

    return compute


@pytest.fixture(scope="module")
def reference(forks, model):
    """Yield a single instance without a connector."""
    common = dict(model=model, dtype="float32", fork_server=forks)
    with serving(server := Server("store-reference", None, **common)):
        yield server


@dataclass
class Fleet:
    """A stores; B, which stores nothing itself, loads and recomputes."""

    tp: int
    model: Path
    store: MooncakeStore
    a: Server
    b: Server

    def keys(self, block_hash: bytes, **which: bool) -> list[str]:
        """Return the block's keys of all ranks."""
        return [key(self.model, rank, block_hash, **which) for rank in range(self.tp)]


@pytest.fixture(scope="module", params=[1, 2], ids=["tp1", "tp2"])
def fleet(request, forks, model, tmp_path_factory):
    """Yield instances with a store of their own: a master goes on giving out the memory of instances that left."""
    tp = request.param
    common = dict(
        model=model, dtype="float32", fork_server=forks, tp=tp, transfer=CHECKED
    )
    with MooncakeStore(tmp_path_factory.mktemp("mooncake")) as store:
        a = store.instance(f"store-a-tp{tp}", "kv_producer", **common)
        dev = {"VLLM_SERVER_DEV_MODE": "1"}
        b = store.instance(f"store-b-tp{tp}", "kv_consumer", env=dev, **common)
        with serving(a, b):
            yield Fleet(tp, model, store, a, b)


def text(server, prompt):
    return pairs.text_of(server.completions(prompt, MAX_TOKENS))


def counts(server):
    loads = pairs.loads(server)
    dropped = server.metric("vllm:kv_checksum_stored_blocks_dropped_total")
    return {**loads, "dropped": int(dropped)}


def gained(server, before):
    return {k: v - before[k] for k, v in counts(server).items() if v != before[k]}


def forget(server):
    """Empty the server's own prefix cache, so that it asks the store again."""
    assert server.post("/reset_prefix_cache").json() == {"success": True}


def test_clean_loads_are_verified_and_texts_equal_a_single_instance(
    fleet, reference, hashes
):
    store = fleet.store
    prompts = [pairs.prompt_of(n, fleet.tp) for n in LENGTHS]
    prompts.append(prompts[-2][:200] + pairs.prompt_of(150, 9))  # a local hit on B
    expected = [text(reference, prompt) for prompt in prompts]
    for prompt in prompts:
        assert text(fleet.a, prompt) in expected
        store.wait_for([k for h in hashes(prompt) for k in fleet.keys(h)])
    assert [text(fleet.b, prompt) for prompt in prompts] == expected
    assert counts(fleet.b) == {**NONE, "verified": len(prompts)}
    blocks = sum((len(prompt) - 1) // BLOCK for prompt in prompts) - 200 // BLOCK
    assert fleet.b.metric("vllm:kv_checksum_blocks_compared_total") == blocks
    assert "Loads from the Mooncake store are checked" in fleet.b.log_text()


def flip(store, keys, other_keys):
    value = bytearray(store.get(keys[-1]))
    value[len(value) // 3] ^= 8
    store.replace(keys[-1], bytes(value))


def other_prefix(store, keys, other_keys):
    """Put an intact value of another prompt at the same position."""
    for mine, other in zip(keys, other_keys, strict=True):
        store.replace(mine, store.get(other))


def truncate(store, keys, other_keys):
    store.replace(keys[-1], store.get(keys[-1])[:-8])


CASES = {
    1: [(flip, 0), (other_prefix, 3), (truncate, 0)],
    2: [(flip, 3), (truncate, 3)],
}


def test_damaged_values_are_found_removed_and_stored_anew(fleet, reference, hashes):
    for damage, position in CASES[fleet.tp]:
        one_damaged_value(fleet, reference, hashes, damage, position)


def one_damaged_value(fleet, reference, hashes, damage, position):
    store = fleet.store
    seed = f"{fleet.tp}{position}{damage.__name__}"
    prompt, other = (random_prompt(seed + s) for s in ("", "other"))
    expected = text(reference, prompt)
    for each in (prompt, other):
        text(fleet.a, each)
        store.wait_for([k for h in hashes(each) for k in fleet.keys(h)])
    keys, other_keys = (fleet.keys(hashes(p)[position]) for p in (prompt, other))
    damage(store, keys, other_keys)
    before = counts(fleet.b)
    assert text(fleet.b, prompt) == expected
    if damage is truncate:
        # Mooncake itself refuses it: nothing is compared, its rank removes it alone.
        bad, found = keys[-1:], {}
        assert "1 of 6 values are of another size" in fleet.b.log_text()
    else:
        bad, found = keys, {"mismatch": 1, "dropped": 1}
    assert gained(fleet.b, before) == found
    assert not any(store.exist(bad)), "a bad key is still there"
    good = [k for h in hashes(prompt) for k in fleet.keys(h) if k not in bad]
    assert all(store.exist(good)), "a good key was removed"
    # The next request for the prefix stores good KV, which then loads.
    assert text(fleet.a, prompt) == expected
    store.wait_for(keys)
    forget(fleet.b)
    before = counts(fleet.b)
    assert text(fleet.b, prompt) == expected
    assert gained(fleet.b, before) == {"verified": 1}


def test_values_whose_load_failed_on_its_way_stay(
    forks, model, reference, hashes, tmp_path
):
    """A, who holds all of them, answers when their lease is over."""
    common = dict(model=model, dtype="float32", fork_server=forks)
    dev = {"VLLM_SERVER_DEV_MODE": "1"}
    flags = ("-client_ttl=60", f"-default_kv_lease_ttl={LEASE_S * 1000}")
    prompt = random_prompt("stay", 1500)
    expected = text(reference, prompt)
    with (
        MooncakeStore(tmp_path, flags, lent=0) as store,
        ThreadPoolExecutor(2) as clients,
    ):
        a = store.instance("stay-a", "kv_producer", transfer=CHECKED, **common)
        closed, opened = (
            store.instance(
                f"stay-{closed}",
                "kv_consumer",
                transfer={**CHECKED, "kv_checksum_fail_closed": closed},
                env=dev,
                **common,
            )
            for closed in (True, False)
        )
        with ExitStack() as stack:
            stack.enter_context(serving(a))
            assert text(a, prompt) == expected
            keys = [key(model, 0, h) for h in hashes(prompt)]
            store.wait_for(keys)
            # They lend memory, too, but come too late for these values.
            stack.enter_context(serving(closed, opened))
            values = [store.get(k) for k in keys]
            with processes.stopped(a.family()):
                answers = [clients.submit(text, b, prompt) for b in (closed, opened)]
                time.sleep(LEASE_S + 2)
            assert [answer.result() for answer in answers] == [expected] * 2
            for b in (closed, opened):
                assert "Failed to get" in b.log_text()
                assert set(counts(b).values()) == {0}
            assert [store.get(k) for k in keys] == values
            # They are what the next request loads.
            for b in (closed, opened):
                forget(b)
                assert text(b, prompt) == expected
                assert gained(b, dict.fromkeys(counts(b), 0)) == {"verified": 1}


def random_prompt(seed, length=200):
    draw = random.Random(seed)
    return [draw.randrange(2, 512) for _ in range(length)]


@pytest.fixture
def other_model(tmp_path, model):
    """Return a model of other layers whose values are as large, under the same name."""
    folder = tmp_path / model.name
    folder.symlink_to(tiny_qwen3("float32", kv_heads=1, layers=8))
    return folder


@pytest.mark.parametrize("fleet", [1], indirect=True)
def test_values_of_another_model_s_layers_and_of_instances_without_checksums(
    fleet, forks, reference, hashes, other_model
):
    store = fleet.store
    common = dict(dtype="float32", fork_server=forks)
    foreign = store.instance(
        "store-foreign", "kv_producer", model=other_model, transfer=CHECKED, **common
    )
    plain = store.instance("store-plain", "kv_both", model=fleet.model, **common)
    prompts = [random_prompt(s) for s in ("foreign", "plain", "checked")]
    expected = [text(reference, prompt) for prompt in prompts]
    with serving(foreign, plain):
        # Another model's layers: every block is found.
        foreign.completions(prompts[0], 1).raise_for_status()
        keys = [k for h in hashes(prompts[0]) for k in fleet.keys(h)]
        store.wait_for(keys)
        before = counts(fleet.b)
        assert text(fleet.b, prompts[0]) == expected[0]
        assert gained(fleet.b, before) == {"mismatch": 1, "dropped": 6}
        assert not any(store.exist(keys))
        # Stored without checksums: not loaded, so not verified. And the reverse.
        assert text(plain, prompts[1]) == expected[1]
        stock = [fleet.keys(h, checksums=False)[0] for h in hashes(prompts[1])]
        store.wait_for(stock)
        before = counts(fleet.b)
        assert text(fleet.b, prompts[1]) == expected[1]
        assert gained(fleet.b, before) == {}
        calls = store_calls(plain)
        before = store_calls(fleet.a)
        assert text(fleet.a, prompts[2]) == expected[2]
        checked = [fleet.keys(h)[0] for h in hashes(prompts[2])]
        store.wait_for(checked)
        assert text(plain, prompts[2]) == expected[2]
        assert external_tokens(plain) == 0
        # The cost: eight bytes a block, and not a key or a call more.
        sizes = [{len(store.get(k)) for k in keys} for keys in (checked, stock)]
        assert {x - y for x in sizes[0] for y in sizes[1]} == {8}
        after = store_calls(fleet.a)
        assert {k: n - before[k] for k, n in after.items()} == calls


def zero_second_half(store, stored):
    value = store.get(stored)
    store.replace(stored, value[: len(value) // 2] + bytes(len(value) // 2))


def test_fail_open_a_damaged_value_is_served_once_and_never_stored(
    forks, model, reference, hashes, tmp_path
):
    """C serves what it loaded, and stores what it computes, under good keys alone."""
    common = dict(model=model, dtype="float32", fork_server=forks)
    checked = {"enable_kv_checksum": True}
    prompt = random_prompt("served once")
    longer = [prompt + random_prompt(f"longer {n}", 60) for n in range(3)]
    expected = {tuple(x): text(reference, x) for x in (prompt, *longer)}
    with MooncakeStore(tmp_path) as store:
        a = store.instance("open-a", "kv_producer", transfer=checked, **common)
        dev = {"VLLM_SERVER_DEV_MODE": "1"}
        c = store.instance("open-c", "kv_both", transfer=checked, env=dev, **common)
        with serving(a, c):
            keys = [key(model, 0, h) for h in hashes(prompt)]
            assert text(a, prompt) == expected[tuple(prompt)]
            store.wait_for(keys)
            good = {k: store.get(k) for k in keys}
            zero_second_half(store, keys[2])
            assert text(c, prompt) != expected[tuple(prompt)], "no damage shows"
            assert counts(c) == {**NONE, "mismatch": 1, "dropped": 1}
            for turn in longer:
                assert text(c, turn) == expected[tuple(turn)]
            store.wait_for(keys)
            for k, value in good.items():
                assert_same_kv(store.get(k), value)
            # What C has stored in place of the dropped value is good for others.
            forget(c)
            before = counts(c)
            assert text(c, longer[0]) == expected[tuple(longer[0])]
            assert gained(c, before) == {"verified": 1}


def assert_same_kv(value, other):
    """Check that all but the checksum at the end, which is of the bits, is alike but for rounding."""
    found, wanted = (
        np.frombuffer(x[: len(x) - len(x) % 4096], np.float32) for x in (value, other)
    )
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-3)


def test_the_drill_damages_loads_from_the_store(
    forks, model, reference, hashes, tmp_path
):
    """The wrapped connector's checksums, and what it drops, are the drill's too."""
    drill = {
        "damage_kv_on_purpose": True,
        "connector": "MooncakeStoreConnector",
        "faults": pairs.FAULTS,
    }
    drilled = {
        "kv_connector": "KVChecksumFaultDrill",
        "kv_connector_module_path": pairs.DRILL,
        "kv_connector_extra_config": {
            "lookup_rpc_port": free_port(),
            "kv_checksum_fault_drill": drill,
        },
    }
    common = dict(model=model, dtype="float32", fork_server=forks)
    prompt = random_prompt("drill")
    expected = text(reference, prompt)
    with MooncakeStore(tmp_path) as store:
        a = store.instance("drill-a", "kv_producer", transfer=CHECKED, **common)
        b = store.instance(
            "drill-b", "kv_consumer", transfer={**CHECKED, **drilled}, **common
        )
        with serving(a, b):
            assert text(a, prompt) == expected
            store.wait_for([key(model, 0, h) for h in hashes(prompt)])
            answer = b.completions(prompt, MAX_TOKENS, request_id="flip-store")
            assert pairs.text_of(answer) == expected
            found = counts(b)
    assert found == {**NONE, "mismatch": 1, "dropped": 1}


def external_tokens(server):
    name = "vllm:prompt_tokens_by_source_total"
    return server.metric(name, source="external_kv_transfer")


def store_calls(server):
    """Return the calls to the store, and the keys in them, by operation, once all are counted."""
    server.completions([5, 6, 7], 1).raise_for_status()
    name = "vllm:mooncake_store_operation"
    return {
        (operation, what): server.metric(f"{name}{what}_total", operation=operation)
        for operation in ("lookup_exists", "save_exists", "save_put")
        for what in ("", "_keys")
    }


def test_a_rank_that_declines_stored_checksums_declines_them_for_all(
    forks, model, reference, hashes, tmp_path
):
    """Rank 1 cannot sum what rank 0 can: nothing is stored, and that is said."""
    common = dict(
        model=model,
        dtype="float32",
        fork_server=forks,
        tp=2,
        transfer={"enable_kv_checksum": True, "kv_checksum_ledger_blocks": 0},
    )
    declines = {"KV_CHECKSUM_RIG_SKIP_RANK": "1"}
    prompt = random_prompt("declined", 300)
    with MooncakeStore(tmp_path) as store:
        a = store.instance("declined-a", "kv_producer", env=declines, **common)
        b = store.instance("declined-b", "kv_consumer", env=declines, **common)
        with serving(a, b):
            expected = text(reference, prompt)
            assert text(a, prompt) == expected
            ranks = range(2)
            store.wait_for(
                [
                    key(model, r, h, checksums=False)
                    for h in hashes(prompt)
                    for r in ranks
                ]
            )
            assert text(b, prompt) == expected
            assert counts(b) == {**NONE, "unverified": 1}
            assert pairs.unverified(b, "no_carrier") == 1
    log = b.log_text()
    reason = "KV cache group 0: memory_layout: for the test"
    assert f"MooncakeStoreConnector stores no KV checksums: {reason}" in log
    assert log.count(f"Loads from the Mooncake store are not checked: {reason}") == 2
    assert "are verified, stored" not in log and "store are checked" not in log


@pytest.fixture(scope="module")
def deep_model():
    """Return a model of as many layers as one of a few billion parameters has."""
    return tiny_qwen3("float32", heads=1, kv_heads=1, layers=36)


def test_a_load_of_more_parts_than_mooncake_queues_by_default_is_verified(
    forks, deep_model, hashes, tmp_path
):
    """A request of 240 blocks and 36 layers is 8,640 transfers, all to one peer."""
    common = dict(
        model=deep_model,
        dtype="float32",
        fork_server=forks,
        transfer=CHECKED,
        args=(
            *("--max-model-len", "8192", "--kv-cache-memory-bytes", str(192 << 20)),
            *("--hf-overrides", json.dumps({"max_position_embeddings": 8192})),
        ),
    )
    prompt = random_prompt("deep", 240 * BLOCK + 7)
    with MooncakeStore(tmp_path, lent=0, segment=192 << 20) as store:
        a = store.instance("deep-a", "kv_producer", **common)
        b = store.instance("deep-b", "kv_consumer", **common)
        with ExitStack() as stack:
            stack.enter_context(serving(a))
            expected = text(a, prompt)
            store.wait_for([key(deep_model, 0, h) for h in hashes(prompt)])
            # What B lends comes too late for these values: all are A's.
            stack.enter_context(serving(b))
            assert text(b, prompt) == expected
            assert counts(b) == {**NONE, "verified": 1}
            assert b.metric("vllm:kv_checksum_blocks_compared_total") == 240
            assert external_tokens(b) == 240 * BLOCK
    assert "Failed to get" not in b.log_text()
