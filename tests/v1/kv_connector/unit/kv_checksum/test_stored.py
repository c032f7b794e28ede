# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test checksums stored with offloaded KV: entries, loads, verdicts, consequences."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumBlocks,
    KVChecksumGroup,
    KVChecksumRecord,
    KVChecksumScheduled,
)
from vllm.distributed.kv_transfer.kv_checksum.connectors import (
    mooncake_store,
    simple_cpu_offload,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.stored_loads import (
    StoredLoads,
    compare_stored,
)
from vllm.distributed.kv_transfer.kv_checksum.stored import (
    BlockRun,
    block_checksum_tags,
    hashes_of_blocks,
)
from vllm.distributed.kv_transfer.kv_checksum.verdict import Unverified
from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import torch_reference
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import (
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from .rig import caches as u
from .rig import reference, store
from .rig.caches import SyncingTensor
from .rig.instances import MODES, write_model
from .rig.stored import HASHES, caches, workers_of

try:
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
except ImportError:  # vLLM before 0.32.0 does not name the tiers
    CacheHitSource = SimpleNamespace(DISK="disk", HOST="host")

VERIFIED, MISMATCH, UNVERIFIED = (
    f"loads:{v}:stored" for v in ("verified", "mismatch", "unverified")
)


# ---- entries


def test_a_tag_is_the_hash_s_first_eight_bytes_and_the_fingerprint():
    tags = block_checksum_tags([bytes(range(16)), bytes(range(16, 32))], 0xFF)
    assert [hex(t) for t in tags] == ["0x7060504030201ff", "0x17161514131211ef"]
    assert block_checksum_tags([]).size == 0


@pytest.mark.parametrize("hashes", [[b"1234567"], [b"12345678", b"123456789"]])
def test_malformed_hashes_are_refused(hashes):
    with pytest.raises(ValueError, match="too short, or of unequal length"):
        block_checksum_tags(hashes)


def test_a_block_s_hash_is_that_of_its_last_hash_block():
    assert hashes_of_blocks([b"%d" % i for i in range(9)], 2, 1, 4) == [
        b"3",
        b"5",
        b"7",
    ]


@pytest.mark.parametrize("size", [8, 16, 48])
def test_entries_are_each_rank_s_own_sums_under_their_tags(size):
    whole, ranks = caches(tp=2, block_size=size)
    ids = [4, 9, 11]
    total = np.zeros(3, np.uint64)
    for worker in workers_of(ranks):
        entries = worker.init_block_checksums([0])
        assert entries.dtype == torch.int64 and entries.shape == (20,)
        entries[5] = 99
        worker.save_block_checksums([BlockRun(0, 2, ids, HASHES[:3])])
        tags = block_checksum_tags(HASHES[:3], worker.groups[0].fingerprint)
        total += entries[ids].numpy().view(np.uint64) ^ tags
        assert entries[5] == 99
    sums = u.expected_sums(whole, ids, 2, 5 * size)
    assert [int(v) for v in total] == reference.by_blocks(sums, size)


@pytest.mark.parametrize("size", [16, 48])
def test_runs_of_several_requests_are_saved_at_once(size):
    whole, ranks = caches(block_size=size)
    (worker,) = workers_of(ranks)
    entries = worker.init_block_checksums([0])
    runs = [BlockRun(0, 2, [4, 9, 11], HASHES[:3]), BlockRun(0, 0, [3, 8], HASHES[3:5])]
    worker.save_block_checksums(runs)
    for run in runs:
        tags = block_checksum_tags(run.block_hashes, worker.groups[0].fingerprint)
        found = (entries[run.block_ids].numpy().view(np.uint64) ^ tags).tolist()
        end = (run.start + len(run.block_ids)) * size
        sums = u.expected_sums(whole, run.block_ids, run.start, end)
        assert found == reference.by_blocks(sums, size)


def test_an_entry_is_of_every_layer_whatever_its_replicas():
    """Sum attention that TP splits, and latents that every rank holds whole."""
    attention = u.full_spec()
    latents = MLAAttentionSpec(
        block_size=16, num_kv_heads=1, head_size=32, dtype=torch.bfloat16
    )
    names = u.names(0, 1)
    specs = dict(zip(names, (attention, latents), strict=True))
    kv = {n: u.random_cache(9, spec, seed=len(n)) for n, spec in specs.items()}
    uniform = UniformTypeKVCacheSpecs(block_size=16, kv_cache_specs=specs)
    worker = u.worker(u.config(9, (names, uniform)), kv, tp_size=2)
    assert worker.groups[0].replica_keys == ((1, 0), (2, 0))
    entries = worker.init_block_checksums([0])
    worker.save_block_checksums([BlockRun(0, 1, [4, 7], HASHES[:2])])
    tags = block_checksum_tags(HASHES[:2], worker.groups[0].fingerprint)
    found = entries[[4, 7]].numpy().view(np.uint64) ^ tags
    parts = [u.expected_sums({n: kv[names[n]]}, [4, 7], 1, 48) for n in (0, 1)]
    assert found.tolist() == [sum(pair) % 2**64 for pair in zip(*parts, strict=True)]


def test_two_stores_and_a_group_of_another_stage():
    """Each store names its groups; blocks of a group without layers here are passed."""
    kv = {g: u.random_cache(20, u.full_spec(), seed=g) for g in (0, 1)}
    names = u.names(0, 1)
    groups = [([name], u.full_spec()) for name in names]
    cfg = u.config(20, *groups, ([], u.full_spec()))
    worker = u.worker(cfg, dict(zip(names, kv.values(), strict=True)))
    for group_ids in ([0], [1], [2]):
        entries = worker.init_block_checksums(group_ids)
    ids = {0: [3, 4], 1: [5, 6], 2: [7, 8]}
    worker.save_block_checksums([BlockRun(g, 0, i, HASHES[:2]) for g, i in ids.items()])
    assert entries[ids[2]].tolist() == [0, 0]
    blocks = KVChecksumBlocks(32, {g: (0, i) for g, i in ids.items()}, stored=True)
    worker.bind(KVChecksumScheduled(reqs_to_load={"r": blocks}))
    (record,) = worker.post_forward({"r"}, set(), set()).finalize()
    found = {g: values.tolist() for g, values in record.stored["r"].items()}
    assert found == {
        g: entries[ids[g]].numpy().view(np.uint64).tolist() for g in (0, 1)
    }


def test_saving_needs_entries_and_entries_need_a_summed_group():
    (worker,) = workers_of(caches()[1])
    with pytest.raises(ValueError, match="init_block_checksums was not called"):
        worker.save_block_checksums([])
    worker.skipped_anywhere[1] = "why"
    with pytest.raises(ValueError, match="KV cache group 1: why"):
        worker.init_block_checksums([0, 1])


@pytest.mark.parametrize(
    ("start", "number", "reason"),
    [
        (4, 12, None),
        (4, 11, Unverified.OTHER_BLOCKS),
        (4, 16, Unverified.OTHER_BLOCKS),
        (1, 12, Unverified.OTHER_BLOCKS),
    ],
)
def test_sums_of_other_units_than_those_loaded_are_not_compared(start, number, reason):
    """Load three blocks of four units each, from the second one on."""
    values = np.ones((number, 1), np.uint64)
    tags = block_checksum_tags(HASHES[:3], 7)
    record = KVChecksumRecord(
        0,
        0,
        {"r": {0: KVChecksumGroup(start, ((1, 0),), values)}},
        fingerprints={0: 7},
        stored={"r": {0: np.full(3, 4, np.uint64) ^ tags}},
    )
    verdict = compare_stored([record], "r", 0, 1, HASHES[:3], 4)
    assert verdict.unverified is reason and verdict.positions == []


# ---- a load on one worker


def stored_load(
    damage=lambda kv, entries: None, loader=None, hashes=HASHES[:3], size=16
):
    """Store three blocks, load them elsewhere into other blocks; the verdict."""
    _, (kv,) = caches(block_size=size)
    (saver,) = workers_of([kv])
    saved = saver.init_block_checksums([0])
    saver.save_block_checksums([BlockRun(0, 1, [4, 5, 6], HASHES[:3])])
    _, (other,) = caches(seed=50, block_size=size)
    (worker,) = loader([other]) if loader else workers_of([other])
    entries = worker.init_block_checksums([0])
    for source, target in ((4, 12), (5, 2), (6, 7)):
        for n, cache in other.items():
            cache[target] = kv[n][source]
        entries[target] = saved[source]
    damage(other, entries)
    blocks = KVChecksumBlocks(4 * size, {0: (1, [12, 2, 7])}, stored=True)
    worker.bind(KVChecksumScheduled(reqs_to_load={"r": blocks}))
    assert worker.post_forward(None, set(), set()) is None
    (record,) = worker.post_forward({"r"}, set(), set()).finalize()
    units = size // reference.unit_size(size)
    return compare_stored([record], "r", 0, 1, hashes, units)


def flip(kv, entries):
    kv[1][2].view(torch.uint8)[1, 3, 5] ^= 16


def swap_blocks(kv, entries):
    """Load intact values of other prefixes, each with its own entry."""
    for cache in (*kv.values(), entries):
        cache[[12, 2]] = cache[[2, 12]]


def lose_entry(kv, entries):
    entries[7] = 0


def other_layers(kvs):
    return workers_of(kvs, name=lambda n: f"decoder.h.{n}.attn")


@pytest.mark.parametrize(
    ("case", "positions"),
    [
        (dict(), []),
        (dict(damage=flip), [2]),
        (dict(damage=swap_blocks), [1, 2]),
        (dict(damage=lose_entry), [3]),
        (dict(loader=other_layers), [1, 2, 3]),
        (dict(hashes=[HASHES[0], HASHES[4], HASHES[2]]), [2]),
    ],
    ids=["intact", "flip", "swap", "lost entry", "other layers", "other prefix"],
)
@pytest.mark.parametrize("size", [16, 64])
def test_a_load_is_compared_with_what_was_stored(case, positions, size):
    verdict = stored_load(**case, size=size)
    assert (verdict.first, verdict.compared, verdict.positions) == (1, 3, positions)
    assert [d.position for d in verdict.samples] == positions
    assert all(d.expected != d.found for d in verdict.samples)


@pytest.mark.parametrize(
    ("num_tokens", "num_hashes", "outcome"),
    [(48, 3, "verified"), (40, 3, "unverified"), (48, 2, "unverified")],
    ids=["full", "part of a block", "a hash is missing"],
)
def test_checksums_are_those_of_full_blocks(num_tokens, num_hashes, outcome):
    (worker,) = workers_of(caches()[1])
    worker.init_block_checksums([0])
    worker.save_block_checksums([BlockRun(0, 0, [3, 4, 5], HASHES[:3])])
    blocks = KVChecksumBlocks(num_tokens, {0: (0, [3, 4, 5])}, stored=True)
    worker.bind(KVChecksumScheduled(reqs_to_load={"r": blocks}))
    records = worker.post_forward({"r"}, set(), set()).finalize()
    request = SimpleNamespace(request_id="r", block_hashes=HASHES[:num_hashes])
    loads = StoredLoads(None, cfg(u.full_spec()), 16)
    verdict = loads.judge(request, blocks, records)
    assert verdict.outcome == outcome
    if outcome == "unverified":
        assert verdict.reason is Unverified.NUM_TOKENS


def test_saving_and_loading_never_wait_for_the_device():
    (worker,) = workers_of(caches()[1])
    worker.init_block_checksums([0])
    worker._block_checksums = worker._block_checksums.as_subclass(SyncingTensor)
    for layer in worker.groups[0].layers:
        layer.blocks = layer.blocks.as_subclass(SyncingTensor)
    worker._prepare(torch_reference.prepare)  # what a device runs
    blocks = KVChecksumBlocks(32, {0: (0, [3, 4])}, stored=True)
    worker.save_block_checksums([BlockRun(0, 0, [3, 4], HASHES[:2])])
    worker.bind(KVChecksumScheduled(reqs_to_load={"r": blocks}))
    assert worker.post_forward({"r"}, set(), set()) is not None


# ---- schedulers


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(autouse=True)
def empty_store():
    store.STORE.clear()


def tokens(number=100, seed=0):
    return np.random.default_rng(seed).integers(5, 500, number).tolist()


def ask(instance, req_id="r", prompt=None):
    request = instance.add(req_id, prompt or tokens(), None, max_tokens=2)
    return request, instance.run(request)


def stored(position, prompt=None):
    """Return the stored value of one block of the prompt."""
    return list(store.STORE.values())[position]


def flip_stored(position):
    stored(position).kv[2].view(torch.uint8)[1, 2, 3] ^= 1


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_clean_loads_verify(model, tp, pp):
    a = store.StoringInstance(model, tp=tp, pp=pp)
    ask(a)
    assert a.stats.get(VERIFIED) is None and len(store.STORE) == 6
    b = store.StoringInstance(model, tp=tp, pp=pp)
    request, answer = ask(b)
    assert answer.finish_reason == FinishReason.LENGTH
    assert (b.stats[VERIFIED], b.stats["blocks_compared"]) == (1, 6)
    # A local hit: only the rest is loaded, from a later position on.
    ask(a, "longer", tokens() + tokens(60, 1))
    ask(b, "longer", tokens() + tokens(60, 1))
    assert (b.stats[VERIFIED], b.stats["blocks_compared"]) == (2, 9)
    assert b.stats["loads_started"] == 2
    plain = {"loads_started", "blocks_compared", "blocks_mismatched"}
    assert set(b.stats) == {VERIFIED, *plain}
    assert not any(x._recvs for x in (b.scheduler.kv_checksum, *b.workers))


@pytest.mark.parametrize("mode", MODES)
def test_a_damaged_block(model, mode, log):
    ask(store.StoringInstance(model))
    good = {h: v.entries for h, v in store.STORE.items()}
    flip_stored(3)
    b = store.StoringInstance(model, **MODES[mode])
    request, answer = ask(b)
    assert (b.stats[MISMATCH], b.stats["blocks_mismatched"]) == (1, 1)
    (line,) = [x for x in log if "KV checksum mismatch" in x]
    assert "store of MemoryStoreConnector" in line and "position 3 " in line
    assert b.store.dropped == [("r", {0: [3]})]
    assert b.stats["stored_blocks_dropped"] == 1
    (line,) = [x for x in log if x.startswith("WARNING Removing stored KV")]
    assert line.endswith("request r, group 0: positions 3")
    if mode == "open":
        # What was served is stored again where no other request finds it.
        assert good.keys() - store.STORE.keys() == {[*good][3]}
        ask(b, "again")
    elif mode == "fail":
        assert answer.finish_reason == FinishReason.ERROR
        assert len(store.STORE) == 5
        ask(b, "again")
    else:
        assert answer.finish_reason == FinishReason.LENGTH
        assert b.scheduled[0] == ("r", 100 - 48), "not from the bad block on"
        assert b.stats["recomputed"] == 1
    # Good KV is stored again, and the next instance loads it.
    assert {h: store.STORE[h].entries for h in good} == good
    c = store.StoringInstance(model, **MODES[mode])
    ask(c)
    assert c.stats[VERIFIED] == 1 and MISMATCH not in c.stats


@pytest.mark.parametrize("head", [0, 3])
def test_damage_in_one_rank_s_part_is_enough(model, head, log):
    ask(store.StoringInstance(model, tp=2))
    stored(3).kv[2].view(torch.uint8)[head, 2, 3] ^= 1
    b = store.StoringInstance(model, tp=2, **MODES["recompute"])
    ask(b)
    assert b.store.dropped == [("r", {0: [3]})]
    (line,) = [x for x in log if "KV checksum mismatch" in x]
    assert f", on ranks PP 0 TP {head // 2} here; recomputing" in line


def test_a_load_that_one_rank_does_not_report_is_unverified(model):
    """All others' blocks are right."""
    a, b = (store.StoringInstance(model, tp=2) for _ in range(2))
    ask(a)
    silent, other = b.workers

    def report(*args, **kwargs):
        type(silent).post_forward(silent, *args, **kwargs)

    silent.post_forward = report
    ask(b)
    assert b.stats[UNVERIFIED] == b.stats["unverified:workers_missing"] == 1
    assert b.stats.get("blocks_compared", 0) == 0


def test_a_store_that_keeps_a_bad_block_is_not_asked_again(model):
    ask(store.StoringInstance(model))
    flip_stored(0)
    b = store.StoringInstance(model, **MODES["recompute"])
    b.store.deaf = True
    request, answer = ask(b)
    assert answer.finish_reason == FinishReason.LENGTH
    assert b.stats[MISMATCH] == 1 and len(b.store.dropped) == 1


@pytest.mark.parametrize(
    ("gave_up", "admitted"), [(True, (0, False)), (False, (64, True))]
)
def test_who_shall_read_no_cache_loads_nothing(model, gave_up, admitted):
    """The scheduler of vLLM 0.30.0 takes what such a request is offered."""
    b = store.StoringInstance(model, **MODES["recompute"])
    request = SimpleNamespace(request_id="r", skip_reading_prefix_cache=gave_up)
    assert b.scheduler.kv_checksum.admit(request, 0, 64, True) == admitted


@pytest.mark.parametrize("mode", ["open", "recompute"])
@pytest.mark.parametrize("position", [0, 3])
def test_values_stay_that_the_connector_failed_to_load(model, mode, position):
    """None was compared; the request asks the store no more, others do."""
    ask(store.StoringInstance(model))
    b = store.StoringInstance(model, **{**MODES[mode], "policy": "recompute"})
    b.invalid_positions = [position]
    request, answer = ask(b)
    assert answer.finish_reason == FinishReason.LENGTH
    assert b.store.dropped == [] and len(store.STORE) == 6
    assert b.stats["loads_failed"] == b.stats["loads_started"] == 1
    assert not {VERIFIED, MISMATCH, UNVERIFIED} & set(b.stats)
    # Fail-closed, what was loaded before the failed block counts as failed, too.
    kept = 16 * position if mode == "open" else 0
    assert b.scheduled[0] == ("r", 100 - kept)
    b.invalid_positions = []
    b.scheduler.reset_prefix_cache()
    ask(b, "again")
    assert b.stats[VERIFIED] == 1


@pytest.mark.parametrize("policy", ["recompute", "fail"])
@pytest.mark.parametrize("closed", [False, True])
def test_blocks_that_the_connector_failed_to_load_stay(model, closed, policy):
    """Nothing was compared, so nothing is known of what is stored."""
    ask(store.StoringInstance(model))
    before = dict(store.STORE)
    settings = dict(kv_checksum_fail_closed=closed, kv_load_failure_policy=policy)
    b = store.StoringInstance(model, **settings)
    b.invalid_positions = [0, 3]
    loaded = []
    start = b.store.update_state_after_alloc
    b.store.update_state_after_alloc = lambda request, blocks, number: (
        loaded.append(number) or start(request, blocks, number)
    )
    request, answer = ask(b)
    assert b.store.dropped == [] and before == store.STORE
    assert not {VERIFIED, MISMATCH, UNVERIFIED} & set(b.stats)
    assert not b.stats.get("stored_blocks_dropped")
    # It loads nothing again; the next request does.
    assert [number for number in loaded if number] == [96]
    recomputed = FinishReason.LENGTH if policy == "recompute" else FinishReason.ERROR
    assert answer.finish_reason == recomputed
    b.invalid_positions = []
    c = store.StoringInstance(model, **settings)
    ask(c, "next")
    assert c.stats[VERIFIED] == 1


def test_a_group_that_cannot_be_compared_is_not_dropped(model):
    """Fail-closed, no positions: the request fails, what is stored stays."""
    ask(store.StoringInstance(model, checksums=False))
    before = dict(store.STORE)
    for value in before.values():
        value.entries = None
    b = store.StoringInstance(model, checksums=False, **MODES["recompute"])
    request, answer = ask(b)
    assert b.stats[UNVERIFIED] == 1 and b.store.dropped == []
    assert before == store.STORE


@pytest.mark.parametrize("saver", [True, False])
def test_values_without_checksums_are_never_verified(model, saver, log):
    """Try a store that holds none, and an instance that reads none."""
    ask(store.StoringInstance(model, checksums=saver))
    b = store.StoringInstance(model, checksums=not saver, **MODES["recompute"])
    request, answer = ask(b)
    assert answer.finish_reason == FinishReason.LENGTH
    assert VERIFIED not in b.stats
    assert b.stats[MISMATCH if not saver else UNVERIFIED] == 1


@pytest.mark.parametrize("sources", [set(), {CacheHitSource.DISK}], ids=len)
def test_nobody_checks_loads_from_other_tiers(model, sources):
    ask(store.StoringInstance(model))
    b = store.StoringInstance(model, **MODES["recompute"])
    b.store.sources = sources
    _, answer = ask(b)
    assert answer.finish_reason == FinishReason.LENGTH
    assert b.stats["loads:unverified:none"] == b.stats["unverified:no_carrier"] == 1
    assert b.scheduled[0] == ("r", 100) and b.stats["recomputed"] == 1
    assert not {VERIFIED, MISMATCH, UNVERIFIED} & set(b.stats)


@pytest.mark.parametrize("others", [set(), {CacheHitSource.DISK}], ids=len)
def test_a_load_is_checked_if_every_tier_that_it_comes_from_is(model, others):
    ask(store.StoringInstance(model))
    b = store.StoringInstance(model)
    tiers = dict.fromkeys({*b.store.sources, *others}, 48)
    b.store.get_external_cache_hit_sources = lambda request, number: tiers
    ask(b)
    assert b.stats.get("unverified:no_carrier", 0) == len(others)
    assert b.stats.get(VERIFIED, 0) == 1 - len(others)


# ---- Mooncake store


def cfg(*specs):
    return u.config(20, *((u.names(n), s) for n, s in enumerate(specs)))


def settings(enabled=True, dcp=1, executor="mp", pcp=1, **extra):
    return SimpleNamespace(
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=dcp,
            prefill_context_parallel_size=pcp,
            world_size=2,
            distributed_executor_backend=executor,
        ),
        kv_transfer_config=SimpleNamespace(
            enable_kv_checksum=enabled,
            kv_connector="MooncakeStoreConnector",
            kv_connector_module_path=None,
            kv_connector_extra_config=extra,
        ),
    )


SHAPE = dict(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
WINDOW = SlidingWindowSpec(**SHAPE, sliding_window=32)
SINK = SinkFullAttentionSpec(**SHAPE, sink_len=4)
MIXED = UniformTypeKVCacheSpecs(
    block_size=16, kv_cache_specs={"a": u.full_spec(), "b": WINDOW}
)


def hidden_in_part():
    """Return a HiSparse config: some layers' KV is in host memory."""
    made = cfg(u.full_spec())
    made.hisparse_host_num_blocks = 5
    return made


@pytest.mark.parametrize(
    ("config", "groups", "reason"),
    [
        (settings(), cfg(u.full_spec(), u.full_spec(4)), None),
        (settings(enabled=False), cfg(u.full_spec()), "is off"),
        (settings(dcp=2), cfg(u.full_spec()), "context parallelism"),
        (settings(executor="external_launcher"), cfg(u.full_spec()), "launcher"),
        (settings(store_tp_size=2), cfg(u.full_spec()), "between TP sizes"),
        (settings(custom_mem_pool="x"), cfg(u.full_spec()), "custom memory pool"),
        (settings(), cfg(u.full_spec(), WINDOW), "SlidingWindowSpec"),
        (settings(), cfg(SINK), "SinkFullAttentionSpec"),
        (settings(), cfg(MIXED), "SlidingWindowSpec"),
        (settings(enable_store_tp_lcm=True), cfg(u.full_spec()), "between TP sizes"),
        (settings(), hidden_in_part(), "host-resident in part"),
        (settings(pcp=2), cfg(u.full_spec()), "context parallelism"),
    ],
    ids=[
        *("stored", "off", "dcp", "launcher", "shared", "pool", "window"),
        *("sink", "mixed", "lcm", "host", "pcp"),
    ],
)
def test_when_mooncake_stores_checksums(config, groups, reason):
    found = mooncake_store.why_not_stored(config, groups)
    assert found is None if reason is None else reason in found


def test_a_worker_that_lends_memory_alone_stores_nothing():
    """It has no caches to sum, and no databases of keys."""
    lending = SimpleNamespace(_capacity_only=True)
    made = mooncake_store.create_mooncake_store_checksums(lending, None, None)
    assert made is None


def test_a_load_of_values_without_checksums_says_so():
    loads = StoredLoads(None, cfg(u.full_spec()), 16)
    request = SimpleNamespace(request_id="r", block_hashes=HASHES)
    blocks = KVChecksumBlocks(32, {0: (0, [1, 2])}, stored=True)
    record = KVChecksumRecord(0, 0, {"r": {}}, num_tokens={"r": 32})
    verdict = loads.judge(request, blocks, [record])
    assert verdict.reason is Unverified.NO_PAYLOAD


class Keys:
    """Stands for a store: which keys it was asked to remove, and its answers."""

    def __init__(self, statuses):
        self.statuses, self.asked = statuses, []

    def batch_remove(self, keys, force=False):
        assert force
        self.asked += keys
        return self.statuses[: len(keys)]


def removing(statuses):
    side = object.__new__(mooncake_store.MooncakeStoreChecksums)
    side._worker = SimpleNamespace(
        store=Keys(statuses), _lookup_key_prefixes=(("m@tp0", "m@tp1"),)
    )
    return side


@pytest.mark.parametrize(
    ("statuses", "answer"),
    [([0, 0], b"\x01"), ([0, -704], b"\x01"), ([-706, 0], b"\x00")],
    ids=["removed", "gone already", "refused"],
)
def test_failures_are_removed_for_every_rank(statuses, answer, log):
    side = removing(statuses)
    message = mooncake_store._encoder.encode({0: [b"\x01\xff"]})
    assert side.remove([mooncake_store.REMOVE_MSG, message]) == answer
    assert side._worker.store.asked == ["m@tp0@01ff", "m@tp1@01ff"]
    assert any("ERROR" in x and "did not remove" in x for x in log) == (
        answer == b"\x00"
    )


@pytest.mark.parametrize("message", [b"", b"\xc1", b"\x81\x05\x91\xc4\x01a"])
def test_a_malformed_removal_is_answered(message, log):
    assert removing([]).remove([mooncake_store.REMOVE_MSG, message]) == b"\x00"
    assert any("were not removed" in x for x in log)


class Channel:
    """Stands for the lookup channel: what was asked, and the answer."""

    def __init__(self, answer):
        self.answer, self.frames = answer, None

    def send_multipart(self, frames):
        self.frames = frames

    def recv(self):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def store_scheduler(channel):
    """Return the connector's scheduler side; a store numbers its groups by itself."""
    groups = cfg(WINDOW, u.full_spec(2, 48)).kv_cache_groups
    inline = SimpleNamespace(submit=lambda call, *args: call(*args))
    return SimpleNamespace(
        _store_group_id_by_kv_cache_group_id={1: 0},
        _hash_block_size=16,
        kv_cache_config=SimpleNamespace(kv_cache_groups=groups),
        client=SimpleNamespace(executor=inline, socket=channel),
    )


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (b"\x01", None),
        (b"\x00", "see rank 0's log"),
        (b"", "see rank 0's log"),
        (OSError("gone"), "gone"),
    ],
)
def test_a_removal_names_blocks_by_the_hash_of_their_last_hash_block(
    answer, reason, log
):
    """Name request, group and positions in the lines about it, too."""
    channel = Channel(answer)
    hashes = [bytes([i]) * 32 for i in range(12)]
    request = SimpleNamespace(request_id="r\n7", block_hashes=hashes)
    bad = [0, 2, 3]
    mooncake_store.remove_failures(store_scheduler(channel), request, {1: bad})
    tag, message = channel.frames
    assert tag == mooncake_store.REMOVE_MSG
    side = removing([0] * 6)
    assert side.remove([tag, message]) == b"\x01"
    last = [hashes[3 * position + 2].hex() for position in bad]
    assert side._worker.store.asked == [
        f"{rank}@{name}" for rank in ("m@tp0", "m@tp1") for name in last
    ]
    lines = [x for x in log if x.startswith("ERROR")]
    which = "request r?7, group 1: positions 0, 2-3"
    told = f"ERROR Stored KV was not removed ({which}): {reason}"
    assert lines == ([told] if reason else [])


# ---- SimpleCPUOffloadConnector


@pytest.mark.parametrize(
    ("config", "groups", "reason"),
    [
        (settings(), cfg(u.full_spec(), u.full_spec(4)), None),
        (settings(enabled=False), cfg(u.full_spec()), "is off"),
        (settings(dcp=2), cfg(u.full_spec()), "context parallelism"),
        (settings(executor="external_launcher"), cfg(u.full_spec()), "launcher"),
        (settings(lazy_offload=True), cfg(u.full_spec()), "lazy_offload"),
        (settings(kv_offload_backend="disk"), cfg(u.full_spec()), "disk backend"),
        (settings(), cfg(u.full_spec(), u.full_spec(2, 32)), "several sizes"),
        (settings(), cfg(u.full_spec(), WINDOW), "SlidingWindowSpec"),
    ],
    ids=["stored", "off", "dcp", "launcher", "lazy", "disk", "sizes", "window"],
)
def test_when_simple_offload_stores_checksums(config, groups, reason):
    found = simple_cpu_offload.why_not_stored(config, groups)
    assert found is None if reason is None else reason in found
    runs = simple_cpu_offload.create_stored_runs(config, groups)
    assert (runs is None) == (reason is not None)


def test_picked_blocks_become_runs():
    runs = simple_cpu_offload.StoredRuns()
    for group, position, block_id in ((0, 2, 7), (0, 3, 5), (0, 0, 9), (1, 1, 4)):
        key = make_block_hash_with_group_id(HASHES[position], group)
        block = SimpleNamespace(block_id=block_id, block_hash=key)
        runs.add(group, position, block)
    assert runs.take() == [
        BlockRun(0, 2, [7, 5], HASHES[2:4]),
        BlockRun(0, 0, [9], HASHES[:1]),
        BlockRun(1, 1, [4], HASHES[1:2]),
    ]
    assert runs.take() == []


def test_dropped_host_blocks_are_not_found_again():
    pool = BlockPool(8, enable_caching=True, hash_block_size=16)
    keys = [make_block_hash_with_group_id(h, 0) for h in HASHES]
    for block, key in zip(pool.get_new_blocks(4), keys[1::2], strict=False):
        pool._insert_block_hash(key, block, num_tokens=None)
    manager = SimpleNamespace(
        cpu_block_pool=pool, group_block_sizes=[32], hash_block_size=16
    )
    simple_cpu_offload.drop_blocks(manager, HASHES, {0: [1, 2]})
    simple_cpu_offload.drop_blocks(manager, HASHES, {0: [1]})  # gone already
    found = [pool.cached_block_hash_to_block.get_one_block(k) for k in keys[1::2]]
    assert [f is not None for f in found] == [True, False, False]


# ---- MultiConnector


def sub_connector(source, reason=None):
    made = object.__new__(store.MemoryStoreConnector)
    made.sources, made.dropped, made.deaf = {source}, [], True
    made.kv_checksums_not_stored = reason
    made.set_kv_checksum_worker = made.dropped.append
    return made


def test_multi_connector_asks_the_one_that_loads():
    subs = [sub_connector(CacheHitSource.DISK), sub_connector(CacheHitSource.HOST)]
    multi = object.__new__(MultiConnector)
    multi._connectors, multi._requests_to_connector = subs, {"r": 1}
    multi.set_kv_checksum_worker("worker")
    assert [s.dropped for s in subs] == [["worker"], ["worker"]]
    r, other = (SimpleNamespace(request_id=i) for i in ("r", "other"))
    assert multi.get_kv_checksum_sources(r) == {CacheHitSource.HOST}
    assert not multi.get_kv_checksum_sources(other)
    multi.on_kv_checksum_failure(r, {0: [3]})
    multi.on_kv_checksum_failure(other, {0: [4]})
    assert [s.dropped[1:] for s in subs] == [[], [("r", {0: [3]})]]


def test_memory_that_the_store_does_not_take_ends_the_start():
    checksums = object.__new__(mooncake_store.MooncakeStoreChecksums)
    checksums._block_checksums = torch.zeros(4, dtype=torch.int64)
    refusing = SimpleNamespace(register_buffer=lambda address, size: -600)
    checksums._worker = SimpleNamespace(store=refusing, token_dbs=[])
    with pytest.raises(RuntimeError, match="-600"):
        checksums.register()
