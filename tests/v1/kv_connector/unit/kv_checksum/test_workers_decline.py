# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that what any worker skips is stored by no rank: all and the scheduler agree."""

from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import support
from vllm.distributed.kv_transfer.kv_checksum.scheduler.factory import (
    create_kv_checksum_scheduler,
)
from vllm.distributed.kv_transfer.kv_checksum.worker import factory

from .rig import caches as u
from .rig import instances as rig
from .rig.store import STORES, Executor

PACKED = "packed_heads: KV heads are packed into head slots"


def kv_config():
    return u.config(9, (u.names(0), u.full_spec()), (u.names(1), u.full_spec()))


def configuration(model, connector, **settings):
    settings = {**STORES.get(connector, {}), **settings}
    return rig.vllm_config(
        model, "kv_both", kv_connector=connector, **rig.NO_LEDGER, **settings
    )


@pytest.mark.parametrize("connector", STORES)
@pytest.mark.parametrize(
    ("skipped", "reason"),
    [
        (({}, {}), None),
        (({}, {1: PACKED}), PACKED),
        (({0: PACKED}, {0: PACKED}), PACKED),
        ((None, {}), None),
    ],
)
def test_what_a_worker_skips_is_not_stored(model, connector, skipped, reason):
    config, groups = configuration(model, connector), kv_config()
    support.ask_workers(config, groups, Executor(*skipped))
    (one,) = support.connector_coverage(config, groups)
    if reason is None:
        assert one.not_checked is None
    else:
        group_id = max(skipped[1])
        start = f"{connector} stores no KV checksums: KV cache group {group_id}"
        ledger = "the ledger is off (kv_checksum_ledger_blocks is 0)"
        assert one.not_checked == f"{start}: {reason}, and {ledger}"


@pytest.mark.parametrize("connector", STORES)
def test_fail_closed_refuses_it(model, connector):
    closed = dict(kv_checksum_fail_closed=True)
    config, groups = configuration(model, connector, **closed), kv_config()
    support.ask_workers(config, groups, Executor({}, {}))
    with pytest.raises(ValueError, match=f"{connector} stores no KV checksums"):
        support.ask_workers(config, groups, Executor({}, {0: PACKED}))


def test_a_carrier_goes_on_with_the_other_groups(model):
    """Loads from another instance are compared group by group."""
    closed = dict(kv_checksum_fail_closed=True)
    config, groups = configuration(model, "NixlConnector", **closed), kv_config()
    support.ask_workers(config, groups, Executor({0: PACKED}))
    assert support.connector_coverage(config, groups)[0].not_checked is None


def test_workers_are_not_asked_where_nothing_is_summed(model):
    off = configuration(model, "NixlConnector", enable_kv_checksum=False)
    alone = SimpleNamespace(kv_transfer_config=None)
    for config in (
        alone,
        off,
        rig.vllm_config(model, "kv_both", **rig.WITHOUT_CARRIER),
    ):
        support.ask_workers(config, kv_config(), None)


@pytest.mark.parametrize("connector", STORES)
def test_the_scheduler_says_so_and_counts_such_loads(model, connector, log):
    config, groups = configuration(model, connector), kv_config()
    support.ask_workers(config, groups, Executor({1: PACKED}))
    pool = SimpleNamespace(block_pool=SimpleNamespace(hash_block_size=16))
    part = create_kv_checksum_scheduler(config, None, pool, groups)
    assert part is not None
    (line,) = [x for x in log if "KV checksums" in x]
    assert PACKED in line and "counted as unverified" in line
    assert part.take_stats() == {"skipped_groups:packed_heads": 1}


def test_ranks_take_over_what_others_skip(monkeypatch):
    def all_gather(found, own, group):
        found[:] = [own, {1: "of rank 1"}, {1: "of rank 2", 2: "too"}]

    monkeypatch.setattr(torch.distributed, "all_gather_object", all_gather)
    of_all = factory._of_all_ranks
    three = SimpleNamespace(world_size=3, cpu_group=None)
    assert of_all({0: "own"}, three) == {0: "own", 1: "of rank 1", 2: "too"}
    alone = SimpleNamespace(world_size=1)
    assert of_all({0: "own"}, alone) == {0: "own"}


def test_entries_are_refused_for_what_another_rank_skips():
    worker = u.worker(
        kv_config(), {u.names(n)[0]: u.random_cache(9, u.full_spec()) for n in (0, 1)}
    )
    worker.init_block_checksums([0, 1])
    worker.skipped_anywhere = {1: PACKED}
    with pytest.raises(ValueError, match="KV cache group 1: packed_heads"):
        worker.init_block_checksums([0, 1])
