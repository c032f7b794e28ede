# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that a request's span tells what came of its loads, and of failed ones, too."""

import pytest

from vllm.distributed.kv_transfer.kv_checksum.scheduler.traces import LoadTraces
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    Difference,
    GroupVerdict,
    LoadVerdict,
    Unverified,
)
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine import output_processor as front_end
from vllm.v1.metrics.stats import IterationStats

from .rig.instances import MODES, flip_bit, load, pair
from .rig.versions import without

GOOD = LoadVerdict({0: GroupVerdict(0, 4)})
BAD = LoadVerdict({0: GroupVerdict(0, 7, [3], [Difference(3, 1, 2)])})
UNKNOWN = LoadVerdict(unverified=Unverified.NO_PAYLOAD)


def attributes(verdict, compared, bad, carrier, reason=None):
    """Return what a span tells, by the documented names."""
    told = {
        "verdict": verdict,
        "carrier": carrier,
        "blocks_compared": compared,
        "blocks_mismatched": bad,
        **({"unverified_reason": reason} if reason else {}),
    }
    return {f"vllm.kv_checksum.{k}": v for k, v in told.items()}


@pytest.mark.parametrize("mode", MODES)
def test_the_last_output_tells_what_came_of_the_load(model, transport, mode):
    p, d = pair(model, None, dict(tracing=True, **MODES[mode]), transport=transport)
    own = {"pull": "kv_transfer_params"}.get(transport, "connector")
    _, out = load(p, d, 100, "clean")
    assert out.finish_reason == FinishReason.LENGTH
    assert out.kv_checksum_trace == attributes("verified", 7, 0, own)
    d.damage = flip_bit
    _, out = load(p, d, 100, "bad", prompt=[7] * 100)
    assert out.kv_checksum_trace == attributes("mismatch", 7, 1, own)
    assert not any(d.tables().values())


def test_nothing_is_told_without_tracing(model, transport):
    p, d = pair(model, None, None, transport=transport)
    _, out = load(p, d, 100)
    assert out.kv_checksum_trace is None
    assert d.tables()["traces"] == 0


def test_a_lost_payload_has_its_reason(model):
    p, d = pair(model, None, dict(tracing=True))
    p.alter = lambda payload: None
    _, out = load(p, d, 100)
    expected = attributes("unverified", 0, 0, "kv_transfer_params", "no_payload")
    assert out.kv_checksum_trace == expected


def attached(traces):
    outputs = [EngineCoreOutput(request_id=i, new_token_ids=[]) for i in "rs"]
    traces.attach([outputs])
    return [output.kv_checksum_trace for output in outputs]


@pytest.mark.parametrize("order", [(GOOD, UNKNOWN, BAD), (BAD, UNKNOWN, GOOD)])
def test_of_several_loads_the_worst_is_told(order):
    traces = LoadTraces()
    carriers = {id(GOOD): "stored", id(UNKNOWN): "none", id(BAD): "ledger"}
    for verdict in order:
        traces.note("r", verdict, carriers[id(verdict)])
    assert attached(traces) == [None, None]
    traces.end("r")
    assert attached(traces) == [attributes("mismatch", 11, 1, "ledger"), None]
    assert attached(traces) == [None, None]


def test_a_request_without_output_leaves_nothing():
    traces = LoadTraces()
    traces.note("aborted", UNKNOWN, "none")
    traces.end("aborted")
    traces.end("never loaded")
    assert attached(traces) == [None, None]
    assert len(traces) == 0


@pytest.mark.parametrize("named", [True, False])
def test_a_failed_request_is_counted_and_traced(monkeypatch, named):
    """Like a request of vLLM's own failed load, whose output names no error."""
    if not hasattr(EngineCoreOutput, "error"):
        pytest.skip(without("place for a failed request's reason"))
    from vllm.outputs import RequestError

    spans = []
    monkeypatch.setattr(front_end, "instrument_manual", lambda **x: spans.append(x))
    processor = front_end.OutputProcessor(
        None, log_stats=True, stream_interval=1, tracing_enabled=True
    )
    params = SamplingParams(detokenize=False, output_kind=RequestOutputKind.DELTA)
    request = EngineCoreRequest(
        request_id="r",
        external_req_id="r",
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=1.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    queue = front_end.RequestOutputCollector(RequestOutputKind.DELTA, "r")
    processor.add_request(request, None, queue=queue)
    output = EngineCoreOutput("r", [], finish_reason=FinishReason.ERROR)
    output.kv_checksum_trace = attributes("mismatch", 7, 1, "connector")
    if named:
        output.error = RequestError("kv_checksum_mismatch", "why", retryable=True)
    stats = IterationStats()
    processor.process_outputs([output], 2.0, stats)
    (span,) = spans
    told = output.kv_checksum_trace.items()
    assert told <= span["attributes"].items()
    assert span["attributes"]["gen_ai.request.id"] == "r"
    (finished,) = stats.finished_requests
    assert finished.finish_reason == FinishReason.ERROR
    assert not processor.request_states
