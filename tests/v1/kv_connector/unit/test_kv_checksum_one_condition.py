# SPDX-License-Identifier: Apache-2.0
"""Whether checksums are on is one condition, from the configuration, for all parts."""

import kv_checksum_instances as rig
from vllm.v1.worker.gpu import kv_connector as runner


class Bare:
    """A connector out of vLLM's tree, which never ran the base class's __init__."""

    registered = False

    def register_kv_caches(self, caches):
        self.registered = True

    def set_host_xfer_buffer_ops(self, copy):
        pass


def active(monkeypatch, config, connector):
    monkeypatch.setattr(runner, "get_kv_transfer_group", lambda: connector)
    return runner.ActiveKVConnector(config, {})


def test_with_checksums_off_nothing_of_the_connector_is_read(model, monkeypatch):
    config = rig.vllm_config(model, "kv_both", enable_kv_checksum=False)
    made = active(monkeypatch, config, Bare())
    assert made.kv_checksum_worker is None and made.kv_connector.registered


def test_without_a_carrier_nothing_of_the_connector_is_read(model, monkeypatch):
    config = rig.vllm_config(
        model,
        "kv_both",
        kv_connector="ExampleConnector",
        kv_connector_extra_config={"shared_storage_path": "unused"},
    )
    assert active(monkeypatch, config, Bare()).kv_checksum_worker is None
