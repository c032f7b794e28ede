# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Stand in for a model: KV made from token ids and positions, and sampled tokens.

So the right KV of a prompt is known without a forward pass, on any instance.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_checksum.testing.configuration import (
    HEAD_SIZE,
    HEADS,
    VOCABULARY,
)
from vllm.sampling_params import SamplingParams
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

SAMPLED = 7
"""The one token that is ever generated."""

_CELLS = torch.randn(
    8191, HEADS, 2 * HEAD_SIZE, generator=torch.Generator().manual_seed(5)
).to(torch.bfloat16)


def token_kv(layer: int, position: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
    """Return one layer's ``(tokens, heads, K and V)``; position and token are int64."""
    return _CELLS[(layer * 2477 + position * 613 + token * 31) % len(_CELLS)]


def tokens(number: int, seed: int = 0) -> list[int]:
    """Return the token ids of a prompt."""
    found: list[int] = np.random.default_rng(seed).integers(5, 500, number).tolist()
    return found


def make_request(
    req_id: str,
    prompt: Sequence[int],
    params: dict[str, Any] | None,
    max_tokens: int,
    block_hasher: Callable[[Request], Any],
    **settings: Any,
) -> Request:
    """Return a scheduler's request.

    Args:
        req_id: its id.
        prompt: its token ids.
        params: its ``kv_transfer_params``.
        max_tokens: how many tokens it generates.
        block_hasher: computes the hashes of its blocks.
        settings: further ones of `Request`.

    """
    request = Request(
        **settings,
        request_id=req_id,
        prompt_token_ids=list(prompt),
        sampling_params=SamplingParams(
            max_tokens=max_tokens,
            ignore_eos=True,
            temperature=0,
            extra_args={"kv_transfer_params": params} if params else None,
        ),
        pooling_params=None,
        block_hasher=block_hasher,
    )
    assert request.sampling_params is not None
    request.sampling_params.update_from_generation_config({}, VOCABULARY - 1)
    return request


def spans(output: SchedulerOutput) -> dict[str, tuple[int, int]]:
    """Return the tokens ``[first, last)`` that a step computes, by request id."""
    first = {r.req_id: r.num_computed_tokens for r in output.scheduled_new_reqs}
    cached = output.scheduled_cached_reqs
    first.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    return {r: (first[r], first[r] + n) for r, n in output.num_scheduled_tokens.items()}


def runner_output(
    scheduler: Scheduler, output: SchedulerOutput, kv_output: KVConnectorOutput
) -> ModelRunnerOutput:
    """Return what a model runner reports for a step.

    Args:
        scheduler: the scheduler, which knows the requests.
        output: the step.
        kv_output: what the connectors report for it.

    """
    ids = list(output.num_scheduled_tokens)
    sampled = []
    for req_id, (_, last) in spans(output).items():
        request = scheduler.requests.get(req_id)
        ends = request is not None and last >= request.num_tokens
        sampled.append([SAMPLED] if ends else [])
    return ModelRunnerOutput(
        req_ids=ids,
        req_id_to_index={r: i for i, r in enumerate(ids)},
        sampled_token_ids=sampled,
        kv_connector_output=kv_output,
    )
