# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make caches as vLLM does: real layers' specs, real planning, real allocation.

Tiny models are built, and vLLM groups, places and allocates the caches of their layers.
What is fake: at TP 2 the TP group's size and rank are set by hand, as one process holds
one rank.
"""

from importlib import import_module
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rig.families import tiny
from rig.model import tiny_qwen3
from rig.servers import ENVIRONMENT, free_port

from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_checksum import create_kv_checksum_worker
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import record_kv_cache_layout
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import allocate_kv_cache

try:
    from vllm.v1.core import kv_cache_planning as planning
except ImportError:  # vLLM 0.32.0
    from vllm.v1.core import kv_cache_utils as planning

MODELS = {
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "deepseek_v2": ("deepseek_v2", "DeepseekV2ForCausalLM"),
    "gemma3": ("gemma3", "Gemma3ForCausalLM"),
    "granite4_h": ("granitemoehybrid", "GraniteMoeHybridForCausalLM"),
    "qwen3_next": ("qwen3_next", "Qwen3NextForCausalLM"),
    "mamba": ("mamba", "MambaForCausalLM"),
    "olmo_hybrid": ("olmo_hybrid", "OlmoHybridForCausalLM"),
}


NUMBERS = (2, 5)
"""Of the layers that stand without a model."""

KDA = dict(head_dim=64, num_heads=4, short_conv_kernel_size=4, use_full_rank_gate=True)
KDA_CONFIG = SimpleNamespace(
    hidden_size=256,
    hidden_act="silu",
    rms_norm_eps=1e-6,
    linear_attn_config=KDA,
    # Bailing's names
    head_dim=64,
    num_attention_heads=4,
    short_conv_kernel_size=4,
    no_kda_lora=True,
)
"""What KDA layers read of a model's configuration."""


def kda_layers(path):
    """Return what builds KDA layers of a class."""

    def build(config):
        module, _, name = path.rpartition(".")
        layer_class = getattr(import_module(module), name)
        return torch.nn.ModuleList(
            layer_class(KDA_CONFIG, config, prefix=f"model.layers.{n}.self_attn")
            for n in NUMBERS
        )

    return build


def bailing_kda_layers(config):
    module = import_module("vllm.model_executor.models.bailing_moe_v3")
    return torch.nn.ModuleList(
        module.BailingMoeV3KimiDeltaAttention(
            KDA_CONFIG,
            prefix=f"model.layers.{n}.attention",
            model_config=config.model_config,
            cache_config=config.cache_config,
        )
        for n in NUMBERS
    )


def short_conv_layers(config):
    module = import_module("vllm.model_executor.layers.mamba.short_conv")
    sizes = SimpleNamespace(conv_L_cache=4, conv_bias=False)
    return torch.nn.ModuleList(
        module.ShortConv(
            sizes,
            dim=256,
            layer_idx=n,
            model_config=config.model_config,
            cache_config=config.cache_config,
            prefix=f"model.layers.{n}.conv",
        )
        for n in NUMBERS
    )


def linear_attention_layers(config):
    module = import_module(
        "vllm.model_executor.layers.mamba.linear.minimax_linear_attn"
    )
    sizes = SimpleNamespace(
        hidden_size=256, num_attention_heads=8, head_dim=32, num_hidden_layers=8
    )
    return torch.nn.ModuleList(
        module.MiniMaxText01LinearAttention(
            sizes, config, prefix=f"model.layers.{n}.linear_attn"
        )
        for n in NUMBERS
    )


STATE_LAYERS = {
    "kda": kda_layers(
        "vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn."
        "KimiGatedDeltaNetAttention"
    ),
    "kda of Kimi K3": kda_layers("vllm.models.kimi_k3.nvidia.kda.KimiK3DeltaAttention"),
    "kda of Bailing": bailing_kda_layers,
    "short convolution": short_conv_layers,
    "linear attention": linear_attention_layers,
}
"""vLLM's own layers without the rest of their models, which take more than a CPU; what
they read of a model's configuration stands in for it."""


@pytest.fixture(scope="module", autouse=True)
def single_rank():
    patch = pytest.MonkeyPatch()
    for name, value in ENVIRONMENT.items():
        patch.setenv(name, value)
    parallel_state.init_distributed_environment(
        1, 0, f"tcp://127.0.0.1:{free_port()}", 0, "gloo"
    )
    # A rank whose group is said to be larger is alone all the same.
    patch.setattr(torch.distributed, "all_gather_object", gather_one_s_own)
    yield
    parallel_state.destroy_model_parallel()
    parallel_state.destroy_distributed_environment()
    patch.undo()


def gather_one_s_own(found, own, group):
    found[:] = [own] * len(found)


def vllm_config(family, **settings):
    if family in STATE_LAYERS:
        config = vllm_config("qwen3", **settings)
        config.cache_config.mamba_block_size = 2048
        return config
    module, architecture = MODELS[family]
    module = import_module(f"vllm.model_executor.models.{module}")
    # Known classes are inspected here instead of in a process of their own.
    ModelRegistry.register_model(architecture, getattr(module, architecture))
    folder = tiny_qwen3() if family == "qwen3" else tiny(family)
    transfer = dict(
        kv_connector="NixlConnector", kv_role="kv_both", enable_kv_checksum=True
    )
    wanted = dict(
        model=str(folder),
        max_model_len=2048,
        block_size=32,
        enforce_eager=True,
        enable_prefix_caching=False,
        kv_cache_memory_bytes=16 << 20,
        kv_transfer_config=transfer,
    )
    return EngineArgs(**{**wanted, **settings}).create_engine_config()


class Rank:
    """One TP rank's caches, filled with random bytes, and its checksum worker.

    Args:
        settings: further engine arguments.
        load: loads weights into the model; without it layers have no memory, and
            caches are not bound to them.

    """

    def __init__(self, family, layout, rank, tp, settings=(), load=None):
        config = vllm_config(family, **dict(settings))
        with set_current_vllm_config(config):
            parallel_state.destroy_model_parallel()
            parallel_state.initialize_model_parallel()
            group = parallel_state.get_tp_group()
            group.world_size, group.rank_in_group = tp, rank
            with (
                torch.device("meta" if load is None else "cpu"),
                set_default_torch_dtype(config.model_config.dtype),
            ):
                build = STATE_LAYERS.get(family, initialize_model)
                model = build(config)
            if load is not None:
                load(model)
            current_platform.update_block_size_for_backend(config)
            specs = get_kv_cache_spec(config)
            record_kv_cache_layout(config.cache_config, layout)
            wanted = [config, [specs], [16 << 20]]
            if hasattr(planning, "get_global_kv_cache_groups"):
                wanted.append(planning.get_global_kv_cache_groups(*wanted[:2]))
            (self.cfg,) = planning.get_kv_cache_configs(*wanted)
            caches = self.caches = allocate_kv_cache(
                self.cfg,
                torch.device("cpu"),
                config.cache_config.get_resolved_kv_cache_layout(),
            )
            storage = next(iter(caches.values())).untyped_storage()
            self.raw = torch.empty(0, dtype=torch.uint8).set_(storage)
            self.raw.random_(generator=torch.Generator().manual_seed(rank))
            connector = SimpleNamespace(
                _kv_cache_config=self.cfg, set_kv_checksum_worker=lambda worker: None
            )
            self.worker = create_kv_checksum_worker(config, connector, caches)
            self.layers = config.compilation_config.static_forward_context
            if load is not None:
                for name, cache in caches.items():
                    self.layers[name].bind_kv_cache(cache)

    def page(self, name, block, size) -> np.ndarray:
        """Return a layer's bytes in one block, by vLLM's placement."""
        (tensor,) = [t for t in self.cfg.kv_cache_tensors if name in t.layers]
        start = tensor.offset + tensor.layers.index(name) * tensor.layer_stride
        start += block * tensor.block_stride
        return self.raw[start : start + size].numpy()

    def cells(self, name, spec, block) -> np.ndarray:
        """Return uint8 ``(heads, tokens, bytes)`` of an attention layer."""
        heads, tokens = spec.num_kv_heads, spec.block_size
        content = spec.state_content_size_bytes
        page = self.page(name, block, heads * tokens * content)
        backend = self.layers[name].attn_backend.get_name()
        if backend != "CPU_ATTN":
            return page.reshape(heads, tokens, content)
        width = spec.dtype.itemsize
        halves = page.reshape(heads, 2, -1, width)
        if torch.cpu._is_amx_tile_supported():
            # Keys as [tokens / 16, head size / 2, 16, 2], values in pairs of tokens.
            keys = halves[:, 0].reshape(heads, tokens // 16, -1, 16, 2, width)
            keys = keys.transpose(0, 1, 3, 2, 4, 5)
            values = halves[:, 1].reshape(heads, -1, tokens // 2, 16, 2, width)
            values = values.transpose(0, 2, 4, 1, 3, 5)
        else:
            # Keys as [head size, tokens], then values as [tokens, head size].
            keys = halves[:, 0].reshape(heads, -1, tokens, width).transpose(0, 2, 1, 3)
            values = halves[:, 1]
        parts = [part.reshape(heads, tokens, -1) for part in (keys, values)]
        return np.concatenate(parts, axis=-1)

    def state_rows(self, name, spec, block, conv_layout):
        """Return each state's rows ``(local rows, elements)`` as unsigned words."""
        page, at, states = self.page(name, block, spec.page_size_bytes), 0, []
        for i, (shape, dtype) in enumerate(zip(spec.shapes, spec.dtypes, strict=True)):
            size = int(np.prod(shape)) * dtype.itemsize
            state = page[at : at + size].view(f"<u{dtype.itemsize}").reshape(shape)
            if i == 0 and conv_layout == "SD":
                state = state.T
            states.append(state.reshape(len(state), -1))
            at += size
        return states


def number_of(name):
    return next(int(part) for part in name.split(".") if part.isdecimal())
