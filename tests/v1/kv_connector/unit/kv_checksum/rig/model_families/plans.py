# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Hold the plans of model families' caches, made in a process of their own."""

import functools
import os
import pickle
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumWorker
from vllm.distributed.kv_transfer.kv_checksum.worker.formats import LayerFormat
from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheLayout
from vllm.v1.worker.utils import allocate_kv_cache

NUM_BLOCKS = 300
"""Blocks of every group in the caches of `Plan.allocate`."""

TESTS = Path(__file__).parents[6]
UNIT = Path(__file__).parents[3]


@dataclass
class Plan:
    """The caches of a model, as vLLM plans them.

    Attributes:
        config: the groups and their places.
        layout: name of the memory layout.
        backends: name of the class of each layer's backend, by layer name.
        formats: what the feature finds of each layer.
        kv_heads: KV heads that all layers share, or None.

    """

    config: KVCacheConfig
    layout: str
    backends: dict[str, str]
    formats: dict[str, LayerFormat]
    kv_heads: int | None

    def allocate(self) -> dict[str, torch.Tensor]:
        """Allocate the caches as vLLM does; by layer name."""
        return allocate_kv_cache(
            self.config, torch.device("cpu"), KVCacheLayout[self.layout]
        )

    def worker(self, caches: dict[str, torch.Tensor]) -> KVChecksumWorker:
        """Return the checksum worker of the one rank."""
        return KVChecksumWorker(
            self.config,
            caches,
            tp_rank=0,
            tp_size=1,
            pp_rank=0,
            uniform_kv_heads=self.kv_heads,
            formats=self.formats,
        )


@functools.cache
def plans() -> dict[str, Plan]:
    """Return the plans of all models, by name, in the order of `configurations`."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "plans"
        environment = {
            **os.environ,
            "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join([str(TESTS), str(UNIT)]),
            "VLLM_LOGGING_LEVEL": "ERROR",
        }
        module = f"{__package__.removeprefix('tests.v1.kv_connector.unit.')}.make_plans"
        done = subprocess.run(
            [sys.executable, "-m", module, str(target)],
            env=environment,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            raise RuntimeError(f"no plans: {done.stderr[-4000:]}")
        return pickle.loads(target.read_bytes())
