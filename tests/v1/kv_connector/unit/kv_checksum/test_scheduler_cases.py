# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test real schedulers in rarer cases: rolled-back steps, failures, refusals."""

from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.kv_transfer.kv_checksum import (
    KV_TRANSFER_PARAMS_KEY,
    KVChecksumOutput,
    KVChecksumRecord,
)
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import KVConnectorOutput

from .rig import caches as u
from .rig import instances as rig
from .rig import transports
from .rig.instances import load, pair, tokens


def test_a_group_with_a_missing_block_inside_is_left_out_and_said(model, log):
    _, d = pair(model)
    kv_checksum = d.scheduler.kv_checksum
    rows = {"r": ([0, 0, 5, 6],), "hole": ([4, 0, 6, 7],)}
    kv_checksum._sends.kv_cache_manager = SimpleNamespace(get_block_ids=rows.get)

    def sent(req_id):
        params = {"do_remote_decode": True}
        kv_checksum.add_send(
            u.Request(
                request_id=req_id, kv_transfer_params=params, num_prompt_tokens=64
            )
        )
        return u.groups_of(kv_checksum.build_checksum_meta().reqs_to_send[req_id])

    assert sent("r") == {0: (2, [5, 6])} and not any("leave out" in x for x in log)
    for _ in range(2):
        assert sent("hole") == {}
    assert sum("leave out KV cache group 0" in x for x in log) == 1


def test_each_group_that_is_left_out_is_said(model, log):
    """For one reason, in one request and in several."""
    _, d = pair(model, window=40)
    kv_checksum = d.scheduler.kv_checksum
    rows = lambda req_id: ([4, 0, 6, 7], [0, 5, 0, 7])
    kv_checksum._sends.kv_cache_manager = SimpleNamespace(get_block_ids=rows)
    for req_id in ("a", "b"):
        kv_checksum.add_send(u.Request(request_id=req_id, num_prompt_tokens=64))
        scheduled = kv_checksum.build_checksum_meta()
        assert u.groups_of(scheduled.reqs_to_send[req_id]) == {}
    said = [x for x in log if "leave out KV cache group" in x]
    assert len(said) == 2 and all("(first for request a)" in x for x in said)
    assert ["group 0:" in x for x in said] == [True, False]
    assert ["group 1:" in x for x in said] == [False, True]
    assert kv_checksum.take_stats() == {"left_out:missing_blocks": 4}


@pytest.mark.parametrize("value", [5, None, [], "A" * 2**23, "kZGR" * 30_000])
def test_params_that_hold_anything_else(model, value):
    """Clients may put anything under the key."""
    p, d = pair(model, None, dict(kv_checksum_fail_closed=True))
    params = rig.prefill(p, "p", tokens(100))
    params[KV_TRANSFER_PARAMS_KEY] = value
    d.run(d.add("r", tokens(100), params), p)
    reason = "no_payload" if value is None else "bad_payload"
    assert d.stats[f"unverified:{reason}"] == d.loads("unverified") == 1


def test_missing_workers(model, log, caplog):
    caplog.set_level("DEBUG", "vllm.distributed.kv_transfer.kv_checksum")
    p, d = pair(model, dict(tp=2), None)
    quiet = p.workers[1].post_forward
    p.workers[1].post_forward = lambda *args, **kwargs: None
    params = rig.prefill(p, "p\n" + "x" * 5000, tokens(50))
    assert KV_TRANSFER_PARAMS_KEY not in params
    (line,) = [x for x in log if x.startswith("WARNING KV checksums not sent")]
    assert line.isprintable() and len(line) < 300
    (line,) = [x for x in log if x.startswith("DEBUG KV checksums of request")]
    assert line.endswith("not sent: workers_missing (1 of 2 workers reported)")
    p.workers[1].post_forward = quiet
    p2, d2 = pair(model, None, dict(tp=2))
    d2.workers[1].post_forward = lambda *args, **kwargs: None
    load(p2, d2, 50)
    assert d2.stats["unverified:workers_missing"] == 1


def test_a_worker_that_summed_other_blocks(model):
    p, d = pair(model)
    bind = d.workers[0].bind

    def shifted(scheduled):
        for blocks in (scheduled.reqs_to_recv if scheduled else {}).values():
            start, ids = blocks.groups[0]
            others = {0: (start + 1, ids[1:])}
            blocks = type(blocks)(blocks.num_tokens, others, blocks.seq)
            scheduled.reqs_to_recv = {"r": blocks}
        bind(scheduled)

    d.workers[0].bind = shifted
    load(p, d, 50)
    assert d.stats["unverified:other_blocks"] == 1


def test_chunked_prefill_and_decode_on_the_producer(model):
    """The prompt is summed once however many chunks; decoded tokens do not count."""
    p, d = pair(model)
    prompt = tokens(700)
    asked, schedule = [], p.schedule

    def keep():
        output = schedule()
        scheduled = output.kv_checksum_scheduled
        asked.extend(scheduled.reqs_to_send.values() if scheduled else ())
        return output

    p.schedule = keep
    params = rig.prefill(p, "p", prompt, max_tokens=20)
    assert sum(n > 1 for _, n in p.scheduled) == 3
    (blocks,) = asked
    assert blocks.num_tokens == 700
    request = d.add("r", prompt, params, max_tokens=1)
    d.run(request, p)
    assert d.loads("verified") == 1


def test_a_preempted_producer_never_gives_a_false_match(model):
    """Sums of a step that was rolled back are dropped, not mixed."""
    p, d = pair(model)
    prompt = tokens(50)
    request = p.add("p", prompt, dict(do_remote_decode=True), max_tokens=1)
    output = p.schedule()
    p.write(request, 0, 50)
    worker = p.workers[0]
    worker.bind(output.kv_checksum_scheduled)
    for cache in p.kv.values():
        cache.view(torch.uint8)[:, :, 0, 0] ^= 1
    stale = worker.post_forward(None, set(), set())
    for cache in p.kv.values():
        cache.view(torch.uint8)[:, :, 0, 0] ^= 1
    kv_checksum = p.scheduler.kv_checksum
    kv_checksum.add_send(request)
    kv_checksum.collect(KVConnectorOutput(kv_checksums=stale))
    assert not kv_checksum._sends.pending["p"].records
    worker.bind(kv_checksum.build_checksum_meta())
    fresh = worker.post_forward(None, set(), set())
    kv_checksum.collect(KVConnectorOutput(kv_checksums=stale))
    result = KVConnectorOutput(kv_checksums=fresh)
    p.finish_step(output, p.runner_output(output, result))
    params = p.results["p"][-1].kv_transfer_params
    d.run(d.add("r", prompt, params), p)
    assert d.loads("verified") == 1


def test_loads_known_bad_are_not_compared(model, transport):
    recompute = dict(kv_checksum_fail_closed=True, policy="recompute")
    p, d = pair(model, None, recompute, transport=transport)
    prompt = tokens(60)
    d.add("r", prompt, rig.prefill(p, "p", prompt))
    d.transport.hold_loads = True
    d.step(p)
    output = d.schedule()
    failed = KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"})
    d.finish_step(output, d.runner_output(output, failed))
    assert not any(k.startswith("loads:") for k in d.stats)
    assert d.tables()["recvs"] == 0


def test_a_load_that_is_aborted_is_forgotten_at_once(model, transport):
    """Its id may come again, and its end may never be reported."""
    p, d = pair(model, transport=transport)
    d.add("r", tokens(50), rig.prefill(p, "p", tokens(50)))
    d.transport.hold_loads = True
    d.step(p)
    assert d.tables()["recvs"] == 1
    d.scheduler.finish_requests("r", rig.RequestStatus.FINISHED_ABORTED)
    assert d.tables()["recvs"] == 0
    d.step(p)
    assert d.stats["loads_aborted"] == d.stats["loads_started"] == 1


@pytest.mark.parametrize("steps", [1, 4])
def test_an_aborted_prefill_sends_nothing_and_misses_nothing(model, transport, steps):
    """Abort before the prompt is computed, and while the request decodes."""
    p = rig.Instance(model, "kv_producer", transport=transport)
    p.add("p", tokens(700), p.transport.producer_params("p"), max_tokens=9)
    for _ in range(steps):
        p.step()
    p.scheduler.finish_requests("p", rig.RequestStatus.FINISHED_ABORTED)
    p.step()
    assert not [k for k in p.stats if k.startswith(("payload", "unsent"))]
    assert not any(p.tables().values())


def test_an_answer_without_parameters_gets_none(model):
    """Where the connector has nothing to say of a send, a router must not see one."""
    p = rig.Instance(model, "kv_producer")
    p.scheduler.connector.request_finished_all_groups = lambda *args: (False, None)
    p.scheduler.connector.request_finished = lambda *args: (False, None)
    request = p.add("p", tokens(50), p.transport.producer_params("p"))
    assert p.run(request).kv_transfer_params is None
    assert "payload_bytes" not in p.stats


def test_outputs_of_steps_that_scheduled_nothing(model):
    _, d = pair(model)
    output = rig.SchedulerOutput.make_empty()
    d.finish_step(output, d.runner_output(output, None))
    d.finish_step(output, d.runner_output(output, KVConnectorOutput()))


@pytest.mark.skipif("push" not in transports.FAKES, reason="no such carrier yet")
def test_the_first_received_copy_counts_and_strangers_keep_nothing(model):
    p, d = pair(model, transport="push")
    d.add("r", tokens(50), rig.prefill(p, "p", tokens(50)))
    d.transport.hold_loads = True
    d.step(p)
    kv_checksum = d.scheduler.kv_checksum
    for rank, data in enumerate((b"first", b"second")):
        record = KVChecksumRecord(0, rank, {}, received={"r": data, "stranger": data})
        output = KVConnectorOutput(kv_checksums=KVChecksumOutput([record]))
        kv_checksum.collect(output)
    assert kv_checksum._recvs["r"].received == b"first"
    assert set(kv_checksum._recvs) == {"r"} and not kv_checksum._sends.pending


def test_another_connector_is_refused(model, log):
    rig.Instance(model, "kv_both", **rig.WITHOUT_CARRIER)
    (line,) = [x for x in log if x.startswith("WARNING KV checksums are off")]
    assert "ExampleConnector" in line and "enable_kv_checksum" in line
    assert not any("KV checksums are on" in x for x in log)
    with pytest.raises(
        ValueError, match="(?s)kv_checksum_fail_closed.*ExampleConnector"
    ):
        rig.Instance(
            model, "kv_both", **rig.WITHOUT_CARRIER, kv_checksum_fail_closed=True
        )


def test_off_means_none(model):
    d = rig.Instance(model, "kv_consumer", enable_kv_checksum=False)
    assert d.scheduler.kv_checksum is None
    output = d.schedule()
    assert output.kv_checksum_scheduled is None


def test_a_producer_that_ends_with_a_stop_token_sends_checksums(model):
    p, _ = pair(model)
    request = p.add("p", tokens(50), p.transport.producer_params("p"), max_tokens=9)
    request.sampling_params.stop_token_ids = [7]
    out = p.run(request)
    assert out.finish_reason == FinishReason.STOP
    assert KV_TRANSFER_PARAMS_KEY in out.kv_transfer_params


def test_tiers_are_asked_for_as_many_tokens_as_are_loaded(model, monkeypatch):
    _, d = pair(model)
    kv_checksum, asked = d.scheduler.kv_checksum, []
    request = d.add("r", tokens(120), None)
    monkeypatch.setattr(
        kv_checksum.connector, "kv_checksum_carrier", lambda *_, **__: None
    )
    monkeypatch.setattr(
        kv_checksum._stored, "covers", lambda request, n: asked.append(n)
    )
    kv_checksum.add_recv(request, 32, 100)
    kv_checksum.request_finished(request, None)
    assert asked == [68]
