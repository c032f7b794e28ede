# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run depth *blocks*: many damaged blocks per verdict, real workers, no scheduler.

What a verdict tells apart is a chunk: a block of D, or as many as what is compared as
one takes; each chunk of a load gets damage of its own. Whether it changed anything that
counts is found by comparing bytes, and that alone decides what the verdict ought to be.
"""

from __future__ import annotations

import zlib

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum.fault_drill.damage import NotApplicable
from vllm.distributed.kv_transfer.kv_checksum.verdict import LoadVerdict

from .compressed import Rings
from .drawing import Group, draw_model, draw_splits
from .drawing import where as repeat
from .models import Generator, Split, compared_size
from .sides import Blocks, Load, Side, holds_tokens
from .strike import (
    KINDS_OF,
    OPEN,
    PADDING,
    UNUSED,
    Chunk,
    content,
    strike,
)
from .tally import CHECK, CLEAN, Tally

DEPTH = "blocks"

_OTHER_SUMS = {"Adler-32": zlib.adler32, "CRC-32": zlib.crc32}
OTHERS = tuple(_OTHER_SUMS)
"""Checksums of the same bytes, for comparison."""

LOADS, ROUNDS = 6, 10
"""Loads of a batch, and its damaged rounds; one more is clean."""

PARTIAL = "unverified: last tokens, if D loads fewer than P summed"
OTHER_STATE = "unverified: state after other tokens than P summed"
UNALIGNED = "unverified: D's first block begins inside a unit of P"
NO_WHOLE = "unverified: no unit holds equally many tokens on both sides"
OTHER_RING = "unverified: rings of unequal sizes"
NOT_COMPARED = (PARTIAL, OTHER_STATE, UNALIGNED, NO_WHOLE, OTHER_RING)

AS_A_WHOLE = CHECK + "a load's own verdict follows from its blocks"
SETS = CHECK + "what is summed is what is transferred"

_EXPECTED = {
    **dict.fromkeys((UNUSED, PADDING, OPEN, CLEAN), ("verified",)),
    **dict.fromkeys((AS_A_WHOLE, SETS), ("verified",)),
    **dict.fromkeys(NOT_COMPARED, ("unverified",)),
}


def run_batch(seed: int, number: int, only: str = "all") -> Tally:
    """Draw a model, a pair of instances and loads, and damage them several times.

    Args:
        seed: of all batches.
        number: of this batch.
        only: which models are drawn, a key of `drawing.FAMILIES`.

    """
    random = np.random.default_rng([seed, number])
    groups = draw_model(random, only)
    p_split, d_split = draw_splits(random, groups)
    loads = [
        _draw_load(random, i, p_split.block_size, d_split.block_size)
        for i in range(LOADS)
    ]
    p = Side(groups, p_split, loads, random)
    d = Side(groups, d_split, loads, random)
    p.write(loads)
    d.write(loads)
    params, summed_p = p.send(loads)
    _, summed_d = d.load(loads, params)
    tally = Tally()
    _draw(tally, groups, p_split, d_split)
    sent = {x.req_id: p.transferred(x, 0, x.num_tokens) for x in loads}
    loaded = {x.req_id: d.transferred(x, x.first_token, x.end) for x in loads}
    where = repeat(DEPTH, seed, number, only)
    _note_sets(tally, sent, summed_p, f"P ({where})")
    _note_sets(tally, loaded, summed_d, f"D ({where})")
    kept = [cache.clone() for cache in d.caches]
    before: list[tuple[bytes, bytes]] = []
    for round_ in range(ROUNDS + 1):
        for cache, copy in zip(d.caches, kept, strict=True):
            cache.copy_(copy)
        chunks = _chunks(p, d, loads, sent, loaded)
        limits = {i: c.kind for i, c in enumerate(chunks) if c.kind in NOT_COMPARED}
        if round_:
            _damage(d, chunks, random)
            after = _contents(d, chunks)
        else:
            after = before = _contents(d, chunks)
        verdicts, _ = d.load(loads, params)
        in_round = f"{where}, round {round_}"
        for i, (chunk, old, new) in enumerate(zip(chunks, before, after, strict=True)):
            if old[1] == new[1]:
                chunk.kind = limits.get(i, chunk.kind)
            outcome = _outcome(chunk, verdicts[chunk.req_id])
            _note(tally, chunk, old[0], new[0], outcome, in_round)
        _note_loads(tally, loaded, chunks, limits, before, after, verdicts, in_round)
    return tally


def _contents(d: Side, chunks: list[Chunk]) -> list[tuple[bytes, bytes]]:
    """Return the bytes of every chunk that count, and those of them compared."""
    return [
        (content(d.target, chunk), content(d.target, chunk, compared=True))
        for chunk in chunks
    ]


def _draw(tally: Tally, groups: list[Group], p: Split, d: Split) -> None:
    tally.draw(
        DEPTH,
        groups=" + ".join(g.family for g in groups),
        TP=f"{p.tp}/{d.tp}",
        PP=f"{p.pp}/{d.pp}",
        block_size=f"{p.block_size}/{d.block_size}",
        layout_of_D=d.layout,
    )


def _draw_load(random: Generator, number: int, p_size: int, d_size: int) -> Load:
    """Draw a load: D's local tokens are whole blocks, and it may load a part."""
    large = max(p_size, d_size)
    step = max(d_size, compared_size(p_size, d_size))
    if random.random() < 0.2:
        step = d_size
    tokens = int(random.integers(2, 24 * large))
    first = int(random.integers(1 + tokens // step // 2)) * step
    end = tokens
    if random.random() < 0.2 and tokens - first > large:
        end -= int(random.integers(1, large // 2))
    return Load(f"r{number}", tokens, first, end, int(random.integers(2**32)))


def _chunks(
    p: Side,
    d: Side,
    loads: list[Load],
    sent: dict[str, Blocks],
    loaded: dict[str, Blocks],
) -> list[Chunk]:
    """Return the chunks of every load that both sides hold whole, in order.

    Those of which something cannot be compared have the reason as their kind.
    """
    size, p_size = d.split.block_size, p.split.block_size
    unit = compared_size(p_size, size)
    large = max(size, unit)
    ratio = large // size
    chunks: list[Chunk] = []
    for load in loads:
        fewer = load.end < load.num_tokens
        for group, (start, ids) in loaded[load.req_id].items():
            model = d.groups[group]
            if not holds_tokens(model):
                chunk = Chunk(load.req_id, group, ids, 0, 1, load.end)
                chunk.holds = model.holds
                if fewer:
                    chunk.kind, chunk.compared = OTHER_STATE, (0, 0)
                elif isinstance(model, Rings) and len(set(model.slots)) > 1:
                    chunk.kind, chunk.compared = OTHER_RING, (0, 0)
                chunks.append(chunk)
                continue
            p_start, _ = sent[load.req_id][group]
            first = max(-(-start // ratio), -(-p_start * p_size // large))
            last = -(-load.end // large)
            whole = load.end // unit * unit if fewer else load.end
            for at in range(first, last):
                own = ids[max(0, at * ratio - start) :][:ratio]
                chunk = Chunk(load.req_id, group, own, at * ratio, size, load.end)
                chunk.compared, chunk.holds = (0, whole), model.holds
                if start % ratio:
                    chunk.kind, chunk.compared = UNALIGNED, (0, 0)
                elif whole <= max(start * size, p_start * p_size):
                    chunk.kind, chunk.compared = NO_WHOLE, (0, 0)
                elif whole < load.end and at == last - 1:
                    chunk.kind = PARTIAL
                chunks.append(chunk)
    return chunks


def _damage(d: Side, chunks: list[Chunk], random: Generator) -> None:
    """Give every chunk a kind of damage."""
    at = 0
    while at < len(chunks):
        kinds = KINDS_OF[chunks[at].holds]
        try:
            kind = kinds[random.integers(len(kinds))]
            at += strike(d.target, chunks, at, kind, random)
        except NotApplicable:
            continue  # some kind always is


def _outcome(chunk: Chunk, verdict: LoadVerdict) -> str:
    """Return what the verdict says of one chunk."""
    group = verdict.groups.get(chunk.group)
    if verdict.unverified or group is None:
        return "unverified"
    if chunk.start in group.positions:
        return "mismatch"
    if group.first <= chunk.start < group.first + group.compared:
        return "verified"
    # What is not compared is served as what the load's verdict says.
    return "verified" if verdict.outcome == "verified" else "unverified"


def _note_sets(
    tally: Tally, expected: dict[str, Blocks], summed: dict[str, Blocks], where: str
) -> None:
    row = tally.row(DEPTH, SETS, _EXPECTED[SETS])
    for req_id, blocks in expected.items():
        same = blocks == summed.get(req_id)
        row.count("verified" if same else "differ", False)
        if not same:
            tally.example(f"{req_id}: {blocks}, summed {summed.get(req_id)}, {where}")


def _note_loads(
    tally: Tally,
    loaded: dict[str, Blocks],
    chunks: list[Chunk],
    limits: dict[int, str],
    before: list[tuple[bytes, bytes]],
    after: list[tuple[bytes, bytes]],
    verdicts: dict[str, LoadVerdict],
    where: str,
) -> None:
    """Note loads: a damaged chunk that is compared makes a mismatch of its load.

    One that is not compared makes it unverified, and so does a group without any: of
    a window, the two sides may hold no whole chunk in common.
    """
    compared = {(chunk.req_id, chunk.group) for chunk in chunks}
    expected = {
        req_id: "verified"
        if all((req_id, g) in compared for g in groups)
        else "unverified"
        for req_id, groups in loaded.items()
    }
    for i, chunk in enumerate(chunks):
        if chunk.kind not in NOT_COMPARED and before[i] != after[i]:
            expected[chunk.req_id] = "mismatch"
        elif i in limits and expected[chunk.req_id] == "verified":
            expected[chunk.req_id] = "unverified"
    row = tally.row(DEPTH, AS_A_WHOLE, _EXPECTED[AS_A_WHOLE])
    for req_id, outcome in expected.items():
        found = verdicts[req_id].outcome
        row.count("verified" if found == outcome else f"{found}, not {outcome}", False)
        if found != outcome:
            tally.example(f"{req_id} as a whole: {found}, not {outcome} ({where})")


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
