# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test MultiConnector: a store beside a P/D connector, each load by its own route."""

import logging
from types import SimpleNamespace

import pytest

from vllm.distributed.kv_transfer.kv_checksum.connectors import multi_connector
from vllm.distributed.kv_transfer.kv_checksum.scheduler import factory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.simple_kv_offload.manager import SimpleCPUOffloadScheduler

from .rig import instances as rig
from .rig import transports
from .rig.instances import load, tokens

STORED = 48
"""Tokens that the store offers to requests of its own."""


class FakeStore(KVConnectorBase_V1, SupportsHMA):
    """The scheduler side of a store without checksums: has `STORED` tokens of
    every request that is no P/D request."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.new_loads: list[str] = []

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if request.kv_transfer_params or num_computed_tokens >= STORED:
            return 0, False
        return STORED - num_computed_tokens, True

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if num_external_tokens:
            self.new_loads.append(request.request_id)

    def build_connector_meta(self, scheduler_output):
        meta = KVConnectorMetadata()
        meta.loads, self.new_loads = self.new_loads, []
        return meta

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = None


class FakeMulti:
    """The workers of both: a fake transport, and a store whose loads end in the
    step that starts them."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def step(self, instance, producer, output):
        store, inner = output.kv_connector_metadata.metadata
        output.kv_connector_metadata = inner
        reports = self.inner.step(instance, producer, output)
        for report in reports:
            finished = {*(report.finished_recving or ()), *store.loads}
            report.finished_recving = finished or None
        return reports


def _children(child):
    store = dict(kv_connector="FakeStore", kv_connector_module_path=__name__)
    return [store, dict(kv_connector=child, kv_buffer_device="cpu")]


def multi(model, role, transport, children=None, **settings):
    names = children or _children(transports.FAKES[transport].connector)
    instance = rig.Instance(
        model,
        role,
        transport=transport,
        kv_connector="MultiConnector",
        kv_connector_extra_config={
            "connectors": [c | {"kv_role": role} for c in names]
        },
        **{**rig.NO_LEDGER, **settings},
    )
    instance.transport = FakeMulti(instance.transport)
    return instance


def test_loads_go_by_the_route_of_their_connector(model, transport, log):
    p = multi(model, "kv_producer", transport)
    d = multi(model, "kv_consumer", transport)
    said = [x for x in log if "do not cover a connector: FakeStore" in x]
    assert len(said) == 2  # once per instance
    load(p, d, 100)
    assert d.loads("verified") == 1
    stored = d.add("stored", tokens(100, 1), None, max_tokens=2)
    d.run(stored, p)
    # Nobody checks the store's tokens, which were not computed here.
    assert sum(n for r, n in d.scheduled if r == "stored") == 100 - STORED + 1
    assert d.stats["loads:unverified:none"] == d.stats["unverified:no_carrier"] == 1
    (line,) = [x for x in log if "KV checksums not verified: no_carrier" in x]
    assert "first for request stored, FakeStore; served as loaded" in line
    load(p, d, 100, "again", prompt=tokens(100, 2))
    assert d.loads("verified") == 2
    d.step(p)
    assert not any({**p.tables(), **d.tables()}.values())


def test_the_carrier_is_that_of_the_load_s_start(model):
    """MultiConnector forgets its choice before the load is judged."""
    p = multi(model, "kv_producer", "push")
    d = multi(model, "kv_consumer", "push")
    params = rig.prefill(p, "p-r", tokens(100))
    request = d.add("r", tokens(100), params, max_tokens=2)
    d.transport.inner.hold_loads = True
    d.step(p)
    d.scheduler.connector._requests_to_connector.clear()
    assert d.scheduler.connector.kv_checksum_carrier(request, True) is None
    d.transport.inner.hold_loads = False
    d.run(request, p)
    assert d.loads("verified") == 1


@pytest.mark.parametrize("fail_closed", [False, True])
def test_sub_connectors_inherit_the_settings(model, fail_closed):
    children = [_children("NixlPushConnector")[1]]
    d = multi(
        model,
        "kv_consumer",
        "push",
        children,
        kv_checksum_fail_closed=fail_closed,
    )
    for inner in d.scheduler.connector._ktc_kv_transfer_config:
        assert inner.enable_kv_checksum
        assert inner.kv_checksum_fail_closed == fail_closed
    off = multi(model, "kv_consumer", "push", enable_kv_checksum=False)
    for inner in off.scheduler.connector._ktc_kv_transfer_config:
        assert not inner.enable_kv_checksum


def test_workers_merge_what_their_connectors_received():
    children = [
        SimpleNamespace(
            get_transfer_results=lambda ids, got=got: KVConnectorTransferResults(
                finished_recving=set(got), kv_checksums=got
            )
        )
        for got in ({"a": b"1"}, {}, {"b": b"2"})
    ]
    worker = SimpleNamespace(_connectors=children, _extra_async_saves={})
    results = MultiConnector.get_transfer_results(worker, set())
    assert results.kv_checksums == {"a": b"1", "b": b"2"}


def test_without_any_carrier_it_is_refused(model, log):
    store = [_children("unused")[0]]
    multi(model, "kv_consumer", "push", children=store)
    (line,) = [x for x in log if x.startswith("WARNING KV checksums are off")]
    assert "FakeStore" in line


def _offload(**options):
    options = {"cpu_bytes_to_use": 1 << 20, **options}
    return dict(
        kv_connector="SimpleCPUOffloadConnector", kv_connector_extra_config=options
    )


NO_LEDGER = "the ledger is off (kv_checksum_ledger_blocks is 0)"

CHILDREN = {
    "push": (
        _children("NixlPushConnector")[1],
        "INFO KV checksums are on: loads through NixlPushConnector are verified, "
        "carried by connector, fail-open",
    ),
    "stored": (
        _offload(),
        "INFO KV checksums are on: loads through SimpleCPUOffloadConnector are "
        "verified, stored with their KV, fail-open",
    ),
    "stores none": (
        _offload(lazy_offload=True),
        "WARNING KV checksums do not cover a connector: SimpleCPUOffloadConnector "
        "stores no KV checksums: lazy_offload stores blocks whose positions are no "
        f"longer known, and {NO_LEDGER}; what it loads is counted as unverified",
    ),
    "knows none": (
        _children("unused")[0],
        "WARNING KV checksums do not cover a connector: FakeStore neither carries "
        f"nor stores KV checksums, and {NO_LEDGER}; what it loads is counted as "
        "unverified",
    ),
}


@pytest.mark.parametrize("first", range(len(CHILDREN)))
def test_startup_says_of_every_connector_inside_what_becomes_of_its_loads(
    model, first, log, caplog, monkeypatch
):
    # The rig's configuration names no tensors, which size the host's.
    monkeypatch.setattr(
        SimpleCPUOffloadScheduler,
        "_derive_cpu_config",
        staticmethod(lambda gpu_config, *args: gpu_config),
    )
    caplog.set_level(logging.INFO, factory.logger.name)
    order = [*CHILDREN.values()]
    children, lines = zip(*order[first:], *order[:first], strict=True)
    multi(model, "kv_both", "push", list(children))
    said = [x for x in log if " KV checksums " in x and " on PP rank " not in x]
    assert said == list(lines)


@pytest.mark.parametrize("order", [1, -1])
def test_fail_closed_refuses_a_connector_whose_loads_nobody_checks(model, order):
    """Refuse from the configuration, before a connector is made."""
    with pytest.raises(ValueError) as error:
        rig.vllm_config(
            model,
            "kv_consumer",
            kv_connector="MultiConnector",
            kv_checksum_fail_closed=True,
            **rig.NO_LEDGER,
            kv_connector_extra_config={
                "connectors": [
                    c | {"kv_role": "kv_both"}
                    for c in _children("NixlConnector")[::order]
                ]
            },
        )
    assert "FakeStore neither carries nor stores KV checksums" in str(error.value)
    assert "or take FakeStore out" in str(error.value)


def test_a_send_goes_with_the_first_connector_that_has_a_carrier():
    """Choose the connector that moves the request's KV, where several could."""

    def child(carrier):
        return SimpleNamespace(kv_checksum_carrier=lambda request, receiving: carrier)

    none, one, two = child(None), child("first"), child("second")
    assert multi_connector.send_route([none, one, two], None) == (one, "first")
    assert multi_connector.send_route([two, none, one], None) == (two, "second")
    assert multi_connector.send_route([none], None) == (None, None)
