# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test which engine bad loads are counted for, and that clients cannot add names."""

import tracemalloc
from types import SimpleNamespace

import numpy as np
import prometheus_client
import pytest
from prometheus_client.multiprocess import MultiProcessCollector
from prometheus_client.parser import text_string_to_metric_families

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumBlocks,
    KVChecksumCarrier,
    KVChecksumProm,
    metrics,
)
from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    KVChecksumGroup,
    KVChecksumRecord,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler import peers
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingLoad
from vllm.v1.metrics.loggers import PrometheusStatLogger
from vllm.v1.metrics.prometheus import unregister_vllm_metrics
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import KVConnectorOutput

from .rig import instances as rig
from .rig.instances import flip_bit, load, pair, prefill, tokens

METRIC = "vllm:kv_checksum_peer_loads_total"


@pytest.fixture
def logger(model):
    """The logger of an API server in front of two engines, as vLLM makes it."""
    yield PrometheusStatLogger(rig.vllm_config(model, "kv_consumer"), [0, 1])
    unregister_vllm_metrics()


def exported(registry=prometheus_client.REGISTRY):
    """Return what /metrics shows, by engine, verdict, peer's engine and host."""
    page = prometheus_client.generate_latest(registry).decode()
    found = {}
    for family in text_string_to_metric_families(page):
        for sample in family.samples:
            if sample.name == METRIC:
                names = ("engine", "verdict", "peer_engine", "peer_host")
                found[tuple(sample.labels[n] for n in names)] = sample.value
    return found


def record(logger, instance, engine=0):
    """Hand an instance's counts to the logger, as they reach the API server."""
    told = SchedulerStats(kv_checksum_stats=instance.stats)
    logger.record(told, None, engine_idx=engine)
    instance.stats = {}


def name_of(p):
    """Return P's engine and host, as P's own answers name them."""
    params = prefill(p, "asked", tokens(40, 9))
    host = params.get("remote_host")
    if host is None:
        host = params["remote_bootstrap_addr"].split("//")[1].split(":")[0]
    return params["remote_engine_id"], host


def test_bad_loads_are_counted_for_the_engine_that_sent_them(model, transport, logger):
    p, d = pair(model, transport=transport)
    load(p, d, 100, "good", prompt=tokens(100, 1))
    record(logger, d)
    assert exported() == {}, "a verified load takes no name"
    d.damage = flip_bit
    for n in range(2):
        load(p, d, 100, f"bad-{n}", prompt=tokens(100, 2 + n))
    d.damage = lambda *_: None
    p.alter = lambda data: None
    load(p, d, 100, "lost", prompt=tokens(100, 4))
    counted = dict(d.stats)
    record(logger, d, 1)
    peer = name_of(p)
    right = {("1", "mismatch", *peer): 2, ("1", "unverified", *peer): 1}
    assert exported() == right
    d.stats = counted
    record(logger, d, 0)
    assert exported() == right | {("0", *k[1:]): v for k, v in right.items()}


def test_another_prompt_s_kv_is_not_counted_as_the_host_s_mismatch(model, logger):
    p, d = pair(model)
    params = prefill(p, "p-r", tokens(100, 1))
    d.run(d.add("r", tokens(100, 2), params, max_tokens=2), p)
    assert d.loads("mismatch") == 1
    record(logger, d)
    assert exported() == {("0", "other_prompt", *name_of(p)): 1}


def test_loads_that_end_without_a_transfer_name_nobody(model, logger):
    p, d = pair(model, None, rig.MODES["recompute"])
    request = d.add("r", tokens(100), prefill(p, "p-r", tokens(100)))
    d.transport.hold_loads = True
    d.step(p)
    d.scheduler.finish_requests("r", rig.RequestStatus.FINISHED_ABORTED)
    d.transport.hold_loads = False
    d.step(p)
    assert request.is_finished() and d.stats["loads_aborted"] == 1
    record(logger, d)
    assert exported() == {}


def test_ten_thousand_invented_peers_get_sixty_four_names(model, logger, log):
    """Let every load end in a transfer, which those of invented peers cannot do."""
    _, d = pair(model)
    kv_checksum = d.scheduler.kv_checksum
    waiting = SimpleNamespace(
        status=rig.RequestStatus.WAITING_FOR_REMOTE_KVS, _block_hasher=None
    )
    for first in range(0, 10_000, 100):
        ids = [f"r{n}" for n in range(first, first + 100)]
        for n, req_id in enumerate(ids, first):
            kv_checksum._stats["loads_started"] += 1
            kv_checksum._recvs[req_id] = PendingLoad(
                req_id,
                KVChecksumBlocks(1, {}),
                carrier=KVChecksumCarrier.KV_TRANSFER_PARAMS,
                params={"remote_engine_id": f"e{n}\n", "remote_host": "h" * (n + 1)},
            )
        ended = KVConnectorOutput(finished_recving=set(ids))
        kv_checksum.verify(ended, dict.fromkeys(ids, waiting))
        d.stats = kv_checksum.take_stats()
        logger.record(SchedulerStats(kv_checksum_stats=d.stats), None)
    found = exported()
    assert len(found) == 65 and sum(found.values()) == 10_000
    assert found["0", "unverified", "other", "other"] == 10_000 - 64
    assert max(len(host) for *_, host in found) <= 64
    assert all(engine.endswith("?") for *_, engine, _ in found if engine != "other")
    assert len([x for x in log if "64 peers sent loads" in x]) == 1


@pytest.mark.parametrize(
    ("params", "host"),
    [
        ({}, "unknown"),
        ({"remote_host": "h", "remote_port": 1}, "h"),
        ({"remote_host": ["h"]}, "<list>"),
        ({"remote_bootstrap_addr": "http://h:9/x"}, "h"),
        ({"remote_bootstrap_addr": "http://[::1:9"}, "http://[::1:9"),
        ({"remote_bootstrap_addr": 7, "remote_host": "h"}, "7"),
        ({"remote_host": "h\t\ud800"}, "h??"),
    ],
)
def test_a_host_is_named_whatever_a_client_sends(params, host):
    assert peers.peer_of_params(params) == ("unknown", host)


@pytest.mark.parametrize("key", ["remote_host", "remote_bootstrap_addr"])
def test_long_names_are_not_kept(key):
    """A client of any connector can send either, of any length."""
    tracemalloc.start()
    try:
        for n in range(100):
            name = f"http://{'é' * 50_000}{n}:1/"
            load = PendingLoad(
                "r",
                KVChecksumBlocks(0, {}),
                carrier=KVChecksumCarrier.KV_TRANSFER_PARAMS,
                params={key: name, "remote_engine_id": name},
            )
            assert max(map(len, peers.peer_of(load))) <= 64
            del load, name
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 2_000_000


def test_several_api_servers_show_a_peer_s_counts_together(tmp_path, monkeypatch):
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    values = prometheus_client.values
    for process in range(2):
        own = values.MultiProcessValue(lambda process=process: process)
        monkeypatch.setattr(values, "ValueClass", own)
        registry = prometheus_client.CollectorRegistry()

        class Here:
            def __init__(self, kind, registry=registry):
                self.kind, self.registry = kind, registry

            def __call__(self, **settings):
                return self.kind(registry=self.registry, **settings)

        prom = KVChecksumProm(
            Here(prometheus_client.Counter),
            Here(prometheus_client.Gauge),
            ["engine"],
            {0: ["0"]},
        )
        prom.observe({metrics.peer_loads_key("mismatch", "e", "h"): 2}, 0)
    shown = prometheus_client.CollectorRegistry()
    MultiProcessCollector(shown)
    assert exported(shown) == {("0", "mismatch", "e", "h"): 4}


@pytest.mark.parametrize(
    ("differ", "ranks"),
    [({0}, ((0, 0),)), ({1}, ((0, 1),)), ({0, 1}, ())],
)
def test_a_rank_is_named_only_if_another_is_not(differ, ranks):
    """Two ranks split some layers, in every check, and both hold all of others."""
    load = PendingLoad("r", KVChecksumBlocks(1, {}))
    for rank in range(2):
        group = KVChecksumGroup(
            0, ((1, 0), (2, rank)), np.zeros((1, 2), dtype=np.uint64)
        )
        load.records[0, rank] = KVChecksumRecord(0, rank, {"r": {0: group}})
    assert load.ranks_of_checks(0, differ, 2) == ranks
