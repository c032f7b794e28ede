# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test settings, refusals and counters."""

from functools import partial

import prometheus_client
import pytest
from prometheus_client.multiprocess import MultiProcessCollector

from vllm.config import KVTransferConfig
from vllm.config.utils import get_attr_docs
from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumCarrier,
    KVChecksumProm,
    metrics,
)
from vllm.distributed.kv_transfer.kv_checksum.checksum import Skipped
from vllm.distributed.kv_transfer.kv_checksum.verdict import LeftOut, Unverified
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput

from .rig import instances as rig


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


@pytest.mark.parametrize("directory", ["missing", "file"])
def test_evidence_needs_checksums_and_a_directory(directory, tmp_path):
    settings = dict(kv_connector="NixlConnector", kv_role="kv_both")
    on = dict(settings, enable_kv_checksum=True)
    (tmp_path / "file").touch()
    bad = str(tmp_path / directory)
    with pytest.raises(ValueError, match="(?s)kv_checksum_evidence_dir.*create it"):
        KVTransferConfig(kv_checksum_evidence_dir=bad, **on)
    with pytest.raises(ValueError, match="kv_checksum_evidence_dir needs enable"):
        KVTransferConfig(kv_checksum_evidence_dir=str(tmp_path), **settings)
    assert KVTransferConfig(kv_checksum_evidence_dir=str(tmp_path), **on)


def test_the_settings_are_documented_where_vllm_reads_it():
    documented = get_attr_docs(KVTransferConfig)
    assert "producer's checksum" in documented["enable_kv_checksum"]
    assert "kv_load_failure_policy" in documented["kv_checksum_fail_closed"]


def test_model_runner_v1_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    model = rig.write_model(tmp_path / "model")
    with pytest.raises(ValueError, match="enable_kv_checksum"):
        rig.vllm_config(model, "kv_consumer")
    rig.vllm_config(model, "kv_consumer", enable_kv_checksum=False)


def test_context_parallelism_is_refused_over_other_connectors(tmp_path):
    from vllm.distributed.kv_transfer.kv_checksum import create_kv_checksum_scheduler

    model = rig.write_model(tmp_path / "model")
    d = rig.Instance(model, "kv_consumer")
    for closed in (False, True):
        config = rig.vllm_config(
            model,
            "kv_consumer",
            kv_connector="NixlPushConnector",
            kv_checksum_fail_closed=closed,
        )
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


@pytest.fixture
def logger(model):
    """The logger of one API server in front of two engines, as vLLM makes it."""
    config = rig.vllm_config(model, "kv_consumer")
    yield PrometheusStatLogger(config, [0, 1])
    unregister_vllm_metrics()


def sample(name, engine, registry=prometheus_client.REGISTRY, **labels):
    """A metric's value for an engine, whatever the model is called."""
    wanted = {"engine": str(engine), **labels}
    found = [
        s.value
        for metric in registry.collect()
        for s in metric.samples
        if s.name == f"vllm:kv_checksum_{name}" and wanted.items() <= s.labels.items()
    ]
    return found[0] if len(found) == 1 else found


def test_an_engine_s_counts_are_its_own(logger):
    stats = {
        "loads:mismatch:kv_transfer_params": 3,
        "blocks_compared": 7,
        "skipped_groups:compressed": 2,
        "ledger_entries": 9,
    }
    for engine, times in ((1, 2), (0, 1)):
        for _ in range(times):
            told = SchedulerStats(kv_checksum_stats=stats)
            logger.record(told, None, engine_idx=engine)
    bad = dict(verdict="mismatch", carrier="kv_transfer_params")
    for engine, times in ((0, 1), (1, 2)):
        assert sample("loads_total", engine, **bad) == 3 * times
        assert sample("blocks_compared_total", engine) == 7 * times
        assert sample("skipped_groups", engine, reason="compressed") == 2
        assert sample("ledger_entries", engine) == 9


def test_gauges_are_there_from_the_start(tmp_path, monkeypatch):
    """With several API server processes, one that was never set is not shown."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    values = prometheus_client.values
    monkeypatch.setattr(values, "ValueClass", values.MultiProcessValue())
    registry = prometheus_client.CollectorRegistry()
    KVChecksumProm(
        partial(prometheus_client.Counter, registry=registry),
        partial(prometheus_client.Gauge, registry=registry),
        ["engine"],
        {0: ["0"], 1: ["1"]},
    )
    shown = prometheus_client.CollectorRegistry()
    MultiProcessCollector(shown)
    for engine in (0, 1):
        for kind in Skipped:
            assert sample("skipped_groups", engine, shown, reason=kind.value) == 0
        assert sample("ledger_entries", engine, shown) == 0
        assert sample("ledger_bytes", engine, shown) == 0


def test_metrics_have_fixed_labels():
    registry = prometheus_client.CollectorRegistry()
    prom = KVChecksumProm(
        partial(prometheus_client.Counter, registry=registry),
        partial(prometheus_client.Gauge, registry=registry),
        ["model_name", "engine"],
        {0: ["m", "0"]},
    )
    observed = {
        "loads:mismatch:kv_transfer_params": 2,
        "loads:verified:stored": 1,
        "unverified:no_payload": 1,
        "left_out:tp_sizes": 3,
        "skipped_groups:compressed": 3,
    }
    for _ in range(2):
        prom.observe(observed, 0)
    base = {"model_name": "m", "engine": "0"}
    expected = {
        "loads_total": {
            ("mismatch", "kv_transfer_params"): 4,
            ("verified", "stored"): 2,
        },
        "unverified_loads_total": {("no_payload",): 2},
        "groups_left_out_total": {("tp_sizes",): 6},
        # A gauge, which takes what is told.
        "skipped_groups": {("compressed",): 3},
    }
    sets = {
        "loads_total": [
            (v, c.value) for v in metrics.VERDICTS for c in KVChecksumCarrier
        ],
        "unverified_loads_total": [(r.value,) for r in Unverified],
        "groups_left_out_total": [(r.value,) for r in LeftOut],
        "skipped_groups": [(r.value,) for r in Skipped],
    }
    for name, values in sets.items():
        labels = ("verdict", "carrier") if name == "loads_total" else ("reason",)
        for value in values:
            found = registry.get_sample_value(
                f"vllm:kv_checksum_{name}",
                {**base, **dict(zip(labels, value, strict=True))},
            )
            assert found == expected[name].get(value, 0), (name, value)
