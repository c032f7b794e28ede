# SPDX-License-Identifier: Apache-2.0
"""Settings, refusals and counters."""

import subprocess
import sys

import kv_checksum_instances as rig
import prometheus_client
import pytest
from vllm.config import KVTransferConfig
from vllm.v1.outputs import KVConnectorOutput

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumProm
from vllm.distributed.kv_transfer.kv_checksum.verdict import Unverified


def test_both_settings_are_off_by_default():
    config = KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    assert not config.enable_kv_checksum and not config.kv_checksum_fail_closed


def test_fail_closed_needs_checksums():
    with pytest.raises(
        ValueError, match="(?s)kv_checksum_fail_closed.*enable_kv_check"
    ):
        KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role="kv_both",
            kv_checksum_fail_closed=True,
        )


def test_help_shows_the_settings():
    code = (
        "import sys; sys.argv = ['vllm', 'serve', '--help=kv-transfer-config'];"
        "from vllm.entrypoints.cli.main import main; main()"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert "enable_kv_checksum" in result.stdout, result.stderr[-500:]
    assert "kv_checksum_fail_closed" in result.stdout


def test_model_runner_v1_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    model = rig.write_model(tmp_path / "model")
    with pytest.raises(ValueError, match="enable_kv_checksum"):
        rig.vllm_config(model, "kv_consumer")
    rig.vllm_config(model, "kv_consumer", enable_kv_checksum=False)


def test_context_parallelism_is_refused(tmp_path):
    from vllm.distributed.kv_transfer.kv_checksum import create_kv_checksum_scheduler

    model = rig.write_model(tmp_path / "model")
    d = rig.Instance(model, "kv_consumer")
    for closed in (False, True):
        config = rig.vllm_config(model, "kv_consumer", kv_checksum_fail_closed=closed)
        config.parallel_config.decode_context_parallel_size = 2
        args = config, d.scheduler.connector, None, None
        if closed:
            with pytest.raises(ValueError, match="context parallelism"):
                create_kv_checksum_scheduler(*args)
        else:
            assert create_kv_checksum_scheduler(*args) is None


def test_records_alone_keep_an_output_alive():
    assert KVConnectorOutput().is_empty()
    assert not KVConnectorOutput(kv_checksums=object()).is_empty()


def test_counters_have_fixed_labels():
    registry = prometheus_client.CollectorRegistry()

    def counter(**kwargs):
        return prometheus_client.Counter(registry=registry, **kwargs)

    prom = KVChecksumProm(counter, ["model_name", "engine"], {0: ["m", "0"]})
    prom.observe(
        {
            "loads:mismatch:kv_transfer_params": 2,
            "unverified:no_payload": 1,
            "left_out:tp_sizes": 3,
        },
        0,
    )
    base = {"model_name": "m", "engine": "0"}
    loads = {**base, "verdict": "mismatch", "carrier": "kv_transfer_params"}
    assert registry.get_sample_value("vllm:kv_checksum_loads_total", loads) == 2
    name = "vllm:kv_checksum_unverified_loads_total"
    for reason in Unverified:
        value = registry.get_sample_value(name, {**base, "reason": reason.value})
        assert value == (reason is Unverified.NO_PAYLOAD)
    name = "vllm:kv_checksum_groups_left_out_total"
    left_out = {**base, "reason": "tp_sizes"}
    assert registry.get_sample_value(name, left_out) == 3
