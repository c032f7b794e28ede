# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that a failed load's client receives vLLM's retryable error and the reason."""

import asyncio

import pytest

from vllm.distributed.kv_transfer.kv_checksum.scheduler.client_errors import (
    ClientErrors,
)
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    Difference,
    GroupVerdict,
    LoadVerdict,
    Unverified,
)
from vllm.v1.engine import EngineCoreOutput

outputs = pytest.importorskip("vllm.outputs")
if not hasattr(EngineCoreOutput, "error"):
    pytest.skip("this vLLM has no field for an error", allow_module_level=True)

from vllm.entrypoints.openai.responses.protocol import ResponsesRequest  # noqa: E402
from vllm.entrypoints.openai.responses.serving import (  # noqa: E402
    OpenAIServingResponses,
)
from vllm.entrypoints.serve.exception_handling.error_response import (  # noqa: E402
    create_error_response,
)
from vllm.exceptions import RetryableRequestError  # noqa: E402
from vllm.sampling_params import SamplingParams  # noqa: E402

MISMATCH = LoadVerdict({0: GroupVerdict(0, 7, [3], [Difference(3, 1, 2)])})
UNVERIFIED = LoadVerdict(unverified=Unverified.NO_PAYLOAD, detail="of host-17")


def answered(verdict):
    """Return the output of a request that fails, and the body of its answer."""
    errors = ClientErrors()
    errors.add("r", verdict)
    mine, other = (EngineCoreOutput(request_id=i, new_token_ids=[]) for i in ("r", "s"))
    errors.attach([[other], [mine]])
    assert other.error is None
    return mine, create_error_response(mine.error.to_exception()).model_dump()


@pytest.mark.parametrize(
    ("verdict", "reason"),
    [(MISMATCH, "kv_checksum_mismatch"), (UNVERIFIED, "kv_checksum_unverified")],
)
def test_the_answer_is_vllms_retryable_one_and_the_reason(verdict, reason):
    output, answer = answered(verdict)
    assert output.error.retryable
    error = answer["error"]
    own = create_error_response(RetryableRequestError(error["message"])).model_dump()
    assert "reason" not in own["error"]
    assert error == {**own["error"], "reason": reason}
    assert "host-17" not in error["message"]


def test_other_errors_are_as_they_were():
    error = outputs.RequestError("engine_paused", "wait", retryable=True).to_exception()
    assert "reason" not in create_error_response(error).model_dump()["error"]
    undecodable = UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")
    assert "reason" not in create_error_response(undecodable).model_dump()["error"]


def test_an_error_is_attached_in_its_step_alone():
    errors = ClientErrors()
    errors.add("r", MISMATCH)
    errors.attach([[]])
    later = EngineCoreOutput(request_id="r", new_token_ids=[])
    errors.attach([[later]])
    assert later.error is None


def test_a_streamed_response_ends_with_an_event_that_names_the_reason():
    """By itself, vLLM takes the error for one of its events, and breaks off there."""
    output, answer = answered(MISMATCH)

    async def failing(*_):
        raise output.error.to_exception()
        yield

    serving = object.__new__(OpenAIServingResponses)
    serving.use_harmony, serving._process_simple_streaming_events = False, failing
    request = ResponsesRequest(input="a prompt", model="model")
    params = SamplingParams(max_tokens=4)

    async def events():
        stream = serving.responses_stream_generator(
            request, params, None, None, "model", None, None
        )
        return [event.model_dump() async for event in stream]

    *began, last = asyncio.run(events())
    assert [event["sequence_number"] for event in began] == [0, 1]
    assert last == {
        "type": "error",
        "code": "kv_checksum_mismatch",
        "message": answer["error"]["message"],
        "param": None,
        "sequence_number": 2,
    }
