"""Real servers that offload KV with vLLM's OffloadingConnector and load it again.

Rig only: forked, and blocks are copied by the rig between the KV cache and host memory, where vLLM would queue copies on a
GPU's streams. Keys, chunks, managers, tiers and scheduling are vLLM's. What the tiers keep is damaged where it lies.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from rig import kv_events, tampering, verdicts
from rig.families import tiny
from rig.servers import NIXL, serving

from e2e import pairs, reloads
from e2e.reloads import BLOCK, LOADED

pytestmark = pytest.mark.e2e

CHUNK = 2
"""Blocks per chunk where chunks are larger than blocks."""

WHOLE = {"whole_chunk": True, "block": 2}
CHUNK_DAMAGE = {
    "bit_flip": {"block": 3, "layer": 1, "byte": 777, "bit": 3},
    "other_prefix": WHOLE,
    "swapped": WHOLE,
    "half_written": {"block": 5},
}


WINDOWED = ("--num-gpu-blocks-override", "64")
"""Blocks for prompts that take one per KV cache group."""


def offloading(name, common, mode="fail-open", *, args=(), transfer=None, **extra):
    return reloads.instance(
        f"offloading-{name}",
        "OffloadingConnector",
        mode=mode,
        extra={**reloads.OFFLOADING, **extra},
        transfer=transfer,
        args=args,
        **common,
    )


@pytest.fixture(scope="module")
def served(common):
    """Fail-open; loads last several steps."""
    server = offloading("open", common, load_steps=3)
    with serving(server):
        reloads.computed(server)
        yield server


def test_a_prefix_that_was_evicted_comes_back(served):
    known = reloads.computed(served)
    reloads.evict(served)
    compared = served.metric("vllm:kv_checksum_blocks_compared_total")
    again = reloads.ask(served, known.prompt)
    assert (again.external, again.local) == (LOADED, 0)
    assert again.text == known.text
    assert known.differing(served, again) == {}
    assert again.judged == {("verified", "ledger"): 1}
    compared = served.metric("vllm:kv_checksum_blocks_compared_total") - compared
    assert compared == LOADED // BLOCK


def test_loads_last_while_others_decode(served):
    known = [reloads.computed(served) for _ in range(3)]
    reloads.evict(served)
    before, external = verdicts.settled(served), pairs.external_tokens(served)
    with ThreadPoolExecutor() as pool:
        decoding = pool.submit(served.completions, pairs.prompt_of(20, 1), 40)
        loading = [pool.submit(served.completions, k.prompt, 8) for k in known]
        texts = [pairs.text_of(answer.result()) for answer in loading]
        decoding.result().raise_for_status()
    assert texts == [k.text for k in known]
    assert pairs.external_tokens(served) - external == 3 * LOADED
    judged = verdicts.settled(served).judged
    gained = {k: n - before.judged.get(k, 0) for k, n in judged.items()}
    assert {k: n for k, n in gained.items() if n} == {("verified", "ledger"): 3}


@pytest.mark.parametrize(
    ("blocks", "reason"), [(0, "no_carrier"), (4, "not_in_ledger")]
)
def test_what_the_ledger_does_not_hold_is_unverified(blocks, reason, common):
    """Without a ledger, and where it is too small for one prompt."""
    server = offloading(
        f"ledger-{blocks}", common, transfer={"kv_checksum_ledger_blocks": blocks}
    )
    with serving(server):
        for number in range(2):
            reloads.computed(server)
            assert pairs.loads(server) == {
                "verified": 0,
                "mismatch": 0,
                "unverified": number + 1,
            }
            assert pairs.unverified(server, reason) == number + 1


@pytest.mark.parametrize("kind", reloads.DAMAGE)
def test_damage_in_the_tier_is_a_mismatch(kind, served):
    """It reaches the cache at exactly the positions that were damaged."""
    known, answer, report = reloads.damaged(served, kind)
    bad = report["positions"]
    assert known.differing(served, answer) == {0: bad}
    assert answer.judged == {("mismatch", "ledger"): 1}
    line = served.log_text().split("KV checksum mismatch")[-1].splitlines()[0]
    assert f"{len(bad)} of 6 blocks differ" in line
    assert f" position {bad[0]} sent " in line
    # What is bad serves nobody else from the prefix cache.
    after = reloads.ask(served, known.prompt)
    assert after.local <= bad[0] * BLOCK
    assert after.text == known.text


def test_damage_at_rest_is_served(served):
    answer = damaged_at_rest(served, reloads.computed(served))
    assert (answer.external, answer.local, answer.judged) == (0, LOADED, {})


def damaged_at_rest(server, known, position=2):
    """Ask for a prompt that lies in the cache, one bit of it flipped since."""
    blocks = reloads.load_again(server, known.prompt).blocks[0]
    tampering.flip_bit(server, blocks[position], layer=1, byte=777, bit=3)
    digests = tampering.block_digests(server)
    found = [tampering.contents(digests, block) for block in blocks]
    differs = [x != y for x, y in zip(found, known.contents[0], strict=True)]
    assert [n for n, bad in enumerate(differs) if bad] == [position]
    return reloads.ask(server, known.prompt)


def assert_removal_told(events, prompt, mode, position=2):
    """Check that routers hear which blocks left the prefix cache, and which came back."""
    blocks = [prompt[i : i + BLOCK] for i in range(0, LOADED, BLOCK)]
    gone = ["BlockStored", "BlockRemoved"]
    anew = ["BlockStored"] if mode == "recompute" else []
    for block in blocks[position:]:
        assert events.wait_for(block, gone + anew), events.history(block)
    for block in blocks[:position]:
        assert events.wait_for(block, ["BlockStored"]), events.history(block)


@pytest.fixture
def events():
    with kv_events.subscribed() as subscriber:
        yield subscriber


@pytest.mark.parametrize("mode", pairs.MODES)
def test_damage_at_rest_is_a_mismatch(mode, common, events):
    server = offloading(
        f"scrub-{mode}",
        common,
        mode,
        transfer={"kv_checksum_scrub": 1.0},
        args=events.args,
    )
    with serving(server):
        known = reloads.computed(server)
        clean = reloads.ask(server, known.prompt)
        assert (clean.local, clean.text) == (LOADED, known.text)
        assert ("mismatch", "local") not in clean.judged
        answer = damaged_at_rest(server, known)
        # Recomputed, the request hits the good blocks once more.
        again = answer.judged.pop(("verified", "local"), 0)
        assert again <= (mode == "recompute")
        assert answer.judged == {("mismatch", "local"): 1}
        assert_removal_told(events, known.prompt, mode)
        if mode == "fail":
            pairs.assert_failed(answer.response)
        elif mode == "recompute":
            assert answer.text == known.text
        again = reloads.ask(server, known.prompt)
        assert again.text == known.text
        # What was computed again serves others.
        assert mode == "recompute" or again.local <= 2 * BLOCK


@pytest.fixture(scope="module")
def recomputing(common):
    """Fail-closed and "recompute"; chunks are larger than blocks."""
    server = offloading(
        "recompute", common, "recompute", blocks_per_chunk=CHUNK, load_steps=2
    )
    with serving(server):
        reloads.computed(server)
        yield server


@pytest.mark.parametrize("kind", CHUNK_DAMAGE)
def test_damaged_chunks_are_recomputed(kind, recomputing):
    known = reloads.computed(recomputing)
    assert reloads.load_again(recomputing, known.prompt).judged == {
        ("verified", "ledger"): 1
    }
    with tampering.damaged_load(recomputing, kind, **CHUNK_DAMAGE[kind]) as report:
        answer = reloads.load_again(recomputing, known.prompt)
    assert answer.text == known.text
    assert answer.judged == {("mismatch", "ledger"): 1}
    first = report["positions"][0] * BLOCK
    assert f"; recomputing from token {first}\n" in recomputing.log_text()
    # The tier still holds the bad chunks.
    for _ in range(2):
        again = reloads.load_again(recomputing, known.prompt)
        assert again.text == known.text
        assert again.external <= first
        assert ("mismatch", "ledger") not in again.judged


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("offloaded")


def tiering(name, common, root, mode="fail-open"):
    """Evicted from the cache, prompts leave the small tier in host memory, too, and are loaded from files."""
    return offloading(
        name,
        common,
        mode,
        spec_name="HostTiering",
        cpu_bytes_to_use=3 << 20,
        secondary_tiers=[{"type": "fs", "root_dir": str(root)}],
    )


def file_of(root, prompt, position):
    name = f"{reloads.block_hashes(prompt)[position].hex()}.bin"
    pairs.wait(lambda: list(root.rglob(name)), f"{name}")
    (file,) = root.rglob(name)
    return file


def flip_in_file(root, prompt, position):
    file = file_of(root, prompt, position)
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 8
    file.write_bytes(data)


@pytest.fixture(scope="module")
def tiered(common, root):
    with serving(server := tiering("files", common, root)):
        yield server


@pytest.fixture(scope="module")
def filed(tiered, root):
    """A prompt that lies in files."""
    known = reloads.computed(tiered)
    for position in range(LOADED // BLOCK):
        file_of(root, known.prompt, position)
    return known


def test_files_are_loaded(tiered, filed):
    reloads.evict(tiered)
    answer = reloads.ask(tiered, filed.prompt)
    assert (answer.external, answer.text) == (LOADED, filed.text)
    assert filed.differing(tiered, answer) == {}
    assert answer.judged == {("verified", "ledger"): 1}


def test_another_instance_loads_the_files(tiered, filed, common, root):
    """Its ledger holds nothing of them."""
    with serving(other := tiering("files-other", common, root)):
        answer = reloads.ask(other, filed.prompt)
        assert (answer.external, answer.text) == (LOADED, filed.text)
        assert pairs.loads(other) == {"verified": 0, "mismatch": 0, "unverified": 1}
        assert pairs.unverified(other, "not_in_ledger") == 1


def test_a_damaged_file_is_a_mismatch(tiered, root, position=3):
    known = reloads.computed(tiered)
    flip_in_file(root, known.prompt, position)
    reloads.evict(tiered)
    answer = reloads.ask(tiered, known.prompt)
    assert answer.external == LOADED
    assert known.differing(tiered, answer) == {0: [position]}
    assert answer.judged == {("mismatch", "ledger"): 1}


def test_a_damaged_file_fails_its_request_once(common, tmp_path):
    server = tiering("files-fail", common, tmp_path, "fail")
    with serving(server):
        known = reloads.computed(server)
        reloads.evict(server)
        clean = reloads.ask(server, known.prompt)
        assert clean.judged == {("verified", "ledger"): 1}
        assert clean.text == known.text
        flip_in_file(tmp_path, known.prompt, 4)
        reloads.evict(server)
        answer = reloads.ask(server, known.prompt)
        pairs.assert_failed(answer.response)
        assert answer.judged == {("mismatch", "ledger"): 1}
        assert server.metric("vllm:kv_checksum_failed_total") == 1
        for _ in range(2):
            reloads.evict(server)
            again = reloads.ask(server, known.prompt)
            assert again.text == known.text
            assert again.external <= 4 * BLOCK


@pytest.fixture(scope="module")
def windowed(forks):
    """Sliding windows beside full attention: groups 0 and 1 beside 2."""
    server = offloading(
        "windows",
        {"model": tiny("gemma3"), "fork_server": forks},
        args=WINDOWED,
        load_steps=1,
    )
    with serving(server):
        reloads.computed(server)
        yield server


@pytest.mark.parametrize(
    ("kind", "group"), [("other_group", 0), ("bit_flip", 1), ("other_prefix", 2)]
)
def test_damage_to_a_block_of_one_group(kind, group, windowed):
    options = {"group": group, "block": -1, "lasting": False}
    known, answer, report = reloads.damaged(windowed, kind, options)
    assert report["group"] == group
    last = len(answer.blocks[group]) - 1
    assert known.differing(windowed, answer) == {group: [last]}
    assert answer.judged == {("mismatch", "ledger"): 1}
    line = windowed.log_text().split("KV checksum mismatch")[-1].splitlines()[0]
    assert f"group {group}: 1 of {last + 1} blocks differ" in line


def test_offloaded_loads_beside_a_prefill_instance(common):
    """The loads from P are judged by what P sent, those from the tier by the ledger."""
    children = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", **NIXL},
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": reloads.OFFLOADING,
        },
    ]
    d = reloads.instance(
        "offloading-beside-nixl",
        "MultiConnector",
        mode="recompute",
        extra={"connectors": children},
        **common,
    )
    p = pairs.producer("offloading-p", **common)
    with serving(p, d):
        prompts = [pairs.prompt_of(200, 60 + seed) for seed in range(2)]
        expected = pairs.reference_texts(p, prompts, reloads.MAX_TOKENS)
        for prompt, text in zip(prompts, expected, strict=True):
            asked = pairs.ask(p, d, prompt, reloads.MAX_TOKENS)
            assert asked.counted == {"verified": 1}
            assert pairs.text_of(asked.answer) == text
            again = reloads.load_again(d, prompt)
            assert again.judged == {("verified", "ledger"): 1}
            assert again.text == text
        with tampering.damaged_load(d, "other_prefix", block=3):
            again = reloads.load_again(d, prompts[0])
        assert again.judged == {("mismatch", "ledger"): 1}
        assert again.text == expected[0]
        line = d.log_text().split("KV checksum mismatch")[-1].splitlines()[0]
        assert "OffloadingConnector" in line
        assert d.metric("vllm:kv_checksum_loads_total", carrier="kv_transfer_params")
