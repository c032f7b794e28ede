# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tell the client of a request whose load failed its check why, so that it can retry.

The error is vLLM's own for a failure that is safe to retry. Its code names KV
checksums and stays the same from release to release; its text tells nothing about
hosts, blocks or prompts.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_checksum.verdict import LoadVerdict, Unverified

if TYPE_CHECKING:
    from vllm.v1.engine import EngineCoreOutput

MISMATCH = "kv_checksum_mismatch"
UNVERIFIED = "kv_checksum_unverified"
QUARANTINED = "kv_checksum_quarantined"


class ClientErrors:
    """Keeps the errors of requests that fail in a step until they have outputs."""

    def __init__(self) -> None:
        self._errors: dict[str, tuple[str, str]] = {}

    def add(self, req_id: str, verdict: LoadVerdict) -> None:
        """Note that a request fails because of a load."""
        self._errors[req_id] = client_error(verdict)

    def attach(self, outputs: Iterable[Iterable[EngineCoreOutput]]) -> None:
        """Attach the errors to the outputs of a step.

        Args:
            outputs: the step's outputs, by client. Before vLLM 0.33.0 they have no
                field for an error; clients get a general one there.

        """
        if not self._errors:
            return
        errors, self._errors = self._errors, {}
        try:
            from vllm.outputs import RequestError
        except ImportError:  # vLLM 0.30.0 and 0.31.0
            return
        for output in chain.from_iterable(outputs):
            error = errors.get(output.request_id)
            if error is not None and hasattr(output, "error"):
                code, message = error
                output.error = RequestError(code, message, retryable=True)


def client_error(verdict: LoadVerdict) -> tuple[str, str]:
    """Return the code and the text for the client of a request that fails."""
    if verdict.mismatched:
        return MISMATCH, (
            "KV checksum mismatch: the KV cache loaded for this request is not the one "
            "that was computed for it"
        )
    assert verdict.reason is not None
    if verdict.reason is Unverified.QUARANTINED:
        return QUARANTINED, (
            "KV checksums: the KV cache of this request is not loaded, because KV from "
            "the instance that computed it has differed repeatedly"
        )
    return UNVERIFIED, (
        "KV checksums not verified: the KV cache loaded for this request could not be "
        f"checked ({verdict.reason.value})"
    )
