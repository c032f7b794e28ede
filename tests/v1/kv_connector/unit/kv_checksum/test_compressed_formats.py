# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test what vLLM's layers tell of compressed caches, and what fingerprints say."""

from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum.fault_drill import connector
from vllm.distributed.kv_transfer.kv_checksum.worker import formats
from vllm.utils import deep_gemm
from vllm.v1.kv_cache_interface import MambaSpec

from .rig import caches as u
from .rig import compressed
from .rig.versions import needs
from .rig.writers import allocate

old_vllm = needs("0.33.0", "such models")
pytestmark = old_vllm

INDEXERS = [w for w in compressed.WRITERS if w.cells == "INDEXER"]
NAME = u.names(3, suffix="indexer.k")[0]


def worker_of(writer, **kwargs):
    cache, _ = allocate(writer.spec, 4, writer.layouts[0])
    layer = SimpleNamespace(
        kv_cache=torch.empty(0), get_attn_backend=lambda: writer.backend_class
    )
    found = formats.layer_format(None, NAME, layer, cache)
    cfg = u.config(4, ([NAME], writer.spec))
    return u.worker(cfg, {NAME: cache}, formats={NAME: found}, **kwargs)


@pytest.mark.parametrize("writer", INDEXERS[:3], ids=lambda w: w.label)
def test_scales_of_two_kinds_are_two_fingerprints(writer, monkeypatch):
    found = set()
    for mx_scales in (False, True):
        monkeypatch.setattr(
            deep_gemm, "mqa_logits_use_mx_scales", lambda value=mx_scales: value
        )
        found.add(worker_of(writer).groups[0].fingerprint)
    assert len(found) == 2


@pytest.mark.parametrize("writer", INDEXERS[:3], ids=lambda w: w.label)
def test_indexers_are_skipped_where_values_are_shuffled(writer, monkeypatch):
    assert worker_of(writer).skipped == {}
    monkeypatch.setattr(type(formats.current_platform), "is_rocm", lambda self: True)
    assert "shuffled" in worker_of(writer).skipped[0]


def test_every_rank_holds_a_summary_whole():
    """Step5 refuses a model with more than one key head in its indexer."""
    (writer,) = [w for w in compressed.WRITERS if w.cells == "SUMMARY"]
    for rank in range(2):
        group = worker_of(writer, tp_rank=rank, tp_size=2).groups[0]
        assert group.replica_keys == ((2, rank),)
    assert group.fingerprint == worker_of(writer).groups[0].fingerprint
    step5 = compressed.bare_module("vllm.models.step5.nvidia.config")
    config = SimpleNamespace(sparse_config={"sparse_indexer_num_k_heads": 2})
    with pytest.raises(ValueError, match="exactly one KV head"):
        step5.get_step5_sparse_config(config)


def test_the_fault_drill_leaves_out_what_keeps_no_row_per_token():
    """It would damage what does not count, and call it a miss."""
    left_out = [w.spec for w in compressed.WRITERS if w.spec.tokens_per_state != 1]
    left_out += [w.spec for w in compressed.RINGS.values()]
    assert all(map(connector._compresses, left_out))
    kept = [
        u.full_spec(),
        u.INDEXER,
        MambaSpec(16, shapes=((4,),), dtypes=(torch.half,)),
    ]
    assert not any(map(connector._compresses, kept))
