# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test the gauge that describes an instance, as vLLM's own logger exports it."""

import prometheus_client
import pytest

from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics

from .rig import instances as rig

NAME = "vllm:kv_checksum_info"


@pytest.fixture
def described(model):
    """Return the labels that a configuration's logger exports, by engine."""

    def describe(role="kv_consumer", parallel=None, **settings):
        config = rig.vllm_config(model, role, **settings)
        for name, value in (parallel or {}).items():
            setattr(config.parallel_config, name, value)
        PrometheusStatLogger(config, [0, 1])
        samples = [
            s
            for family in prometheus_client.REGISTRY.collect()
            for s in family.samples
            if s.name == NAME
        ]
        assert all(s.value == 1 for s in samples)
        engines = {s.labels.pop("engine"): s.labels for s in samples}
        assert sorted(engines) == ["0", "1"] and engines["0"] == engines["1"]
        assert engines["0"].pop("model_name")
        return engines["0"]

    yield describe
    unregister_vllm_metrics()


def test_an_instance_is_described_before_its_first_request(described):
    assert described("kv_producer") == {
        "state": "on",
        "definition": "2",
        "payload_version": "2",
        "role": "kv_producer",
        "fail_mode": "open",
        "connectors": "NixlConnector",
        "carriers": "kv_transfer_params",
        "block_size": "16",
    }


@pytest.mark.parametrize("policy", ["fail", "recompute"])
def test_the_fail_mode_names_the_policy(described, policy):
    labels = described(policy=policy, kv_checksum_fail_closed=True)
    assert labels["fail_mode"] == f"closed_{policy}"


def test_a_set_up_that_is_not_supported_is_off(described):
    settings = dict(kv_connector="NixlPushConnector")
    labels = described(parallel=dict(decode_context_parallel_size=2), **settings)
    assert labels["state"] == "off"


@pytest.mark.parametrize(
    ("settings", "carriers"),
    [
        (dict(kv_connector="NixlPushConnector"), "connector"),
        (dict(kv_connector="MooncakeConnector"), "connector"),
        (rig.WITHOUT_CARRIER, "none"),
        ({**rig.WITHOUT_CARRIER, "kv_checksum_ledger_blocks": 9}, "ledger"),
    ],
    ids=["push", "mooncake", "none", "ledger"],
)
def test_the_carrier_is_the_connector_s(described, settings, carriers):
    assert described("kv_both", **settings)["carriers"] == carriers


def test_connectors_inside_another_are_named_one_by_one(described):
    inner = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        {"kv_connector": "SimpleCPUOffloadConnector", "kv_role": "kv_both"},
    ]
    labels = described(
        "kv_both",
        kv_connector="MultiConnector",
        kv_connector_extra_config={"connectors": inner},
    )
    assert labels["connectors"] == "NixlConnector,SimpleCPUOffloadConnector"
    assert labels["carriers"] == "kv_transfer_params,stored"


def test_with_checksums_off_there_is_no_such_gauge(model):
    config = rig.vllm_config(model, "kv_both", enable_kv_checksum=False)
    PrometheusStatLogger(config, [0])
    names = {family.name for family in prometheus_client.REGISTRY.collect()}
    assert NAME not in names
    unregister_vllm_metrics()
