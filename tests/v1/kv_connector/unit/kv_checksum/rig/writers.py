# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run vLLM's own writers of attention caches without a GPU, one token at a time.

Caches are vLLM's allocation (`create_kv_cache_views`). Triton writers run in the
interpreter, torch and C++ ones on the CPU. Where a backend calls an operator that is
built for GPUs alone, its own method runs here and vLLM's Triton twin of the operator
stands in for it (`pinned`): what is shown then are the addresses that the backend
hands over, the twin's stores, and not the operator itself.
"""

import sys
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock, patch

import torch

from vllm.v1.attention.ops import triton_reshape_and_cache_flash as triton_writers
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    HiddenStateCacheSpec,
    KVCacheLayout,
    KVCacheTensor,
    KVQuantMode,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    create_kv_cache_views,
    get_kv_quant_mode,
)

from . import caches as u
from .versions import ON_EVERY_RANK

V1 = "vllm.v1.attention.backends."
MLA = V1 + "mla."
HEADS, SCALE = 2, torch.ones(1)

Write = Callable[[torch.Tensor, torch.Tensor], None]
"""Writes a token into each of the slots of a ``[B, H, N, C]`` cache."""


@dataclass
class Writer:
    """One way in which vLLM fills a block.

    Attributes:
        backend: the class that a layer names.
        cells: the kind of cells, as `formats.BACKENDS` calls it.
        spec: of the layer.
        write: see `Write`.
        seen: how: "interpreter", "CPU" or "pinned".
        isa: variant of CPU attention.
        needs: what the CPU must have, as `torch.cpu.get_capabilities` calls it.
        layouts: memory layouts that the backend takes.
        extra: what tells it from others of one backend, in the test's name.
        gap: bytes between blocks, where a model's layers share each block.

    """

    backend: str
    cells: str
    spec: object
    write: Write
    seen: str
    isa: str | None = None
    needs: str | None = None
    layouts: tuple[KVCacheLayout, ...] = (KVCacheLayout.LBHNC, KVCacheLayout.LBNHC)
    extra: str = field(default="", kw_only=True)
    gap: int = field(default=0, kw_only=True)

    @property
    def backend_class(self) -> type:
        return loaded(self.backend)

    @property
    def label(self) -> str:
        more = [x for x in (self.isa, self.extra) if x]
        return "-".join([self.backend.rpartition(".")[2], self.cells, *more])


def allocate(spec, num_blocks, layout, kernel_block_size=None, gap=0):
    """Return a new cache as vLLM views it, and its bytes ``(blocks, bytes)``.

    Each block is a page and a gap behind it.
    """
    page = spec.page_size_bytes + gap
    raw = torch.zeros(num_blocks * page, dtype=torch.int8)
    place = KVCacheTensor(raw.numel(), ["layer"], raw.numel(), page)
    (cache,) = create_kv_cache_views(
        raw, spec, num_blocks, layout, place, kernel_block_size
    )
    return cache, raw.view(torch.uint8).view(num_blocks, page)


# ---- what is not installed here


class _Anything(ModuleType):
    """A module of which every name can be imported."""

    __path__: list[str] = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


_MISSING = (
    "flashinfer",
    "flashinfer.autotuner",
    "flashinfer.cascade",
    "flashinfer.decode",
    "flashinfer.prefill",
    "flashinfer.utils",
    "hpc",
)


def loaded(path):
    """Return a class by its path; FlashInfer's backends import missing packages."""
    module, _, name = path.rpartition(".")
    if "flashinfer" not in path:
        return getattr(import_module(module), name)
    # What asks whether FlashInfer is there must have asked before it seems so.
    import_module(V1 + "flash_attn")
    with installed(*_MISSING[:-1]):
        return getattr(import_module(module), name)


@contextmanager
def installed(*names):
    """Let modules that are not there be imported."""
    new = [name for name in names if name not in sys.modules]
    sys.modules.update({name: _Anything(name) for name in new})
    try:
        yield
    finally:
        for name in new:
            del sys.modules[name]


@contextmanager
def like_a_gpu():
    """Answer Triton's writers as a GPU would: tile sizes and fp8 depend on it."""
    with (
        patch.object(torch.cuda, "get_device_capability", lambda *_: (9, 0)),
        patch.object(
            triton_writers, "_is_supported_kv_cache_dtype", lambda _: True, create=True
        ),
    ):
        yield


# ---- keys and values


def drawn(slots, *shape, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(len(slots))
    return torch.randn(len(slots), *shape, generator=generator).to(dtype)


def layer(**more):
    return SimpleNamespace(
        _k_scale=SCALE, _v_scale=SCALE, _k_scale_float=1.0, _v_scale_float=1.0, **more
    )


def full(cells="NONE", head_size=32, **more):
    mode = KVQuantMode[cells]
    dtype = torch.bfloat16 if cells == "NONE" else torch.uint8
    if cells == "INT8_PER_TOKEN_HEAD":
        dtype = torch.int8
    return FullAttentionSpec(
        block_size=8,
        num_kv_heads=HEADS,
        head_size=head_size,
        **{"dtype": dtype, "kv_quant_mode": mode, **more},
    )


CACHE_DTYPES = {
    "NONE": "auto",
    "FP8_PER_TENSOR": "fp8_e4m3",
    "INT8_PER_TOKEN_HEAD": "int8_per_token_head",
    "FP8_PER_TOKEN_HEAD": "fp8_per_token_head",
    "INT4_PER_TOKEN_HEAD": "int4_per_token_head",
}


def twin(key, value, key_cache, value_cache, slots, cache_dtype, k_scale, v_scale):
    """Replace the operator `reshape_and_cache_flash` by its Triton twin in vLLM."""
    if key_cache.dtype == torch.uint8:
        key_cache = key_cache.view(torch.float8_e4m3fn)
        value_cache = value_cache.view(torch.float8_e4m3fn)
    triton_writers.triton_reshape_and_cache_flash(
        key, value, key_cache, value_cache, slots, cache_dtype, k_scale, v_scale
    )


def attention(path, cells, seen="interpreter", head_size_v=None, **spec_changes):
    """Return a backend whose implementation has `do_kv_cache_update`."""
    dims = dict(head_size_v=head_size_v or 32, **spec_changes)

    def write(cache, slots):
        key = drawn(slots, HEADS, 32)
        value = drawn(slots, HEADS, dims["head_size_v"])
        write_attention(path, cells, cache, slots, key, value)

    spec = full(cells, **dims)
    if cells.endswith("PER_TOKEN_HEAD"):
        spec = loaded(path).customize_spec(spec)
    return Writer(path, cells, spec, write, seen)


def write_attention(path, cells, cache, slots, key, value, **attributes):
    """Write tokens through a backend's own `do_kv_cache_update`.

    Args:
        path: the backend, or its class.
        attributes: what differs from `attributes_of`.

    """
    backend = loaded(path) if isinstance(path, str) else path
    cls = backend.get_impl_cls()
    self = object.__new__(cls)
    vars(self).update(attributes_of(cells) | attributes)
    if self._is_per_token_head_quant:
        # vLLM sets all scales to 1 once, when the cache is new.
        kept = cache.clone()
        self._ensure_scale_caches(cache)
        cache.copy_(kept)
    name = "reshape_and_cache_flash"
    with like_a_gpu(), ExitStack() as stack:
        defining = [c for c in cls.__mro__ if "do_kv_cache_update" in vars(c)]
        modules = {sys.modules[c.__module__] for c in defining}
        for module in (torch.ops._C_cache_ops, *modules):
            stack.enter_context(patch.object(module, name, twin, create=True))
        cls.do_kv_cache_update(self, layer(), key, value, cache, slots)


def attributes_of(cells):
    """Return what the implementations' writers read of themselves."""
    mode = KVQuantMode[cells]
    cache_dtype = CACHE_DTYPES[cells]
    return dict(
        attn_type="decoder",
        cache_dtype=cache_dtype,
        fp8_dtype=torch.float8_e4m3fn,
        head_size=32,
        is_kvcache_nvfp4=False,
        kv_cache_dtype=cache_dtype,
        kv_sharing_target_layer_name=None,
        kv_torch_dtype=torch.bfloat16 if cells == "NONE" else torch.float8_e4m3fn,
        num_kv_heads=HEADS,
        nvfp4_fa2=False,
        _is_per_token_head_quant=mode.is_per_token_head,
        _k_scale_cache=None,
        _kv_quant_mode=get_kv_quant_mode(cache_dtype),
        _set_kv_ptr_range=False,
        _v_scale_cache=None,
    )


def planes(path, cells):
    """Return a backend that keeps keys and values in two head slots."""
    writer = attention(path, cells, "pinned")
    spec = loaded(path).customize_spec(writer.spec)
    assert spec.num_head_slots == 2
    layouts = (KVCacheLayout.LBHNC, KVCacheLayout.BLHNC)
    return replace(writer, spec=spec, layouts=layouts)


def composite(path, cells):
    """Return the general variant's writer, which is Triton attention's."""
    writer = attention(V1 + "triton_attn.TritonAttentionBackend", cells)
    inner = writer.write

    def write(cache, slots):
        cls = loaded(path).get_impl_cls()
        made = SimpleNamespace(
            general_impl=SimpleNamespace(do_kv_cache_update=lambda *a: inner(*a))
        )
        cls.do_kv_cache_update(made, cache, slots)

    return Writer(path, cells, writer.spec, write, "interpreter")


def hpc():
    """Return the writer of HPC attention, whose forward writes before it attends."""
    path = V1 + "hpc_attn.HpcAttentionBackend"

    class Written(Exception):
        pass

    def store(*args):
        twin(*args)
        raise Written

    def write(cache, slots):
        name = "reshape_and_cache_flash"
        with (
            installed("hpc"),
            like_a_gpu(),
            patch.object(torch.ops._C_cache_ops, name, store, create=True),
        ):
            impl = loaded(path).get_impl_cls()
            self = SimpleNamespace(**attributes_of("NONE"), use_fp8=False)
            metadata = MagicMock(hpc_kv_written=False, slot_mapping=slots)
            key = drawn(slots, HEADS, 32)
            try:
                impl.forward(
                    self, layer(), key, key, -key, cache, metadata, torch.empty(1)
                )
            except Written:
                return
            raise AssertionError("nothing was written")

    return Writer(path, "NONE", full(), write, "pinned")


def hidden_states():
    path = "vllm.model_executor.models.extract_hidden_states.CacheOnlyAttentionBackend"
    spec = HiddenStateCacheSpec(
        block_size=8, num_kv_heads=3, head_size=24, dtype=torch.bfloat16
    )

    def write(cache, slots):
        impl = loaded(path).get_impl_cls()
        self = SimpleNamespace(kv_cache_torch_dtype=torch.bfloat16)
        impl.do_kv_cache_update(self, None, drawn(slots, 3, 24), cache, slots)

    return Writer(path, "NONE", spec, write, "CPU")


# ---- CPU attention


def cpu(
    isa, dtype=torch.bfloat16, cache_dtype="auto", head_size=32, size=32, heads=HEADS
):
    """Return CPU attention's writer, for `size` tokens per block.

    For fp8 caches it takes keys and values in bf16.
    """
    path = V1 + "cpu_attn.CPUAttentionBackend"
    fp8 = cache_dtype != "auto"
    spec = FullAttentionSpec(
        block_size=size,
        num_kv_heads=heads,
        head_size=head_size,
        dtype=torch.uint8 if fp8 else dtype,
        kv_quant_mode=get_kv_quant_mode(cache_dtype),
    )

    def write(cache, slots):
        impl = loaded(path).get_impl_cls()
        self = SimpleNamespace(attn_type="decoder", kv_cache_dtype=cache_dtype)
        key = drawn(slots, heads, head_size, dtype=dtype)
        impl.do_kv_cache_update(self, layer(isa=isa), key, -key, cache, slots)

    return Writer(
        path,
        "FP8_PER_TENSOR" if fp8 else "NONE",
        spec,
        write,
        "CPU",
        isa=isa,
        needs="amx_tile" if isa == "amx" else "avx512_f" if fp8 else None,
        layouts=(KVCacheLayout.LBHNC,),
        extra=f"{dtype}-{cache_dtype}-{head_size}x{size}".replace("torch.", ""),
    )


# ---- latents


def latents(cells="NONE", block_size=4, head_size=576, **more):
    dtype = torch.bfloat16 if cells == "NONE" else torch.uint8
    names = {"NONE": "auto", "FP8_PER_TENSOR": "fp8", "FP8_DS_MLA": "fp8_ds_mla"}
    content = 656 if cells == "FP8_DS_MLA" else None
    return MLAAttentionSpec(
        block_size=block_size,
        num_kv_heads=1,
        head_size=head_size,
        **ON_EVERY_RANK,
        dtype=dtype,
        cache_dtype_str=names[cells],
        kv_quant_mode=get_kv_quant_mode(names[cells]),
        **{"state_content_bytes": content, **more},
    )


def cpu_latents(path, needs=None):
    def write(cache, slots):
        impl = loaded(path).get_impl_cls()
        kv_c, k_pe = drawn(slots, 576).split([512, 64], dim=-1)
        impl.do_kv_cache_update(
            None,
            kv_c.contiguous(),
            k_pe[:, None],
            cache.squeeze(1),
            slots,
            "auto",
            SCALE,
        )

    return Writer(path, "NONE", latents(), write, "CPU", needs=needs)


def triton_latents(path, cells):
    """Return `fused_norm_rope`, which writes what `concat_and_cache_mla` does."""
    spec = latents(cells)

    def write(cache, slots):
        kernels = import_module("vllm.models.deepseek_v32.common.kernels")
        n = len(slots)
        kernels.fused_norm_rope(
            *norm_rope_inputs(slots),
            None,
            None,
            None,
            1e-6,
            None,
            torch.zeros(n, 8, dtype=torch.int32),
            slot_mapping=slots,
            mla_kv_cache=cache.squeeze(1),
            mla_kv_cache_dtype=spec.cache_dtype_str,
            has_indexer=False,
        )

    return Writer(path, cells, spec, write, "interpreter")


def norm_rope_inputs(slots):
    """Return what DeepSeek's kernels take before an indexer's arguments."""
    n = len(slots)
    return (
        torch.arange(n),
        drawn(slots, 128),
        torch.ones(128, dtype=torch.bfloat16),
        1e-6,
        drawn(slots, 512),
        torch.ones(512, dtype=torch.bfloat16),
        1e-6,
        drawn(slots, 64),
        torch.ones(n, 64),
    )


def indexer(mx_scales):
    """Return keys of DeepSeek's sparse indexer."""

    def write(cache, slots):
        kernels = import_module("vllm.models.deepseek_v32.common.kernels")
        n = len(slots)
        # vLLM 0.32.0 has float32 scales alone.
        name = "mqa_logits_use_mx_scales"
        with patch.object(kernels, name, lambda: mx_scales, create=True):
            kernels.fused_norm_rope(
                *norm_rope_inputs(slots),
                drawn(slots, 128),
                torch.ones(128),
                torch.zeros(128),
                1e-6,
                torch.ones(n, 64),
                torch.zeros(n, 8, dtype=torch.int32),
                slot_mapping=slots,
                indexer_k_cache=cache.squeeze(1),
            )

    return Writer(
        MLA + "indexer.DeepseekV32IndexerBackend",
        "INDEXER",
        u.INDEXER,
        write,
        "interpreter",
        extra="ue8m0" if mx_scales else "float32",
    )


def v4_latents(window):
    """Return the writer of DeepSeek-V4's window cache.

    Its blocks are padded to whole latents.
    """
    spec = SlidingWindowMLASpec(
        block_size=4,
        num_kv_heads=1,
        head_size=512,
        dtype=torch.uint8,
        sliding_window=window,
        cache_dtype_str="fp8_ds_mla",
        alignment=576,
        model_version="deepseek_v4",
        state_content_bytes=584,
        **ON_EVERY_RANK,
        kv_quant_mode=get_kv_quant_mode("fp8_ds_mla"),
    )

    def write(cache, slots):
        utils = import_module("vllm.models.deepseek_v4.common.ops.cache_utils")
        blocks = cache.squeeze(1)
        utils.quantize_and_insert_k_cache(
            drawn(slots, 512), blocks, slots, block_size=blocks.shape[1]
        )

    return Writer(
        MLA + "sparse_swa.DeepseekSparseSWABackend",
        "FP8_DS_MLA",
        spec,
        write,
        "interpreter",
    )


TRITON = V1 + "triton_attn.TritonAttentionBackend"
DIFFKV = ("flash_attn_diffkv.FlashAttention", "triton_attn_diffkv.TritonAttention")
PINNED = (
    "flash_attn.FlashAttentionBackend",
    "flashinfer.FlashInferBackend",
    "rocm_aiter_fa.AiterFlashAttentionBackend",
)
COMPOSITES = (
    "triton_flash_attn.TritonFlashAttentionBackend",
    "triton_flashinfer.TritonFlashInferBackend",
)
B12X = V1 + "b12x.B12xPagedAttentionBackend"
ROWS = ("NONE", "FP8_PER_TENSOR")

WRITERS = [
    *(attention(TRITON, cells) for cells in CACHE_DTYPES),
    *(
        attention(f"{V1}{path}DiffKVBackend", cells, head_size_v=16)
        for path in DIFFKV
        for cells in ROWS
    ),
    *(attention(V1 + path, cells, "pinned") for path in PINNED for cells in ROWS),
    attention(V1 + "flex_attention.FlexAttentionBackend", "NONE", "pinned"),
    *(planes(B12X, cells) for cells in ROWS),
    *(composite(V1 + path, cells) for path in COMPOSITES for cells in ROWS),
    hpc(),
    hidden_states(),
    *(cpu("vec", dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32)),
    *(cpu("vec", cache_dtype=d) for d in ("fp8", "fp8_e4m3", "fp8_e5m2")),
    *(
        cpu("vec16", dtype, head_size=80, size=16, heads=1)
        for dtype in (torch.bfloat16, torch.float32)
    ),
    cpu("amx"),
    cpu("amx", head_size=64, heads=1),
    cpu("amx", size=64, heads=1),
    *(cpu("amx", cache_dtype=d) for d in ("fp8", "fp8_e4m3", "fp8_e5m2")),
    cpu_latents(MLA + "cpu_mla.CPUMLABackend"),
    cpu_latents(MLA + "amx_mla.AMXMLABackend", needs="amx_tile"),
    *(
        triton_latents(MLA + "flashmla_sparse.FlashMLASparseBackend", cells)
        for cells in (*ROWS, "FP8_DS_MLA")
    ),
    indexer(False),
    indexer(True),
    v4_latents(128),
]
"""One for every backend and kind of cells that `formats.BACKENDS` lists, but for the
backends of latents that inherit their writer."""
