# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that every load that starts has exactly one end, whoever brings it and however.

The fixture in `conftest` adds the counters up after each test; these tests bring about
each kind of end, and hold what is counted against what the client and the connector
saw.
"""

import pickle
from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import KV_TRANSFER_PARAMS_KEY
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput

from .rig import instances as rig
from .rig import store
from .rig.instances import MODES

OFFERED = 48
"""Tokens that the connectors below bring."""


class Bringing(KVConnectorBase_V1, SupportsHMA):
    """The scheduler side of a connector that is none of vLLM's: it offers the first
    `OFFERED` tokens of every prompt, to be loaded in the step that uses them."""

    is_async = False

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return max(0, OFFERED - num_computed_tokens), self.is_async

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self.brought = getattr(self, "brought", 0) + (num_external_tokens > 0)
        if num_external_tokens and self.is_async:
            self.started = {*getattr(self, "started", ()), request.request_id}

    def build_connector_meta(self, scheduler_output):
        meta = KVConnectorMetadata()
        meta.loads, self.started = getattr(self, "started", set()), set()
        return meta

    def request_finished_all_groups(self, request, block_ids):
        return False, None

    start_load_kv = wait_for_layer_load = save_kv_layer = wait_for_save = None


class BringingLater(Bringing):
    """The same, between steps."""

    is_async = True


class BringingWithCarrier(Bringing):
    """A connector that claims to carry checksums, and loads in the step itself."""

    def kv_checksum_carrier(self, request, receiving):
        from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier

        return KVChecksumCarrier.CONNECTOR if receiving else None


class Bring:
    """A stand-in for its workers: what started is finished in the same step."""

    carrier = None
    connector = ""

    def __init__(self, inner):
        self.inner = inner

    def tables(self):
        return {}

    def step(self, instance, producer, output):
        loads = output.kv_connector_metadata.loads
        reports = []
        for worker in instance.workers:
            worker.bind(output.kv_checksum_scheduled)
            report = KVConnectorOutput(finished_recving=loads or None)
            report.kv_checksums = worker.post_forward(
                report.finished_recving, set(), output.finished_req_ids
            )
            reports.append(report)
        return reports


def instance_of(model, connector, **settings):
    instance = rig.Instance(
        model,
        "kv_both",
        kv_connector=connector.__name__,
        kv_connector_module_path=__name__,
        **rig.NO_LEDGER,
        **settings,
    )
    instance.transport = Bring(instance.transport)
    return instance


CARRIERLESS = [(Bringing, "sync_load"), (BringingLater, "no_carrier")]


@pytest.mark.parametrize(("connector", "reason"), CARRIERLESS)
def test_fail_open_counts_what_nobody_checks(model, connector, reason, log):
    d = instance_of(model, connector)
    for number in range(3):
        request = d.add(f"r{number}", rig.tokens(100, number), None, max_tokens=2)
        assert d.run(request).finish_reason == FinishReason.LENGTH
    assert d.scheduler.connector.brought == d.stats["loads_started"] == 3
    assert d.stats["loads:unverified:none"] == d.stats[f"unverified:{reason}"] == 3
    lines = [x for x in log if f"KV checksums not verified: {reason}" in x]
    assert len(lines) == 1 and connector.__name__ in lines[0]
    (line,) = [x for x in log if x.startswith("WARNING KV checksums are off")]
    assert f"{connector.__name__} neither carries nor stores" in line
    assert not any(d.tables().values())


@pytest.mark.parametrize(("connector", "reason"), CARRIERLESS)
def test_fail_closed_refuses_it_before_a_connector_is_made(
    model, connector, reason, monkeypatch
):
    made = []
    monkeypatch.setattr(connector, "__init__", lambda *args: made.append(args))
    with pytest.raises(ValueError) as error:
        instance_of(model, connector, kv_checksum_fail_closed=True)
    assert not made
    assert f"{connector.__name__} neither carries nor stores" in str(error.value)
    assert "Unset kv_checksum_fail_closed in --kv-transfer-config" in str(error.value)


@pytest.mark.parametrize("mode", MODES)
def test_loads_in_the_step_that_uses_them(model, mode, log):
    """Startup cannot know that they come: fail-closed, nothing of them is used."""
    d = instance_of(model, BringingWithCarrier, **MODES[mode])
    request = d.add("r", rig.tokens(100), None, max_tokens=2)
    assert d.run(request).finish_reason == FinishReason.LENGTH
    closed = mode != "open"
    assert d.scheduler.connector.brought == (not closed)
    assert d.scheduled[0] == ("r", 100 if closed else 100 - OFFERED)
    assert d.stats["loads_started"] == d.stats["unverified:sync_load"] == 1
    assert d.stats.get("recomputed", 0) == closed
    (line,) = [x for x in log if "KV checksums not verified: sync_load" in x]
    assert ("computed instead of loaded" if closed else "served as loaded") in line
    assert not d.scheduler.kv_checksum._admission.declined


@pytest.mark.parametrize("by", ["invalid_block_ids", "failed_recving"])
def test_a_load_in_the_step_that_uses_it_may_fail_too(model, by):
    """Report a failure as its connector does: it is neither verified nor unverified."""
    d = instance_of(model, BringingWithCarrier, policy="recompute")
    d.add("r", rig.tokens(100), None, max_tokens=2)
    output = d.schedule()
    (ids,) = d.scheduler.kv_cache_manager.get_block_ids("r")
    report = KVConnectorOutput()
    setattr(report, by, {ids[1] if by == "invalid_block_ids" else "r"})
    d.finish_step(output, d.runner_output(output, report))
    assert d.stats["loads_failed"] == d.stats["loads_started"] == 1
    assert not any(k.startswith(("loads:", "unverified")) for k in d.stats)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", [False, True])
def test_prefill_counts_before_decode_in_a_load_s_parameters(
    model, transport, mode, bad
):
    """Case 3: a client that merges parameters sends both flags; NIXL loads P's KV."""
    # Mooncake asserts that it is no consumer alone.
    p = rig.Instance(model, "kv_producer", transport=transport)
    d = rig.Instance(model, "kv_both", transport=transport, **MODES[mode])
    prompt = rig.tokens(100)
    params = rig.prefill(p, "p", prompt) | {"do_remote_decode": True}
    if bad:
        d.damage = lambda d, req_id, ids: d.kv[2][ids[3]].view(torch.uint8).add_(1)
    request = d.add("r", prompt, params, max_tokens=2)
    d.run(request, p)
    assert d.loads("mismatch" if bad else "verified") == d.stats["loads_started"] == 1
    reason = d.results["r"][-1].finish_reason
    assert (reason == FinishReason.ERROR) == (bad and mode == "fail")


@pytest.mark.parametrize("wrapped", [False, True], ids=["alone", "inside another"])
def test_a_stored_mismatch_names_the_store(model, wrapped, log):
    """Name the store that served the load, behind MultiConnector, too (case 12)."""
    store.STORE.clear()
    settings = one = dict(
        kv_connector="MemoryStoreConnector",
        kv_connector_module_path=store.__name__,
    )
    if wrapped:
        nixl = dict(kv_connector="NixlConnector", kv_buffer_device="cpu")
        children = [child | {"kv_role": "kv_both"} for child in (nixl, one)]
        settings = dict(
            kv_connector="MultiConnector",
            kv_connector_extra_config={"connectors": children},
        )
    d = rig.Instance(model, **{**settings, "role": "kv_both"})
    kv_checksum = d.scheduler.kv_checksum
    request = SimpleNamespace(request_id="r", kv_transfer_params=None, num_tokens=32)
    if wrapped:
        d.scheduler.connector._requests_to_connector["r"] = 1
    kv_checksum.kv_cache_manager = SimpleNamespace(
        get_blocks=lambda req_id: SimpleNamespace(
            get_unhashed_block_ids_all_groups=lambda: [[]], blocks=[[]]
        )
    )
    kv_checksum.add_recv(request, 0, 32)
    kv_checksum.build_checksum_meta()
    load = kv_checksum._recvs.pop("r")
    kv_checksum._stats.clear()
    assert kv_checksum._consequences._source(load) == "store of MemoryStoreConnector"


@pytest.mark.parametrize("when", ["loading", "finished in this step"])
def test_an_aborted_load_is_counted_as_that(model, transport, when):
    p, d = rig.pair(model, transport=transport)
    prompt = rig.tokens(60)
    d.add("r", prompt, rig.prefill(p, "p", prompt))
    d.transport.hold_loads = True
    d.step(p)
    assert d.stats["loads_started"] == 1
    if when == "loading":
        d.scheduler.finish_requests("r", rig.RequestStatus.FINISHED_ABORTED)
        d.transport.hold_loads = False
        d.step(p)
    else:
        d.transport.hold_loads = False
        output = d.schedule()
        reports = d.transport.step(d, p, output)
        d.scheduler.finish_requests("r", rig.RequestStatus.FINISHED_ABORTED)
        per_worker = [d.runner_output(output, report) for report in reports]
        d.finish_step(output, d.aggregator.aggregate(per_worker))
    d.step(p)
    assert d.stats["loads_aborted"] == 1
    assert not any(k.startswith(("loads:", "unverified")) for k in d.stats)
    assert not any(d.tables().values())


def test_what_p_did_not_send_is_counted_by_reason(model, transport):
    p, d = rig.pair(model, transport=transport)
    p.workers[0].post_forward = lambda *args, **kwargs: None
    rig.load(p, d, 100)
    assert p.stats["unsent:workers_missing"] == 1 and "payload_bytes" not in p.stats
    assert d.stats["unverified:no_payload"] == d.loads("unverified") == 1


@pytest.mark.parametrize("size", [None, 5_500_000])
def test_workers_do_not_get_the_payload_s_text(model, size):
    """Case 21: it leaves the request's parameters when the load starts."""
    p, d = rig.pair(model)
    prompt = rig.tokens(1000)
    params = rig.prefill(p, "p", prompt)
    if size is not None:
        params[KV_TRANSFER_PARAMS_KEY] = "A" * size
    text, copy = params[KV_TRANSFER_PARAMS_KEY].encode(), dict(params)
    sent = []
    schedule = d.scheduler.schedule

    def note(*args):
        output = schedule(*args)
        sent.append(pickle.dumps(output))
        return output

    d.scheduler.schedule = note
    request = d.add("r", prompt, params, max_tokens=2)
    d.transport.hold_loads = True
    d.step(p)
    assert KV_TRANSFER_PARAMS_KEY not in request.kv_transfer_params
    d.transport.hold_loads = False
    d.run(request, p)
    assert d.loads("verified" if size is None else "unverified") == 1
    assert sum(b"remote_engine_id" in x for x in sent) == 1, "no request was sent"
    assert not any(text[:1000] in x for x in sent)
    # No load starts.
    copy["do_remote_prefill"] = False
    d.run(d.add("again", prompt[:992], copy, max_tokens=2), p)
    assert d.stats["loads_started"] == 1
    assert sum(b"remote_engine_id" in x for x in sent) == 2
    assert not any(text[:1000] in x for x in sent)


@pytest.mark.parametrize("role", ["kv_producer", "kv_consumer"])
def test_steps_that_decode_look_at_no_request(model, transport, role):
    """Look at none, whether their KV was sent, loaded, or neither (case 20)."""
    p, d = rig.pair(model, transport=transport)
    prompts = [rig.tokens(100, seed) for seed in range(3)]
    if role == "kv_producer":
        params = [p.transport.producer_params(f"p{i}") for i in range(2)]
        for i, one in enumerate([*params, None]):
            p.add(f"p{i}", prompts[i], one, max_tokens=20)
        instance, producer = p, None
    else:
        for i, prompt in enumerate(prompts[:2]):
            d.add(f"r{i}", prompt, rig.prefill(p, f"p{i}", prompt), max_tokens=20)
        d.add("r2", prompts[2], None, max_tokens=20)
        instance, producer = d, p
    for _ in range(8):
        instance.step(producer)
    kv_checksum = instance.scheduler.kv_checksum
    looked_at = []

    class Requests(dict):
        def __getitem__(self, req_id):
            looked_at.append(req_id)
            return super().__getitem__(req_id)

    after_schedule = kv_checksum.after_schedule
    kv_checksum.after_schedule = lambda output, requests: after_schedule(
        output, Requests(requests)
    )
    running = len(instance.scheduler.running)
    for _ in range(4):
        instance.step(producer)
    assert running == len(instance.scheduler.running) == 3 and not looked_at
    assert not kv_checksum._sends.unsummed


def test_every_test_s_instances_are_held_to_it(request):
    """The fixture finds the module that the tests make their instances with."""
    assert rig.MADE == []
    assert "every_load_has_one_verdict" in request.fixturenames
