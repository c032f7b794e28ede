# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Bind payloads to the prompt and the other inputs that their KV is computed from.

Payload and block ids travel together, so a router that hands one request's parameters
to another would have the wrong KV verified. Both sides therefore compute digests of
their request's inputs; 0 stands for no inputs to bind to.
"""

from __future__ import annotations

from array import array
from hashlib import blake2b
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    GOLDEN_FACTOR,
    MASK64,
    UNIT_TOKENS,
    checksum_terms,
)
from vllm.distributed.kv_transfer.kv_checksum.payload import PromptDigests

if TYPE_CHECKING:
    from vllm.v1.request import Request

_CHUNK = 8192
"""Pieces per chunk, so that a chunk stays in the processor's cache."""

_encoder = msgspec.msgpack.Encoder()


def prompt_digests(request: Request, num_tokens: int) -> PromptDigests:
    """Compute digests of a request's first tokens, the same in every process.

    Tokens that were decoded count where more than the prompt is asked for: they are a
    part of the prompt of the next turn.

    A digest is the number of tokens plus the checksum's sum of terms over their ids, 32
    bits each and two to a piece, with the weights of the slice of layer 0 and head 0,
    mod 2**64. It takes 0.4 ms for 128k tokens, most of it for reading the list.

    Args:
        request: the scheduler's request.
        num_tokens: how many tokens count.

    Returns:
        The digests, which are 0 if the prompt, or a part of it, is given as embeddings.

    """
    if not is_bound(request):
        return PromptDigests(0, 0)
    assert request.prompt_token_ids is not None
    token_ids = request.prompt_token_ids
    if num_tokens > len(token_ids):
        token_ids = request._all_token_ids
    ids = _first_ids(token_ids, num_tokens)
    number = len(ids)
    if number % 2:
        ids.append(0)
    pieces = np.frombuffer(ids, np.uint64)
    filled = number // UNIT_TOKENS * UNIT_TOKENS
    beginning = _sum_of_terms(pieces[: filled // 2], 0)
    rest = _sum_of_terms(pieces[filled // 2 :], filled // 2)
    return PromptDigests(
        number + beginning + rest & MASK64 or 1, filled + beginning & MASK64 or 1
    )


def _first_ids(token_ids: list[int], number: int) -> array[int]:
    """Return the first token ids as uint32; of greater numbers, the low 32 bits."""
    ids = array("I")
    try:
        ids.fromlist(token_ids)
    except OverflowError:
        return array("I", [token & 2**32 - 1 for token in token_ids[:number]])
    del ids[number:]
    return ids


def _sum_of_terms(pieces: np.ndarray, first: int) -> int:
    """Sum the terms of uint64 `pieces`, numbered from `first`."""
    stop = first + min(_CHUNK, len(pieces))
    j: np.ndarray = np.arange(first, stop, dtype=np.uint64)
    weights = np.uint64(GOLDEN_FACTOR) * (np.uint64(2) * j + np.uint64(1))
    step = np.uint64(2 * _CHUNK * GOLDEN_FACTOR & MASK64)
    total = 0
    for at in range(0, len(pieces), _CHUNK):
        chunk = pieces[at : at + _CHUNK]
        total += int(checksum_terms(chunk, weights[: len(chunk)]).sum(dtype=np.uint64))
        weights += step
    return total


def is_other_prompt(request: Request, num_tokens: int, sent: PromptDigests) -> bool:
    """Tell whether a payload is of another prompt than the request's.

    Args:
        request: the consumer's request.
        num_tokens: number of the producer's tokens that were summed.
        sent: the producer's digests of them.

    """
    assert request.prompt_token_ids is not None
    number = len(request.prompt_token_ids)
    if number >= num_tokens:
        return prompt_digests(request, num_tokens).whole != sent.whole
    # A shorter prompt may be the beginning of the producer's prompt.
    filled = num_tokens // UNIT_TOKENS * UNIT_TOKENS
    return number < filled or prompt_digests(request, filled).whole != sent.beginning


def is_bound(request: Request) -> bool:
    """Tell whether a request's prompt is all token ids, and so has digests."""
    return request.prompt_embeds is None and request.prompt_token_ids is not None


def inputs_digest(request: Request, num_tokens: int) -> int:
    """Compute a 64-bit digest of the other inputs of a request's first tokens.

    They are the identifiers and places of its multi-modal inputs, and the name of its
    LoRA adapter; the digest is 0 if it has neither. Two instances may name the same
    input differently.
    """
    inputs = [
        (item.identifier, item.mm_position.offset, item.mm_position.length)
        for item in request.mm_features
        if item.mm_position.offset < num_tokens
    ]
    lora = request.lora_request and request.lora_request.lora_name
    if not inputs and not lora:
        return 0
    data = _encoder.encode((lora, inputs))
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")
