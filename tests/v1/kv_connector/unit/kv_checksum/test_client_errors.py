# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that a failed load's client receives vLLM's retryable error and the reason."""

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

from vllm.entrypoints.serve.exception_handling.error_response import (  # noqa: E402
    create_error_response,
)
from vllm.exceptions import RetryableRequestError  # noqa: E402

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
