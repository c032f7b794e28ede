# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run connectors' own workers over real NIXL (UCX) and Mooncake (TCP), in one process.

One rank per instance, the first. What is real: schedulers, connectors of both roles,
the hooks in `ActiveKVConnector`, the libraries. What is fake: the forward.
"""

import os
import time
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
from rig.mooncake_store import MooncakeStore
from rig.servers import free_port

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.testing.process import (
    shut_down,
    start_groups,
)
from vllm.distributed.kv_transfer.kv_checksum.worker.views import layer_spec
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorRole,
    KVConnectorTransferResults,
)
from vllm.plugins import load_general_plugins
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.kv_cache_interface import KVCacheTensor
from vllm.v1.simple_kv_offload import copy_backend, cuda_mem_ops
from vllm.v1.worker.gpu import kv_connector as runner

from . import instances as rig
from . import transports

# Both libraries read these when they are loaded.
os.environ.setdefault("UCX_TLS", "tcp,self,sm")
os.environ.setdefault("MC_FORCE_TCP", "1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
# As every vLLM process does: on a machine without a GPU, the rig's adjustments.
load_general_plugins()

BOOTSTRAP = "VLLM_MOONCAKE_BOOTSTRAP_PORT"

BLOCK_SIZE = 32
"""CPU attention's, which the connectors ask."""


class RealWorkers(transports.FakeTransport):
    """Runs the worker side of `instance`'s connector; replaces its transport."""

    def __init__(self, instance):
        super().__init__()
        fake = instance.transport
        self.connector, self.carrier = fake.connector, fake.carrier
        # Layers whose KV a drafter writes, behind the forward.
        self.draft_layers = ()
        self.producer_params = fake.producer_params
        self.consumer = fake.consumer_params
        config = instance.config
        self.bootstrap = f"http://127.0.0.1:{os.environ.get(BOOTSTRAP)}"
        with set_current_vllm_config(config):
            start_groups(free_port())
            # The scheduler's shows one layer of a group of several specs.
            self.worker = KVConnectorFactory.create_connector(
                config,
                KVConnectorRole.WORKER,
                instance.worker_kv_config(instance.model_kv_config, 0, 0),
            )
            caches = instance.caches_of(0, 0)
            # Layers tell how they keep their KV: here in rows.
            layer = SimpleNamespace(get_attn_backend=lambda: FlashAttentionBackend)
            layers = config.compilation_config.static_forward_context
            layers.update(dict.fromkeys(caches, layer))
            layers.update(instance.layers_with_backends())
            with patch.object(runner, "get_kv_transfer_group", lambda: self.worker):
                self.active = runner.ActiveKVConnector(config, caches)
        instance.workers = [self.active.kv_checksum_worker]
        if handshake := self.worker.get_handshake_metadata():
            instance.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
                {(0, 0): handshake}
            )
        self.take_results, self.worker.get_transfer_results = (
            self.worker.get_transfer_results,
            lambda finished: self.damaged_results(instance, finished),
        )

    def consumer_params(self, producer, params, answer):
        params = self.consumer(producer, params, answer)
        if "remote_bootstrap_addr" in params:
            params["remote_bootstrap_addr"] = self.bootstrap
        return params

    def damaged_results(self, instance, finished_req_ids):
        """Damage KV between transfer and summing; return the connector's results."""
        if self.hold_loads:
            return KVConnectorTransferResults()
        results = self.take_results(finished_req_ids)
        for req_id in results.finished_recving - results.failed_recving:
            if req_id in instance.scheduler.requests:
                rows = instance.scheduler.kv_cache_manager.get_block_ids(req_id)
                instance.damage(instance, req_id, rows[0])
        return results

    def step(self, instance, producer, output):
        self.active.pre_forward(output)
        self.active.finish_forward()
        if not self.draft_layers:
            return [self.active.post_forward(output.finished_req_ids)]
        drafts = self.take_drafts(instance, output)
        finished = output.finished_req_ids
        report = self.active.post_forward(finished, defer_finalize=True)
        for cells, written in drafts:
            cells.copy_(written)
        self.active.finalize_step()
        return [report]

    def take_drafts(self, instance, output):
        """Empty the blocks that a drafter writes in this step; return its KV."""
        rows = instance.scheduler.kv_cache_manager.get_block_ids
        blocks = {b for r in output.num_scheduled_tokens for b in rows(r)[0] if b}
        drafts = []
        for layer in self.draft_layers:
            for block in blocks:
                cells = instance.kv[layer][block]
                drafts.append((cells, cells.clone()))
                cells.zero_()
        return drafts

    def tables(self):
        """Return the payloads that lie on the worker side, by table."""
        side = self.worker.connector_worker
        checksums = getattr(side, "kv_checksums", None)
        names = ("_outgoing", "_received", "reqs_need_send")
        tables = {
            name: getattr(owner, name)
            for owner in (side, checksums)
            for name in names
            if hasattr(owner, name)
        }
        return {
            name: table.qsize() if hasattr(table, "qsize") else len(table)
            for name, table in tables.items()
        }

    def close(self, instance):
        shut_down(self.worker)
        instance.scheduler.connector.shutdown()


def real_instance(
    stack: ExitStack, model, role: str, transport: str, **settings
) -> rig.Instance:
    """Return an instance with real workers, closed when `stack` is."""
    if transport == "mooncake":
        settings["kv_connector_extra_config"] = {"mooncake_protocol": "tcp"}
    ports = {"VLLM_NIXL_SIDE_CHANNEL_PORT": free_port(), BOOTSTRAP: free_port()}
    with patch.dict(os.environ, {k: str(v) for k, v in ports.items()}):
        instance = rig.Instance(
            model, role, transport=transport, block_size=BLOCK_SIZE, **settings
        )
        instance.transport = RealWorkers(instance)
    stack.callback(instance.transport.close, instance)
    return instance


class _Passed:
    """A stand-in for a device's event or stream, all of whose work is done."""

    cuda_stream = 0

    def __init__(self, *args, **kwargs): ...

    @staticmethod
    def priority_range():
        return 0, 0

    def query(self):
        return True

    def record(self, *args): ...

    wait = wait_event = synchronize = record


@contextmanager
def without_a_device():
    """Let vLLM's offloading run where there is no device to wait for."""
    with ExitStack() as stack:
        for owner, name in (
            (torch, "Event"),
            (torch.cuda, "Event"),
            (torch.cuda, "Stream"),
            (torch.cuda, "current_stream"),
        ):
            stack.enter_context(patch.object(owner, name, _Passed))
        # Whoever imported it first, the rig's adjustments count.
        copy = cuda_mem_ops.copy_blocks
        stack.enter_context(patch.object(copy_backend, "copy_blocks", copy))
        yield


class _Placed:
    """An instance whose KV cache configuration says where each layer's cache lies."""

    def make_kv_config(self, groups):
        config = super().make_kv_config(groups)
        for group in config.kv_cache_groups:
            for name in group.layer_names:
                page = layer_spec(group.kv_cache_spec, name).page_size_bytes
                size = page * self.num_blocks
                config.kv_cache_tensors.append(
                    KVCacheTensor(size, [name], layer_stride=size, block_stride=page)
                )
        return config


def offloading_instance(
    stack: ExitStack, model, make=rig.Instance, **settings
) -> rig.Instance:
    """Return an instance that offloads to host memory and loads from there.

    Args:
        stack: closes it.
        model: the model's folder.
        make: its class.
        settings: further ones.

    """
    placed = type(f"Placed{make.__name__}", (_Placed, make), {})
    instance = placed(
        model,
        "kv_both",
        **{"block_size": BLOCK_SIZE, **settings},
        kv_connector="SimpleCPUOffloadConnector",
        kv_connector_extra_config={"cpu_bytes_to_use": 16 << 20},
    )
    instance.transport = RealWorkers(instance)
    instance.transport.carrier = KVChecksumCarrier.STORED
    stack.callback(instance.transport.close, instance)
    return instance


def storing_instance(
    stack: ExitStack, model, store: MooncakeStore, make=rig.Instance, **settings
) -> rig.Instance:
    """Return an instance that stores in a real Mooncake store and loads from it.

    Args:
        stack: closes it.
        model: the model's folder.
        store: the store.
        make: its class.
        settings: further ones.

    """
    options = {"lookup_rpc_port": free_port()}
    with patch.dict(os.environ, store.environment):
        instance = make(
            model,
            "kv_both",
            **{"block_size": BLOCK_SIZE, **settings},
            kv_connector="MooncakeStoreConnector",
            kv_connector_extra_config=options,
        )
        # First of all: what is left of an open channel does not let the process end.
        stack.callback(instance.scheduler.connector.connector_scheduler.client.close)
        instance.transport = RealWorkers(instance)
    instance.transport.carrier = KVChecksumCarrier.STORED
    stack.callback(instance.transport.close, instance)
    return instance


def run(p, d, until, timeout_s=20.0):
    """Step both until `until` says so."""
    end = time.monotonic() + timeout_s
    while not until():
        assert time.monotonic() < end, (p.scheduler.requests, d.scheduler.requests)
        p.step()
        d.step(p)
        # NIXL's and Mooncake's threads need the interpreter too.
        time.sleep(0.001)
