# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Build a tiny model of each family on an H100's stand-in and plan its caches.

Run as a program with the path of a file, into which it pickles the plans.
"""

# ruff: noqa: E402, I001
from .stand_in import building, stand_in_for_an_h100

stand_in_for_an_h100()

import json
import os
import pickle
import sys
import tempfile
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rig.servers import ENVIRONMENT, free_port

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_checksum.worker import factory, formats
from vllm.distributed.kv_transfer.kv_connector.utils import get_current_attn_backends
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.models.registry import ModelRegistry
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_default_torch_dtype
from vllm.v1.attention.backends.utils import (
    get_supported_kv_cache_layouts,
    resolve_kv_cache_layout,
)
from vllm.v1.core import kv_cache_planning as planning
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec
from vllm.v1.worker.utils import allocate_kv_cache
from vllm.v1.worker.workspace import init_workspace_manager

from .configurations import COMMON, MODELS, Family
from .plans import NUM_BLOCKS, Plan

CONNECTOR = dict(
    kv_connector="NixlConnector", kv_role="kv_both", enable_kv_checksum=True
)


def vllm_config(family: Family, folder: Path) -> VllmConfig:
    """Return vLLM's configuration for a family, as its engine makes it."""
    (folder / "config.json").write_text(json.dumps(family.config))
    module = import_module(family.module)
    model_class = getattr(module, family.architecture)
    # A known class is inspected here instead of in a process of its own.
    ModelRegistry.register_model(family.architecture, model_class)
    settings = dict(
        model=str(folder),
        skip_tokenizer_init=True,
        max_model_len=512,
        enforce_eager=True,
        kv_cache_memory_bytes=1 << 30,
        kv_transfer_config=None if family.not_run else CONNECTOR,
    )
    if family.draft is not None:
        settings["speculative_config"] = drafting(family.draft, folder)
    return EngineArgs(**{**settings, **family.settings}).create_engine_config()


def drafting(draft: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Return vLLM's speculative configuration, with the draft model's folder."""
    settings = dict(draft)
    values = settings.pop("config", None)
    if values is not None:
        draft_folder = folder / "draft"
        draft_folder.mkdir()
        (draft_folder / "config.json").write_text(json.dumps({**COMMON, **values}))
        settings["model"] = str(draft_folder)
    return settings


def build_draft(config: VllmConfig) -> None:
    """Build the drafter, and mark its layers as vLLM's speculators do."""
    speculative = config.speculative_config
    if speculative is None:
        return
    layers = config.compilation_config.static_forward_context
    targets = set(layers)
    initialize_model(config, model_config=speculative.draft_model_config)
    assert set(layers) > targets
    for name in set(layers) - targets:
        layers[name].is_draft_layer = True


def plan_of(config: VllmConfig) -> Plan:
    """Build the model and plan its caches, step by step as vLLM's engine does."""
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel()
    with building(), set_default_torch_dtype(config.model_config.dtype):
        initialize_model(config)
        build_draft(config)
    current_platform.update_block_size_for_backend(config)
    register_all_kvcache_specs(config)
    specs = get_kv_cache_spec(config)
    supported = get_supported_kv_cache_layouts(get_current_attn_backends(config))
    layout = resolve_kv_cache_layout(
        config, [[x.name for x in supported]], list(specs.values())
    )
    groups = planning.get_global_kv_cache_groups(config, [specs])
    cfg = small_configuration(config, specs, groups)
    caches = allocate_kv_cache(cfg, torch.device("cpu"), layout)
    layers = config.compilation_config.static_forward_context
    return Plan(
        cfg,
        layout.name,
        {name: layers[name].get_attn_backend().__name__ for name in caches},
        formats.layer_formats(config, caches),
        factory._uniform_kv_heads(config),
    )


def small_configuration(config, specs, groups) -> KVCacheConfig:
    """Return vLLM's plan for memory of `NUM_BLOCKS` blocks: sizes stay small."""
    config.cache_config.num_gpu_blocks_override = NUM_BLOCKS
    (cfg,) = planning.get_kv_cache_configs(config, [specs], [1 << 30], groups)
    assert cfg.num_blocks == NUM_BLOCKS
    return cfg


def main(target: str) -> None:
    os.environ.update(ENVIRONMENT)
    address = f"tcp://127.0.0.1:{free_port()}"
    parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
    init_workspace_manager(torch.device("meta"))
    made = {}
    for name, family in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            config = vllm_config(family, Path(folder))
            with set_current_vllm_config(config):
                made[name] = plan_of(config)
    Path(target).write_bytes(pickle.dumps(made))
    # What stands in for a device must not be torn down as one.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
