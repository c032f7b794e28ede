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

_WEIGHTS: np.ndarray = np.uint64(GOLDEN_FACTOR) * np.arange(
    1, 2 * _CHUNK, 2, dtype=np.uint64
)
"""The weights of the first chunk's pieces; each chunk's are those of the one before
plus `_STEP`."""

_STEP = np.uint64(2 * _CHUNK * GOLDEN_FACTOR & MASK64)

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
    whole, rest = _sums_of_terms(pieces, filled // 2)
    return PromptDigests(
        number + whole & MASK64 or 1, filled + whole - rest & MASK64 or 1
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


def _sums_of_terms(pieces: np.ndarray, begin: int) -> tuple[int, int]:
    """Sum the terms of uint64 `pieces`, and of those from `begin` on in the last chunk.

    A unit of tokens is not divided between chunks.
    """
    whole, weights = 0, _WEIGHTS
    rest = 0
    for at in range(0, len(pieces), _CHUNK):
        if at:
            weights = weights + _STEP
        chunk = pieces[at : at + _CHUNK]
        terms = checksum_terms(chunk, weights[: len(chunk)])
        whole += int(np.add.reduce(terms))
        if begin - at < len(terms):
            rest = int(np.add.reduce(terms[begin - at :]))
    return whole, rest


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
