# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that parts of a request on several ranks add up to what one rank would hold.

vLLM's own slot mapping says where tokens lie, NIXL's own planning which blocks meet.
"""

import os
import time
from contextlib import ExitStack
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumBlocks,
    create_kv_checksum_worker,
)
from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    add_records,
    replica_checks,
)
from vllm.distributed.kv_transfer.kv_checksum.support import (
    num_reporting_workers,
    why_off,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.views import ContextShard
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from .rig import caches as u
from .rig import context as rig
from .rig import instances
from .rig import real_context as real
from .rig.instances import MODES, prefill, tokens
from .rig.versions import older_than, without

if older_than("0.31.0"):
    reason = without("word of which caches are sharded, so that checksums are off")
    pytest.skip(reason, allow_module_level=True)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1",
    reason="runs vLLM's slot mapping: set TRITON_INTERPRET=1",
)

LAYERS = (0, 3)


def latent_spec(block_size, **more):
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=16,
        dtype=torch.bfloat16,
        **more,
    )


class Dealt:
    """The KV of one request on one rank, and dealt out to several."""

    def __init__(self, dcp, block_size, num_tokens, tp=None):
        self.dcp, self.block_size, self.num_tokens = dcp, block_size, num_tokens
        tp = tp or dcp
        number = -(-num_tokens // (block_size * dcp))
        self.row = torch.randperm(number, generator=torch.Generator().manual_seed(1))
        spec = self.spec = latent_spec(block_size)
        at = torch.arange(num_tokens)
        # One rank's blocks, in the order of the request.
        self.whole = {n: u.random_cache(number * dcp, spec, seed=n) for n in LAYERS}
        self.ranks = []
        for rank in range(tp):
            found = rig.slots(self.row, at, block_size, dcp, rank % dcp)
            here = found != rig.ELSEWHERE
            caches = {n: u.random_cache(number, spec, seed=50 + rank) for n in LAYERS}
            for n, cache in caches.items():
                cells = self.whole[n][at[here] // block_size, :, at[here] % block_size]
                slot = found[here]
                cache[slot // block_size, :, slot % block_size] = cells
            self.ranks.append(caches)
        cfg = u.config(number, (u.names(*LAYERS), spec))
        self.workers = [
            u.worker(
                cfg,
                {u.names(n)[0]: c for n, c in caches.items()},
                tp_rank=rank,
                tp_size=tp,
                context=rig.shard(rank, dcp, block_size),
            )
            for rank, caches in enumerate(self.ranks)
        ]

    def sums(self, start=0):
        """Return the units' sums from the instance's block `start` on, per check."""
        ids = self.row[start:].tolist()
        blocks = KVChecksumBlocks(self.num_tokens, {0: (start, ids)})
        records = [u.send_record(w, blocks) for w in self.workers]
        return replica_checks(add_records(records, "r", 0))

    def expected(self, start=0):
        """Evaluate the definition on one rank's blocks."""
        ids = range(start * self.dcp, len(self.row) * self.dcp)
        return u.expected_sums(self.whole, ids, start * self.dcp, self.num_tokens)


@pytest.mark.parametrize("num_tokens", [1, 40, 64, 150, 333])
@pytest.mark.parametrize("block_size", [16, 32])
@pytest.mark.parametrize("dcp", [2, 4])
def test_the_ranks_parts_add_up_to_one_rank_s_sums(dcp, block_size, num_tokens):
    dealt = Dealt(dcp, block_size, num_tokens)
    for start in range(len(dealt.row)):
        (found,) = dealt.sums(start)
        assert found.tolist() == dealt.expected(start)


def test_copies_of_a_part_are_checks_of_their_own():
    dealt = Dealt(2, 16, 100, tp=4)
    right = dealt.expected()
    assert [check.tolist() for check in dealt.sums()] == [right, right]
    dealt.ranks[3][3][dealt.row[1]].view(torch.uint8)[0, 2, 5] ^= 8
    first, second = dealt.sums()
    assert first.tolist() == right
    # Rank 3 is the second copy's second part: of the instance's block 1, the fourth.
    assert [i for i, v in enumerate(second) if v != right[i]] == [3]


@pytest.mark.parametrize("dcp", [2, 4])
def test_a_byte_of_a_rank_counts_at_its_place_in_the_request(dcp):
    dealt = Dealt(dcp, 32, 300)
    right = dealt.expected()
    for rank in range(dcp):
        at = (1 * dcp + rank) * 32 + 17
        cell = dealt.ranks[rank][0][dealt.row[1]].view(torch.uint8)[0, 17]
        cell[9] ^= 1
        (found,) = dealt.sums()
        differ = [i for i, v in enumerate(found) if v != right[i]]
        assert differ == ([at // 16] if at < 300 else [])
        cell[9] ^= 1


def test_the_fingerprint_is_that_of_one_rank():
    prints = {
        worker.groups[0].fingerprint
        for dcp in (1, 2, 4)
        for worker in Dealt(dcp, 16, 10).workers
    }
    assert len(prints) == 1


@pytest.mark.parametrize(
    ("spec", "context", "over_pcp", "reason"),
    [
        (latent_spec(32), ContextShard(2, 0, 1), False, "deals out 1 tokens"),
        (latent_spec(32), ContextShard(2, 0, 16), False, "deals out 16 tokens"),
        (latent_spec(24), ContextShard(2, 0, 24), False, "do not lie in blocks of 24"),
        (u.full_spec(2), ContextShard(2, 0, 16), False, "the same KV heads"),
        (
            latent_spec(16, dcp_sharded=False),
            ContextShard(2, 0, 16),
            True,
            "what PCP ranks hold",
        ),
    ],
)
def test_what_is_dealt_out_otherwise_is_skipped(spec, context, over_pcp, reason):
    cfg = u.config(8, (u.names(0), spec))
    cache = {u.names(0)[0]: u.random_cache(8, spec)}
    worker = u.worker(cfg, cache, tp_size=2, context=context, over_pcp=over_pcp)
    assert reason in worker.skipped[0]


# ---- which ranks sum


@pytest.fixture
def make_worker(model, monkeypatch):
    """Make what vLLM's worker of a rank has; of its groups only rank and size are."""

    def make(tp=(0, 1), pcp=(0, 1), dcp=1):
        config = instances.vllm_config(model, "kv_producer", tp=tp[1], dcp=dcp)
        config.parallel_config.prefill_context_parallel_size = pcp[1]
        groups = {"get_tp_group": tp, "get_pcp_group": pcp, "get_pp_group": (0, 1)}
        for name, (rank, size) in groups.items():
            group = SimpleNamespace(rank_in_group=rank, world_size=size, cpu_group=None)
            monkeypatch.setattr(parallel_state, name, partial(lambda g: g, group))
        monkeypatch.setattr(torch.distributed, "all_gather_object", real.gather_own)
        spec, (name,) = latent_spec(16), u.names(0)
        layer = SimpleNamespace(get_attn_backend=lambda: TritonMLABackend)
        config.compilation_config.static_forward_context[name] = layer
        connector = SimpleNamespace(
            _kv_cache_config=u.config(8, ([name], spec)),
            set_kv_checksum_worker=lambda worker: None,
        )
        return create_kv_checksum_worker(
            config, connector, {name: u.random_cache(8, spec)}
        )

    return make


def placed(worker):
    """Return where a worker's sums count: its rank, its copy, its tokens."""
    (group,) = worker.groups.values()
    return worker.tp_rank, group.replica_keys[0], group.context.rank


def test_tp_ranks_hold_other_tokens_under_dcp(make_worker):
    made = [make_worker(tp=(rank, 4), dcp=4) for rank in range(4)]
    assert [placed(w) for w in made] == [(rank, (1, 0), rank) for rank in range(4)]


def test_pcp_ranks_that_share_out_tokens_all_sum(make_worker):
    made = [make_worker(pcp=(rank, 2), dcp=2) for rank in range(2)]
    assert [placed(w) for w in made] == [(0, (1, 0), 0), (1, (1, 0), 1)]


def test_of_pcp_ranks_with_copies_the_first_sums(make_worker):
    """NIXL transfers what PCP rank 0 holds."""
    made = [make_worker(tp=(rank, 2), pcp=(0, 2)) for rank in range(2)]
    assert [placed(w) for w in made] == [(0, (2, 0), 0), (1, (2, 1), 0)]
    assert make_worker(tp=(1, 2), pcp=(1, 2)) is None


@pytest.mark.parametrize(
    ("sizes", "number"),
    [((2, 3, 1, 1), 6), ((4, 1, 4, 1), 4), ((1, 1, 2, 2), 2), ((2, 1, 1, 4), 2)],
    ids=["plain", "dcp", "dcp over pcp", "pcp"],
)
def test_as_many_workers_report_as_sum(sizes, number):
    tp, pp, dcp, pcp = sizes
    parallel = SimpleNamespace(
        tensor_parallel_size=tp,
        pipeline_parallel_size=pp,
        decode_context_parallel_size=dcp,
        prefill_context_parallel_size=pcp,
    )
    assert num_reporting_workers(parallel) == number


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        (dict(decode_context_parallel_size=2), None),
        (dict(prefill_context_parallel_size=2), None),
        (
            dict(decode_context_parallel_size=2, prefill_context_parallel_size=4),
            "over PCP and TP ranks together",
        ),
    ],
)
def test_over_nixl_pull_context_parallelism_is_on(model, sizes, reason):
    config = instances.vllm_config(model, "kv_producer")
    for name, value in sizes.items():
        setattr(config.parallel_config, name, value)
    why = why_off(config)
    assert why is None if reason is None else reason in why


def test_over_other_connectors_it_is_off(model):
    for connector in ("NixlPushConnector", "MooncakeConnector"):
        config = instances.vllm_config(
            model, "kv_producer", dcp=2, kv_connector=connector
        )
        assert f"not with {connector}" in why_off(config)


# ---- instances

SIZES = [(1, 2), (2, 1), (2, 2), (4, 4), (2, 4), (4, 2), (1, 4), (4, 1)]
"""DCP sizes of P and D; each side has as many TP ranks."""


@pytest.fixture(params=SIZES, ids=lambda s: f"{s[0]}-{s[1]}")
def sizes(request):
    return request.param


def make(model, sizes, **both):
    p, d = ({"dcp": n, "tp": n} for n in sizes)
    return rig.pair(model, p, d, **both)


def load(p, d, prompt, req_id="r"):
    params = prefill(p, f"p-{req_id}", prompt)
    request = d.add(req_id, prompt, params, max_tokens=2)
    d.run(request, p)
    return request


@pytest.mark.parametrize("number", [20, 64, 100, 201])
def test_a_load_is_verified(model, sizes, number):
    p, d = make(model, sizes)
    prompt = tokens(number)
    params = prefill(p, "p", prompt)
    request = d.add("r", prompt, params, max_tokens=2)
    while not d.loads("verified"):
        p.step()
        d.step(p)
        assert d.stats.get("loads_started", 0) <= 1 and not d.loads("mismatch")
    assert d.answer_kv_is_right(request)


def test_a_load_behind_a_local_prefix_is_verified(model, sizes):
    p, d = make(model, sizes)
    prompt = tokens(300)
    load(p, d, prompt[:150], "first")
    load(p, d, prompt, "second")
    assert d.loads("verified") == 2 and not d.loads("mismatch")


@pytest.mark.parametrize("mode", MODES)
def test_a_stale_part_of_a_block_is_a_mismatch_there(model, sizes, mode, log):
    p, d = make(model, sizes, **MODES[mode])
    rank = d.tp - 1

    def stale(instance, req_id, block_ids):
        # What another request left in this rank's part of the load's second block.
        if len(block_ids) > 1:
            for cache in instance.rank_kv[rank].values():
                cache[block_ids[1]] = cache[block_ids[1]].flip(1)

    d.damage = stale
    prompt = tokens(16 * 4 * 3)
    params = prefill(p, "p", prompt)
    request = d.add("r", prompt, params, max_tokens=9)
    until_answered(p, d, "r")
    assert d.loads("mismatch") == 1 and not d.loads("verified")
    assert any("1 of " in x and "blocks differ, position 1 " in x for x in log)
    if mode == "fail":
        assert d.results["r"][0].finish_reason == FinishReason.ERROR
    else:
        assert d.answer_kv_is_right(request) is (mode == "recompute")


def until_answered(p, d, req_id):
    """Step both until the request's first answer, with which it holds its blocks."""
    end = time.monotonic() + 90
    while not d.results.get(req_id):
        assert time.monotonic() < end
        p.step()
        d.step(p)


@pytest.mark.parametrize("sizes", [(1, 2), (2, 1), (4, 4), (2, 4)], ids=str)
def test_nixl_s_own_workers_of_every_rank(latent_model, sizes):
    with ExitStack() as stack:
        p, d = real.pair(stack, latent_model, sizes, **MODES["recompute"])
        prompt = tokens(16 * 4 * 2 + 70)
        whole = start(p, d, "whole", prompt)
        until_answered(p, d, "whole")
        assert d.loads("verified") == 1 and d.answer_kv_is_right(whole)
        # Behind a local prefix, with one rank's part of a block stale.
        rank = d.tp - 1
        at = 2 * 4 // d.dcp

        def stale(of, row):
            if of == rank:
                for cache in d.rank_kv[rank].values():
                    cache[row[at]] = cache[row[at]].flip(1)

        d.damage_rank = stale
        longer = start(p, d, "longer", prompt[: 16 * 4 * 2] + tokens(90, seed=4))
        until_answered(p, d, "longer")
        assert d.loads("verified") == 1 and d.loads("mismatch") == 1
        assert d.answer_kv_is_right(longer)


def test_no_thread_of_nixl_outlives_its_worker(latent_model):
    """The rig's own: such a thread may poll, and slow every later test."""
    counts = []
    for _ in range(2):
        with ExitStack() as stack:
            p, d = real.pair(stack, latent_model, (2, 2))
            start(p, d, "r", tokens(40))
            until_answered(p, d, "r")
        counts.append(len(os.listdir("/proc/self/task")))
    # Each pair has more than twenty; an idle one of other libraries may come or go.
    assert counts[1] < counts[0] + 8


def start(p, d, req_id, prompt):
    return d.add(req_id, prompt, prefill(p, f"p-{req_id}", prompt), max_tokens=9)


@pytest.fixture(scope="module")
def latent_model(tmp_path_factory):
    return real.write_latent_model(tmp_path_factory.mktemp("latents"))
