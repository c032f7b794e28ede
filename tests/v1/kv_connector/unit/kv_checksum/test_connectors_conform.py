# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run vLLM's own connectors through the suite for authors, over the real libraries."""

import os
from unittest.mock import patch

import pytest
from rig.mooncake_store import MooncakeStore
from rig.servers import free_port

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.testing import (
    ConnectorFactory,
    assert_conforms,
)

from .rig import real_workers as real
from .rig.versions import REPORTED_PUSH, needs


class NixlPull(ConnectorFactory):
    connector = "NixlConnector"
    carrier = KVChecksumCarrier.KV_TRANSFER_PARAMS
    block_size = real.BLOCK_SIZE

    def starting(self, role):
        return patch.dict(os.environ, VLLM_NIXL_SIDE_CHANNEL_PORT=str(free_port()))


class NixlPush(NixlPull):
    connector = "NixlPushConnector"
    carrier = KVChecksumCarrier.CONNECTOR


class Mooncake(ConnectorFactory):
    connector = "MooncakeConnector"
    extra_config = {"mooncake_protocol": "tcp"}
    block_size = real.BLOCK_SIZE

    def starting(self, role):
        self.port = str(free_port())
        return patch.dict(os.environ, {real.BOOTSTRAP: self.port})

    def started(self, instance):
        instance.bootstrap = f"http://127.0.0.1:{self.port}"

    def producer_params(self, req_id):
        return super().producer_params(req_id) | {"transfer_id": f"xfer-{req_id}"}

    def consumer_params(self, producer, params, answer):
        """Return what a router sends to D without waiting for P's answer."""
        return dict(
            do_remote_decode=False,
            do_remote_prefill=True,
            remote_engine_id=producer.config.kv_transfer_config.engine_id,
            remote_bootstrap_addr=producer.bootstrap,
            transfer_id=params["transfer_id"],
        )


class Offload(ConnectorFactory):
    connector = "SimpleCPUOffloadConnector"
    extra_config = {"cpu_bytes_to_use": 16 << 20}
    carrier = KVChecksumCarrier.STORED
    loads_own = True
    block_size = real.BLOCK_SIZE

    def surroundings(self):
        return real.without_a_device()


class Store(ConnectorFactory):
    connector = "MooncakeStoreConnector"
    carrier = KVChecksumCarrier.STORED
    block_size = real.BLOCK_SIZE

    def __init__(self, store):
        self.store = store

    def settings(self, role):
        plain = super().settings(role)
        return plain | {"kv_connector_extra_config": {"lookup_rpc_port": free_port()}}

    def surroundings(self):
        return real.without_a_device()

    def starting(self, role):
        return patch.dict(os.environ, self.store.environment)

    def wait_until_stored(self, instance):
        super().wait_until_stored(instance)
        instance.worker.connector_worker.kv_send_thread.request_queue.join()

    def close(self, scheduler_side):
        super().close(scheduler_side)
        scheduler_side.connector_scheduler.client.close()


class Several(Offload):
    """MultiConnector, of which one inside transfers and one keeps."""

    connector = "MultiConnector"

    def settings(self, role):
        inner = [
            dict(kv_connector="NixlConnector", kv_buffer_device="cpu", kv_role=role),
            dict(
                kv_connector="SimpleCPUOffloadConnector",
                kv_connector_extra_config=self.extra_config,
                kv_role=role,
            ),
        ]
        extra = {"connectors": inner}
        return dict(kv_connector=self.connector, kv_connector_extra_config=extra)

    starting = NixlPull.starting


class SeveralTransfer(Several):
    carrier = KVChecksumCarrier.KV_TRANSFER_PARAMS


class Offloading(ConnectorFactory):
    """Another copy engine than a GPU's; all else is vLLM's."""

    connector = "OffloadingConnector"
    extra_config = {
        "spec_name": "HostOffloading",
        "spec_module_path": "kv_checksum_rig.offloading",
        "cpu_bytes_to_use": 16 << 20,
    }
    carrier = KVChecksumCarrier.LEDGER
    block_size = real.BLOCK_SIZE


class OffloadingAtOnce(Offloading):
    """With loads in the step that uses them."""

    extra_config = Offloading.extra_config | {"sync_load_budget_bytes": 1 << 30}


@pytest.mark.parametrize(
    "factory",
    [
        NixlPull,
        pytest.param(NixlPush, marks=needs("0.31.0", REPORTED_PUSH)),
        Mooncake,
        Offload,
        Several,
        SeveralTransfer,
        Offloading,
        OffloadingAtOnce,
    ],
)
def test_vllm_s_own_connectors_conform(factory):
    assert_conforms(factory())


def test_vllm_s_store_conforms(tmp_path):
    with MooncakeStore(tmp_path / "store") as store:
        assert_conforms(Store(store))
