# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that one condition, from the configuration, switches all parts on or off."""

import logging
from types import SimpleNamespace

import pytest

import vllm.envs as envs
from vllm.distributed.kv_transfer.kv_checksum import (
    create_kv_checksum_scheduler,
    create_kv_checksum_worker,
)
from vllm.distributed.kv_transfer.kv_checksum.connectors import (
    mooncake_store,
    simple_cpu_offload,
)
from vllm.distributed.kv_transfer.kv_checksum.connectors.mooncake import (
    create_mooncake_checksums,
)
from vllm.distributed.kv_transfer.kv_checksum.connectors.nixl_push import (
    create_nixl_push_checksums,
)
from vllm.distributed.kv_transfer.kv_checksum.support import sums_blocks
from vllm.distributed.kv_transfer.kv_checksum.worker import worker
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.worker.gpu import kv_connector as runner

from .rig import instances as rig


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
        **rig.WITHOUT_CARRIER,
    )
    assert active(monkeypatch, config, Bare()).kv_checksum_worker is None


class RayDistributedExecutor:
    """An executor named as vLLM 0.32.0's legacy one, whose module needs Ray."""


class OutOfTree:
    """An executor that nobody knows."""


LAUNCHER = dict(distributed_executor_backend="external_launcher", world_size=2)
RAY = dict(distributed_executor_backend="ray", pipeline_parallel_size=2, world_size=2)
OFF = {
    "dcp": (dict(decode_context_parallel_size=2), "context parallelism"),
    "pcp": (dict(prefill_context_parallel_size=2), "context parallelism"),
    "launcher": (LAUNCHER, "external launcher"),
    "ray": (RAY, "legacy Ray executor"),
    "ray-class": (
        RAY | dict(distributed_executor_backend=RayDistributedExecutor),
        "legacy Ray executor",
    ),
    "unknown": (RAY | dict(distributed_executor_backend=OutOfTree), "OutOfTree"),
}
ON = {
    "one": {},
    "launcher of one": LAUNCHER | dict(world_size=1),
    "ray without stages": RAY | dict(pipeline_parallel_size=1),
    "workers": RAY | dict(distributed_executor_backend="mp"),
    "known class": RAY | dict(distributed_executor_backend=MultiprocExecutor),
    "its name": RAY
    | dict(
        distributed_executor_backend=f"{MultiprocExecutor.__module__}.MultiprocExecutor"
    ),
}


@pytest.fixture
def legacy_ray(monkeypatch):
    """Set what vLLM 0.32.0 reads from the environment."""
    monkeypatch.setattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", False, raising=False)


def is_context(parallel):
    sizes = ("decode_context_parallel_size", "prefill_context_parallel_size")
    return any(size in parallel for size in sizes)


@pytest.fixture
def configured(model, monkeypatch):
    """Make instances of a parallel configuration; no worker of them runs."""
    plain = rig.vllm_config

    def make(parallel, **settings):
        def config(*args, **kwargs):
            made = plain(*args, **kwargs)
            for name, value in parallel.items():
                setattr(made.parallel_config, name, value)
            return made

        if is_context(parallel):
            # NIXL itself refuses it, and the rig's KV cache groups do not go with it.
            mooncake = dict(kv_connector="MooncakeConnector")
            made = rig.Instance(
                model, "kv_both", transport="mooncake", enable_kv_checksum=False
            )
            made.config = config(model, "kv_both", **mooncake, **settings)
            made.scheduler.kv_checksum = create_kv_checksum_scheduler(
                made.config, made.scheduler.connector, None, made.kv_config
            )
            return made
        monkeypatch.setattr(rig, "vllm_config", config)
        made = rig.Instance(model, "kv_both", transport="push", **settings)
        monkeypatch.setattr(rig, "vllm_config", plain)
        return made

    return make


def registered(d):
    """Return what a push consumer registers of a load with its producer."""
    params = dict(
        do_remote_prefill=True,
        do_remote_decode=False,
        remote_engine_id="p",
        remote_request_id="p-r",
        remote_block_ids=[],
        remote_host="127.0.0.1",
        remote_port=1,
        tp_size=1,
    )
    d.add("r", rig.tokens(50), params)
    (registration,) = (
        d.scheduler.schedule().kv_connector_metadata.push_registrations.values()
    )
    return set(registration)


@pytest.mark.parametrize("name", OFF)
def test_off_is_off_in_every_part(name, configured, legacy_ray, log, caplog):
    parallel, reason = OFF[name]
    d = configured(parallel)
    (line,) = [x for x in log if x.startswith("WARNING KV checksums are off")]
    assert reason in line
    assert d.scheduler.kv_checksum is None
    if not is_context(parallel):
        plain = configured(parallel, enable_kv_checksum=False)
        assert registered(d) == registered(plain)
    connector = SimpleNamespace(
        _kv_cache_config=d.kv_config, set_kv_checksum_worker=None
    )
    # The rig's own workers log what they cover, whatever the configuration is.
    log.clear()
    caplog.set_level(logging.INFO, worker.logger.name)
    assert create_kv_checksum_worker(d.config, connector, {}) is None
    assert create_nixl_push_checksums(d.config) is None
    assert create_mooncake_checksums(d.config) is None
    for store in (mooncake_store, simple_cpu_offload):
        assert reason in store.why_not_stored(d.config, d.kv_config)
    assert not any("KV checksums cover" in x for x in log)


@pytest.mark.parametrize("name", OFF)
def test_fail_closed_refuses_what_is_off(name, configured, legacy_ray):
    parallel, reason = OFF[name]
    with pytest.raises(ValueError) as error:
        configured(parallel, kv_checksum_fail_closed=True)
    assert reason in str(error.value)


@pytest.mark.parametrize("name", ON)
def test_on_is_on_in_every_part(name, configured, legacy_ray, log):
    d = configured(ON[name], kv_checksum_fail_closed=True)
    off = configured(ON[name], enable_kv_checksum=False)
    assert d.scheduler.kv_checksum is not None
    assert registered(d) - registered(off) == {"kv_checksums"}
    assert create_nixl_push_checksums(d.config) is not None
    assert create_mooncake_checksums(d.config) is not None
    assert sums_blocks(d.config, d.kv_config)
    assert not any("KV checksums are off" in x for x in log)


def test_ray_of_this_vllm_brings_every_report(configured):
    """Unless the environment selects the legacy executor, which vLLM 0.33.0 lacks."""
    assert configured(RAY).scheduler.kv_checksum is not None


def test_without_a_carrier_no_part_is_on(model, log):
    d = rig.Instance(
        model,
        "kv_both",
        **rig.WITHOUT_CARRIER,
    )
    assert not sums_blocks(d.config, d.kv_config)
    assert create_nixl_push_checksums(d.config) is None
    assert create_mooncake_checksums(d.config) is None
