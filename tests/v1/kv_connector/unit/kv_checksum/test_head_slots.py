# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test KV heads that are packed into head slots: read as planes, or skipped by name.

That a plane's rows are what vLLM's writer leaves is in `test_writers.py`.
"""

import ast
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import vllm
from vllm._aiter_ops import rocm_aiter_ops
from vllm.distributed.kv_transfer.kv_checksum import KVChecksumBlocks
from vllm.distributed.kv_transfer.kv_checksum.checksum import Skipped
from vllm.distributed.kv_transfer.kv_checksum.worker import formats
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheLayout, KVQuantMode

from .rig import caches as u
from .rig import writers
from .rig.model_writers.common import model_class
from .rig.versions import needs
from .rig.writers import V1, allocate, loaded
from .test_writers import old_vllm

HEADS, HEAD_SIZE, BLOCK_SIZE = 4, 32, 64
(NAME,) = u.names(3)
BLOCKS = KVChecksumBlocks(150, {0: (0, [2, 5, 3])})


def spec_of(path, cells, tp):
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE,
        num_kv_heads=HEADS // tp,
        head_size=HEAD_SIZE,
        dtype=torch.bfloat16 if cells == "NONE" else torch.uint8,
        kv_quant_mode=KVQuantMode[cells],
    )
    return loaded(path).customize_spec(spec)


def layer_format(path, cache):
    """Return what the feature finds of a layer whose backend has this path."""
    load = model_class if path.startswith("vllm.models.") else loaded

    class Layer:
        def get_attn_backend(self):
            return load(path)

    return formats.layer_format(None, NAME, Layer(), cache)


def ranks_of(path, cells, tp, layout=KVCacheLayout.LBHNC, exchanged=False, kernel=None):
    """Return workers of all TP ranks, over a prompt that vLLM's writer wrote."""
    ids = torch.tensor(BLOCKS.groups[0][1])
    at = torch.arange(BLOCKS.num_tokens)
    slots = ids[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE
    key = writers.drawn(slots, HEADS, HEAD_SIZE)
    sides = (-key, key) if exchanged else (key, -key)
    workers = []
    for rank in range(tp):
        spec = spec_of(path, cells, tp)
        cache, raw = allocate(spec, 8, layout, kernel)
        raw.random_(generator=torch.Generator().manual_seed(rank))
        heads = slice(rank * HEADS // tp, (rank + 1) * HEADS // tp)
        writers.write_attention(
            path,
            cells,
            cache,
            slots,
            *(side[:, heads].contiguous() for side in sides),
            num_kv_heads=HEADS // tp,
        )
        cfg = u.config(8, ([NAME], spec))
        worker = u.worker(
            cfg,
            {NAME: cache},
            tp_rank=rank,
            tp_size=tp,
            uniform=HEADS,
            formats={NAME: layer_format(path, cache)},
        )
        assert worker.skipped == {}
        workers.append(worker)
    return workers


def sums(*args, **kwargs):
    """Return the whole-model sums, and the fingerprints that workers have."""
    workers = ranks_of(*args, **kwargs)
    (found,) = u.whole_sums(workers, BLOCKS)
    return found, {w.groups[0].fingerprint for w in workers}


FLASH = V1 + "flash_attn.FlashAttentionBackend"


@pytest.mark.parametrize("cells", writers.ROWS)
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("layout", [KVCacheLayout.LBHNC, KVCacheLayout.BLHNC])
def test_planes_have_the_sums_of_dense_cells(cells, tp, layout):
    """A P with planes and a D with dense cells compare, whatever their TP sizes."""
    dense = sums(FLASH, cells, 1)
    assert sums(writers.B12X, cells, tp, layout) == dense
    assert len(dense[0]) == 3 * BLOCK_SIZE // 16


def test_planes_of_kernel_blocks_have_the_same_sums():
    """A block is cut into the pages that the kernel takes, each with two planes."""
    assert sums(writers.B12X, "NONE", 1, kernel=32) == sums(FLASH, "NONE", 1)


def test_exchanged_planes_are_seen():
    found, prints = sums(writers.B12X, "NONE", 1)
    exchanged, same = sums(writers.B12X, "NONE", 1, exchanged=True)
    assert prints == same
    # Of the last block, 22 tokens count: two units.
    assert [a != b for a, b in zip(found, exchanged, strict=True)] == [True] * 10 + [
        False
    ] * 2


def test_head_slots_need_the_backend_that_was_seen_writing_them():
    """Neither the slots nor the backend alone tell how a block is filled."""
    spec = spec_of(writers.B12X, "NONE", 1)
    cache, _ = allocate(spec, 8, KVCacheLayout.LBHNC)
    cfg = u.config(8, ([NAME], spec))
    found = layer_format(writers.B12X, cache)
    slots = Skipped.PACKED_HEADS
    for changed, layer, skipped in (
        (spec, None, slots),
        (spec, layer_format(FLASH, cache), slots),
        (replace(spec, num_head_slots=None, state_content_bytes=None), found, None),
        (replace(spec, state_content_bytes=128), found, Skipped.PACKED_CELLS),
        (replace(spec, num_head_slots=4), found, Skipped.PACKED_CELLS),
        (replace(spec, head_size_v=64), found, Skipped.PACKED_CELLS),
        (replace(spec, dtype=torch.int16), found, Skipped.PACKED_CELLS),
    ):
        cfg = u.config(8, ([NAME], changed))
        layers = {} if layer is None else {NAME: layer}
        worker = u.worker(cfg, {NAME: cache}, formats=layers)
        assert Skipped.of(worker.skipped[0]) is (skipped or Skipped.BACKEND), changed


def test_a_piece_of_keys_and_values_is_skipped():
    spec = replace(
        spec_of(writers.B12X, "NONE", 1), head_size=6, head_size_v=6, num_kv_heads=1
    )
    spec = replace(spec, state_content_bytes=12)
    cache, _ = allocate(spec, 8, KVCacheLayout.LBHNC)
    cfg = u.config(8, ([NAME], spec))
    found = layer_format(writers.B12X, cache)
    worker = u.worker(cfg, {NAME: cache}, formats={NAME: found})
    assert "a piece holds both keys and values" in worker.skipped[0]


# ---- what is skipped, by name


def reason_of(path, spec):
    cache, _ = allocate(spec, 8, KVCacheLayout.LBHNC)
    layers = {NAME: layer_format(path, cache)}
    worker = u.worker(u.config(8, ([NAME], spec)), {NAME: cache}, formats=layers)
    assert Skipped.of(worker.skipped[0]) is Skipped.PACKED_HEADS
    return worker.skipped[0]


def test_shuffled_planes_of_aiter_are_skipped_by_name(monkeypatch):
    path = V1 + "rocm_aiter_fa.AiterFlashAttentionBackend"
    monkeypatch.setattr(rocm_aiter_ops, "is_shuffle_kv_cache_enabled", lambda: True)
    spec = spec_of(path, "NONE", 1)
    assert spec.num_head_slots == 2
    reason = reason_of(path, spec)
    assert path in reason and "tiles" in reason


@old_vllm
def test_tiled_planes_of_minimax_are_skipped_by_name():
    """Its backend sets nothing but a metadata builder; the layer asks for the slots."""
    path = (
        "vllm.models.minimax_m3.amd.sparse_attention_msa.MiniMaxM3SparseAiterPABackend"
    )
    dense = spec_of(FLASH, "NONE", 1)
    content = HEADS * HEAD_SIZE * dense.dtype.itemsize
    spec = replace(dense, num_head_slots=2, state_content_bytes=content)
    reason = reason_of(path, spec)
    assert "MiniMaxM3SparseBackend" in reason and "tiles" in reason


def test_nvfp4_slots_of_flashinfer_are_skipped_by_name():
    path = V1 + "flashinfer.FlashInferBackend"
    spec = spec_of(path, "NVFP4", 1)
    assert spec.num_head_slots == 2 * HEADS
    reason = reason_of(path, spec)
    assert path in reason and "NVFP4" in reason


@pytest.mark.parametrize(
    "path",
    [
        "rocm_attn.RocmAttentionBackend",
        "rocm_segmented_attn.RocmSegmentedAttentionBackend",
    ],
)
def test_vllm_itself_refuses_connectors_with_rocm_attention(path):
    """So nothing is lost by skipping its planes."""
    module, _, name = (V1 + path).rpartition(".")
    reason = f"{path} is not in this vLLM"
    backends = pytest.importorskip(module, reason=reason)
    assert not getattr(backends, name).supports_kv_connector()


@needs("0.33.0", "all of these backends")
def test_every_backend_whose_slots_are_not_read_is_vllm_s():
    root = Path(vllm.__file__).parent
    for path in formats._HEAD_SLOTS:
        module, _, name = path.rpartition(".")
        file = root / (module.removeprefix("vllm.").replace(".", "/") + ".py")
        classes = [
            node.name
            for node in ast.walk(ast.parse(file.read_text()))
            if isinstance(node, ast.ClassDef)
        ]
        assert name in classes, path
