# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run NIXL's own workers of every rank under context parallelism, in one process.

Each rank has a NIXL agent and a connector of its own, which is told its rank. What is
fake: the process groups and the forward.
"""

import copy
import json
import os
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from rig.servers import free_port

from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.kv_transfer.kv_checksum.testing.process import (
    shut_down,
    start_groups,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend
from vllm.v1.worker.gpu import kv_connector as runner

from .context import HEAD_SIZE, ContextInstance, ContextPull

BLOCK_SIZE = 16

LATENT_MODEL = dict(
    architectures=["DeepseekV2ForCausalLM"],
    model_type="deepseek_v2",
    vocab_size=512,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    kv_lora_rank=HEAD_SIZE // 2,
    q_lora_rank=None,
    qk_nope_head_dim=8,
    qk_rope_head_dim=HEAD_SIZE // 2,
    v_head_dim=8,
    first_k_dense_replace=4,
    max_position_embeddings=4096,
    torch_dtype="bfloat16",
)


def write_latent_model(folder: Path) -> str:
    """Return the folder of a model with latents (MLA), a config alone."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(LATENT_MODEL))
    return str(folder)


def gather_own(found, own, group):
    """Stand in for the gathering of what all ranks tell: they tell the same."""
    found[:] = [own] * len(found)


@contextmanager
def as_rank(rank, size):
    """Let what is made meanwhile take itself for one of several TP ranks."""
    group = SimpleNamespace(rank_in_group=rank, world_size=size, cpu_group=None)

    with (
        patch.object(parallel_state, "get_tp_group", lambda: group),
        patch.object(base_worker, "get_tensor_model_parallel_rank", lambda: rank),
        patch.object(base_worker, "get_tensor_model_parallel_world_size", lambda: size),
        patch.object(torch.distributed, "all_gather_object", gather_own),
    ):
        yield


class RealContextPull(ContextPull):
    """Runs the connectors' worker sides of all ranks of `instance`."""

    def __init__(self, instance):
        super().__init__()
        self.ranks = []
        handshakes = {}
        with set_current_vllm_config(instance.config):
            start_groups(free_port())
            for rank in range(instance.tp):
                with as_rank(rank, instance.tp):
                    worker, active = self.make_rank(instance, rank)
                self.ranks.append((worker, active))
                handshakes[0, rank] = worker.get_handshake_metadata()
        instance.workers = [active.kv_checksum_worker for _, active in self.ranks]
        instance.scheduler.connector.set_xfer_handshake_metadata_pp_aware(handshakes)

    def make_rank(self, instance, rank):
        worker = KVConnectorFactory.create_connector(
            instance.config, KVConnectorRole.WORKER, instance.kv_config
        )
        caches = instance.caches_of(0, rank)
        layer = SimpleNamespace(get_attn_backend=lambda: TritonMLABackend)
        layers = instance.config.compilation_config.static_forward_context
        layers.update(dict.fromkeys(caches, layer))
        take = worker.get_transfer_results

        def damaged(finished):
            results = take(finished)
            for req_id in results.finished_recving - results.failed_recving:
                if req_id in instance.scheduler.requests:
                    manager = instance.scheduler.kv_cache_manager
                    (row,) = manager.get_block_ids(req_id)
                    instance.damage_rank(rank, row)
            return results

        worker.get_transfer_results = damaged
        with patch.object(runner, "get_kv_transfer_group", lambda: worker):
            return worker, runner.ActiveKVConnector(instance.config, caches)

    def step(self, instance, producer, output):
        reports = []
        for _, active in self.ranks:
            # Each rank gets a copy of its own, as over a process's border.
            mine = copy.deepcopy(output)
            active.pre_forward(mine)
            active.finish_forward()
            reports.append(active.post_forward(mine.finished_req_ids))
        return reports

    def close(self, instance):
        for worker, _ in self.ranks:
            shut_down(worker)
        instance.scheduler.connector.shutdown()


class RealContextInstance(ContextInstance):
    """An instance whose ranks transfer over NIXL; `damage_rank` damages a load's."""

    def __init__(self, model, role, **settings):
        port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        with patch.dict(os.environ, port):
            super().__init__(model, role, block_size=BLOCK_SIZE, **settings)
            self.transport = RealContextPull(self)
        self.damage_rank = lambda rank, row: None


def pair(stack: ExitStack, model, sizes, **both):
    """Return P and D of these DCP sizes, closed when `stack` is."""
    made = []
    for role, size in zip(("kv_producer", "kv_consumer"), sizes, strict=True):
        one = RealContextInstance(model, role, dcp=size, tp=size, **both)
        stack.callback(one.transport.close, one)
        made.append(one)
    return made
