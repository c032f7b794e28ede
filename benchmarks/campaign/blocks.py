# SPDX-License-Identifier: Apache-2.0
"""Depth *blocks*: many damaged blocks per verdict, by real workers, no scheduler.

What is compared is a chunk, a block of the larger of both block sizes; each chunk of
a load gets damage of its own. Whether it changed anything that counts is found by
comparing bytes, and that alone decides what the verdict ought to be.
"""

from __future__ import annotations

import zlib

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumBlocks
from vllm.distributed.kv_transfer.kv_checksum.fault_damage import NotApplicable
from vllm.distributed.kv_transfer.kv_checksum.verdict import LoadVerdict

from .cancel import changes_cancel
from .models import Generator, States, draw_model, draw_splits
from .sides import Load, Side
from .strike import (
    PADDING,
    STATE_KINDS,
    TOKEN_KINDS,
    UNUSED,
    Chunk,
    content,
    strike,
)
from .tally import CLEAN, Tally

DEPTH = "blocks"

_OTHER_SUMS = {"Adler-32": zlib.adler32, "CRC-32": zlib.crc32}
OTHERS = tuple(_OTHER_SUMS)
"""Checksums of the same bytes, for comparison."""

LOADS, ROUNDS = 6, 10
"""Loads of a batch, and its damaged rounds; one more is clean."""

PARTIAL = "limit: last block, if D loads fewer tokens than P summed"
CANCELS = "limit: changes that cancel, in KV of few values"
UNALIGNED = "unverified: D's first block begins inside a block of P"
NO_WHOLE = "unverified: no block holds equally many tokens on both sides"

_EXPECTED = {
    **dict.fromkeys((UNUSED, PADDING, PARTIAL, CANCELS, CLEAN), ("verified",)),
    **dict.fromkeys((UNALIGNED, NO_WHOLE), ("unverified",)),
}


def run_batch(seed: int, number: int) -> Tally:
    """One drawn model, pair of instances and set of loads, damaged several times."""
    random = np.random.default_rng([seed, number])
    groups = draw_model(random)
    p_split, d_split = draw_splits(random)
    large = max(p_split.block_size, d_split.block_size)
    states = frozenset(i for i, g in enumerate(groups) if isinstance(g, States))
    loads = [_draw_load(random, i, large, states) for i in range(LOADS)]
    p = Side(groups, p_split, loads, random)
    d = Side(groups, d_split, loads, random)
    p.write(loads)
    d.write(loads)
    params, sent = p.send(loads)
    _, summed = d.load(loads, params)
    kept = [cache.clone() for cache in d.caches]
    before: list[bytes] = []
    tally = Tally()
    tally.draw(
        DEPTH,
        groups=" + ".join(g.family for g in groups),
        TP=f"{p_split.tp}/{d_split.tp}",
        PP=f"{p_split.pp}/{d_split.pp}",
        block_size=f"{p_split.block_size}/{d_split.block_size}",
        layout_of_D=d_split.layout,
    )
    for round_ in range(ROUNDS + 1):
        for cache, copy in zip(d.caches, kept, strict=True):
            cache.copy_(copy)
        chunks, limits = _chunks(loads, summed, sent, d_split.block_size, large)
        if round_:
            _damage(d, chunks, random)
            after = [content(d.target, chunk) for chunk in chunks]
        else:
            after = before = [content(d.target, chunk) for chunk in chunks]
        verdicts, _ = d.load(loads, params)
        where = f"--depth blocks --seed {seed} --batch {number}, round {round_}"
        for i, (chunk, old, new) in enumerate(zip(chunks, before, after, strict=True)):
            limit = limits.get(i)
            if limit != PARTIAL or chunk.kind not in (CLEAN, UNUSED):
                chunk.kind = limit or chunk.kind
            outcome = _outcome(chunk, verdicts[chunk.req_id], limit)
            missed = outcome == "verified" and old != new and limit is None
            if missed and changes_cancel(d, chunk, old, new):
                chunk.kind = CANCELS
            _note(tally, chunk, old, new, outcome, where)
    return tally


def _draw_load(
    random: Generator, number: int, large: int, states: frozenset[int]
) -> Load:
    tokens = int(random.integers(2, 24 * large))
    first = int(random.integers(1 + tokens // large // 2)) * large
    end = tokens
    if random.random() < 0.2 and tokens - first > large:
        end -= int(random.integers(1, large // 2))
    return Load(f"r{number}", tokens, first, end, int(random.integers(2**32)), states)


def _chunks(
    loads: list[Load],
    summed: dict[str, KVChecksumBlocks],
    sent: dict[str, tuple[KVChecksumBlocks, int]],
    size: int,
    large: int,
) -> tuple[list[Chunk], dict[int, str]]:
    """The chunks of every load that both sides hold whole, in order.

    And by number, those that cannot be compared, with the limit.
    """
    chunks: list[Chunk] = []
    limits: dict[int, str] = {}
    for load in loads:
        theirs, p_size = sent[load.req_id]
        for group, (start, ids) in summed[load.req_id].groups.items():
            if group in load.state_groups:
                chunks.append(Chunk(load.req_id, group, list(ids), 0, 1, load.end))
                continue
            ratio = large // size
            p_start, _ = theirs.groups[group]
            first = max(-(-start // ratio), -(-p_start * p_size // large))
            last = -(-load.end // large)
            partial = load.end < load.num_tokens and load.end % large > 0
            for at in range(first, last):
                if start % ratio:
                    limits[len(chunks)] = UNALIGNED
                elif partial and last == first + 1:
                    limits[len(chunks)] = NO_WHOLE
                elif partial and at == last - 1:
                    limits[len(chunks)] = PARTIAL
                own = list(ids[max(0, at * ratio - start) :][:ratio])
                chunks.append(
                    Chunk(load.req_id, group, own, at * ratio, size, load.end)
                )
    return chunks, limits


def _damage(d: Side, chunks: list[Chunk], random: Generator) -> None:
    """Give every chunk a kind of damage."""
    at = 0
    while at < len(chunks):
        kinds = STATE_KINDS if chunks[at].is_state else TOKEN_KINDS
        try:
            kind = kinds[random.integers(len(kinds))]
            at += strike(d.target, chunks, at, kind, random)
        except NotApplicable:
            continue  # some kind always is


def _outcome(chunk: Chunk, verdict: LoadVerdict, limit: str | None) -> str:
    group = verdict.groups.get(chunk.group)
    if verdict.unverified or group is None or group.unverified:
        return "unverified"
    if chunk.start in group.positions:
        return "mismatch"
    compared = group.first <= chunk.start < group.first + group.compared
    # A block that is not compared is served as what the load's verdict says.
    return "verified" if compared != (limit == PARTIAL) else "unverified"


def _note(
    tally: Tally, chunk: Chunk, old: bytes, new: bytes, outcome: str, where: str
) -> None:
    row = tally.row(DEPTH, chunk.kind, _EXPECTED.get(chunk.kind, ("mismatch",)))
    changed = old != new
    row.count(outcome, changed)
    if changed:
        for name, total in _OTHER_SUMS.items():
            row.missed_by[name] += total(old) == total(new)
    if outcome not in row.right(changed):
        tally.example(
            f"{chunk.kind}: {outcome}, group {chunk.group}, position {chunk.start} of "
            f"{chunk.req_id} ({where})"
        )
