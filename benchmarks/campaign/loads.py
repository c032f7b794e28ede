# SPDX-License-Identifier: Apache-2.0
"""Depth *loads*: whole requests through the real schedulers of P and D.

Instances as the unit tests have them (`kv_checksum_instances`): real schedulers,
connectors' scheduler sides, checksum workers, payloads and verdicts; the forward and
the transfer are faked.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import kv_checksum_hybrid as hybrid
import kv_checksum_instances as rig
import numpy as np
import torch
from kv_checksum_rig import loaded
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import MLAAttentionSpec

from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.fault_damage import (
    PAYLOAD_KINDS,
    LayerCache,
    NotApplicable,
    damage_payload,
)
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumPayload

from .models import Generator, conv_layout
from .sides import keep_verdicts
from .strike import PADDING, TOKEN_KINDS, UNUSED, Chunk, Target, Worker, content, strike
from .strike import STATE_KINDS as ALL_STATE_KINDS
from .tally import CLEAN, Tally

DEPTH = "loads"

STATE_KINDS = tuple(kind for kind in ALL_STATE_KINDS if kind != PADDING)
"""The pages of these instances have no padding."""

WAVES = 16
"""Sets of concurrent loads in a batch, half of them clean."""

WRONG_BEFORE = "limit: KV already wrong when its producer summed it"
LATE = "limit: a late writer, after the verdict"
WINDOW_START = "limit: first block of a window, of which P sent a part"
SAME_BEGINNING = "limit: payload of a request with the same whole blocks"
UNALIGNED = "unverified: D's first block begins inside a block of P"

_EXPECTED = {
    **dict.fromkeys((UNUSED, WRONG_BEFORE, LATE, WINDOW_START, CLEAN), ("verified",)),
    **dict.fromkeys(PAYLOAD_KINDS, ("unverified",)),
    UNALIGNED: ("unverified",),
    # Another request's payload may be of fewer tokens or of other positions.
    "other_request_payload": ("mismatch", "unverified"),
    SAME_BEGINNING: ("verified", "unverified"),
}

_MODES = {
    "open": {},
    "fail": dict(kv_checksum_fail_closed=True, policy="fail"),
    "recompute": dict(kv_checksum_fail_closed=True, policy="recompute"),
}


class Mla(rig.Instance):
    """One latent vector per token, of which every TP rank has a copy of its own."""

    def token_specs(self, window: int | None) -> list[Any]:
        return [
            MLAAttentionSpec(
                block_size=self.block_size,
                num_kv_heads=1,
                head_size=2 * rig.HEAD_SIZE,
                dtype=torch.bfloat16,
            )
        ]

    def local_spec(self, spec: Any) -> Any:
        return spec

    def make_kv_config(self, groups: Any) -> Any:
        self.copies: dict[tuple[int, int], torch.Tensor] = {}
        return super().make_kv_config(groups)

    def caches_of(self, stage: int, rank: int) -> dict[str, torch.Tensor]:
        layers = [n for n in self.kv if n % rig.LAYERS * self.pp // rig.LAYERS == stage]
        for n in layers:
            if (n, rank) not in self.copies:
                self.copies[n, rank] = self.kv[n].clone() if rank else self.kv[n]
        return {rig.u.names(n)[0]: self.copies[n, rank] for n in layers}

    def _copy(self, block_ids: list[int]) -> None:
        for (n, rank), copy in self.copies.items():
            if rank:
                copy[block_ids] = self.kv[n][block_ids]

    def write(self, request: Any, first: int, last: int) -> None:
        super().write(request, first, last)
        manager = self.scheduler.kv_cache_manager
        ids = manager.get_block_ids(request.request_id)[0]
        self._copy(ids[first // self.block_size :][: last - first + 1])

    def copy_states(self, producer: Any, ours: Any, theirs: Any) -> None:
        self._copy(list(ours[0]))


@dataclass
class _Plan:
    """What is done to one load, and what came of it.

    Attributes:
        changed: whether it changed anything that counts.
        block_ids: the blocks it was loaded into, per group; None: nothing loaded.
        answer_is_right: whether its KV was right once it was recomputed.
    """

    kind: str
    changed: bool = False
    block_ids: list[list[int]] | None = None
    answer_is_right: bool = True


class Pair:
    """P and D of one drawn configuration, and what is done to their loads."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = np.random.default_rng([seed, number])
        self.where = f"--depth loads --seed {seed} --batch {number}"
        self.mode = str(self.random.choice(list(_MODES)))
        self.p, self.d = _draw_instances(self.random, self.mode)
        self.tally = Tally()
        self.tally.draw(
            DEPTH,
            groups=_describe(self.d),
            carrier=self.d.transport.connector,
            on_failure=self.mode,
            TP=f"{self.p.tp}/{self.d.tp}",
            PP=f"{self.p.pp}/{self.d.pp}",
            block_size=f"{self.p.block_size}/{self.d.block_size}",
            async_scheduling=bool(self.d.steps_ahead),
        )
        self.verdicts = keep_verdicts(self.d.scheduler.kv_checksum)
        self.plans: dict[str, _Plan] = {}
        self.payloads: list[bytes] = []
        self.target = _target(self.d)
        self.only_tokens = len(self.target.workers) == len(self.d.layers)
        self.p.alter = self.alter
        self.d.loaded = self.loaded
        self.prompts: list[list[int]] = []
        self.number = 0
        self.sending = ""

    # ---- hooks

    def alter(self, payload: bytes) -> bytes | None:
        """A payload on its way."""
        plan = self.plans.get(self.sending)
        previous = self.payloads[-1] if self.payloads else None
        self.payloads = [payload]
        if plan is None or plan.kind not in PAYLOAD_KINDS:
            return payload
        try:
            damaged = damage_payload(plan.kind, payload, previous)
        except NotApplicable:
            plan.kind = CLEAN
            return payload
        plan.changed = damaged != payload
        if plan.changed and plan.kind == "other_request_payload":
            large = max(self.p.block_size, self.d.block_size)
            if _same_beginning(wire.decode(payload), wire.decode(damaged), large):
                plan.kind = SAME_BEGINNING
        return damaged

    def loaded(self, req_id: str, block_ids: list[list[int]]) -> None:
        """A load arrived on D, and is not summed yet."""
        plan = self.plans[req_id]
        plan.block_ids = block_ids
        chunks = self._chunks(req_id, block_ids)
        unaligned = any(c.kind == UNALIGNED for c in chunks)
        if unaligned and plan.kind not in PAYLOAD_KINDS:
            plan.kind = UNALIGNED
        if plan.kind not in (*TOKEN_KINDS, *STATE_KINDS):
            return
        before = [content(self.target, chunk) for chunk in chunks]
        for _ in range(50):
            at = int(self.random.integers(len(chunks)))
            kinds = STATE_KINDS if chunks[at].is_state else TOKEN_KINDS
            if plan.kind not in kinds:
                plan.kind = kinds[self.random.integers(len(kinds))]
            partly_sent = chunks[at].kind == WINDOW_START
            try:
                hit = strike(self.target, chunks, at, plan.kind, self.random)
                if partly_sent and hit == 1:
                    plan.kind = WINDOW_START
                break
            except NotApplicable:
                plan.kind = kinds[self.random.integers(len(kinds))]
        else:
            plan.kind = CLEAN
        after = [content(self.target, chunk) for chunk in chunks]
        plan.changed = before != after

    def _chunks(self, req_id: str, block_ids: list[list[int]]) -> list[Chunk]:
        """The loaded blocks, as the connector chose them."""
        end = self.d.scheduler.requests[req_id].num_computed_tokens
        size, p_size = self.d.block_size, self.p.block_size
        chunks = []
        for group, ids in enumerate(block_ids):
            if group >= len(self.d.layers):
                spec = self.d.kv_config.kv_cache_groups[group].kv_cache_spec
                state = loaded.without_scratch(ids, spec)
                chunks += [Chunk(req_id, group, state, 0, 1, end)] if state else []
                continue
            first = -(-end // size) - len(ids)
            sent = self._first_token_sent(group, end)
            for at, block in enumerate(ids, first):
                chunk = Chunk(req_id, group, [block], at, size, end)
                if p_size > size and first * size % p_size:
                    chunk.kind = UNALIGNED
                elif at * size < sent:
                    chunk.kind = WINDOW_START
                chunks.append(chunk)
        return chunks

    def _first_token_sent(self, group: int, end: int) -> int:
        """The first token of the first block that P still holds of a window."""
        window = getattr(self.p.specs[group], "sliding_window", None)
        if window is None:
            return 0
        return max(0, end - window + 1) // self.p.block_size * self.p.block_size

    # ---- loads

    def wave(self, damaged: bool) -> None:
        """Some concurrent loads, all damaged or all clean."""
        requests = []
        for _ in range(int(self.random.integers(1, 6))):
            self.number += 1
            req_id = f"r{self.number}"
            kind = self._draw_kind() if damaged else CLEAN
            self.plans[req_id] = _Plan(kind)
            requests.append(self._start(req_id))
        for _ in range(200):
            self.p.step()
            self.d.step(self.p)
            for request in requests:
                self._look_at(request)
            if all(r.is_finished() for r in requests):
                break
        for request in requests:
            self._note(request)

    def _draw_kind(self) -> str:
        kinds = [*TOKEN_KINDS, *PAYLOAD_KINDS]
        if self.mode != "recompute":
            # KV that is wrong for good would spoil the look at recomputed answers.
            kinds += [WRONG_BEFORE, LATE]
        if not self.only_tokens:
            kinds += STATE_KINDS
        return str(kinds[self.random.integers(len(kinds))])

    def _look_at(self, request: Any) -> None:
        """Between two steps of D."""
        req_id = request.request_id
        plan, verdict = self.plans[req_id], self.verdicts.get(req_id)
        if verdict is None or request.is_finished():
            return
        if plan.kind == LATE and not plan.changed and plan.block_ids:
            group = self.target.workers[-1][-1]
            group.covered[0][plan.block_ids[-1][-1]] ^= 1
            plan.changed = True
        recomputed = self.mode == "recompute" and verdict.outcome != "verified"
        if recomputed and request.num_output_tokens == 1 and self.only_tokens:
            plan.answer_is_right = self.d.answer_kv_is_right(request)

    def _start(self, req_id: str) -> Any:
        prompt = rig.tokens(
            int(self.random.integers(1, 200)), int(self.random.integers(2**32))
        )
        if self.prompts and self.random.random() < 0.4:
            earlier = self.prompts[self.random.integers(len(self.prompts))]
            prompt = earlier[: self.random.integers(1, 1 + len(earlier))] + prompt
        self.prompts.append(prompt[:300])
        self.sending = req_id
        if self.plans[req_id].kind == WRONG_BEFORE:
            self._spoil_next_write(self.plans[req_id])
        params = rig.prefill(self.p, f"p-{req_id}", prompt[:300])
        return self.d.add(req_id, prompt[:300], params, max_tokens=2)

    def _spoil_next_write(self, plan: _Plan) -> None:
        """P's forward writes one wrong token."""
        write = self.p.write

        def spoiled(request: Any, first: int, last: int) -> None:
            del self.p.write
            write(request, first, last)
            if not self.p.layers:
                plan.kind = CLEAN
                return
            block = self.p.scheduler.kv_cache_manager.get_block_ids(request.request_id)[
                0
            ][(last - 1) // self.p.block_size]
            self.p.kv[0][block] += 1
            plan.changed = True

        self.p.write = spoiled

    def _note(self, request: Any) -> None:
        req_id = request.request_id
        plan, verdict = self.plans.pop(req_id), self.verdicts.pop(req_id, None)
        if plan.block_ids is None and request.is_finished():
            return  # all of it was in D's prefix cache
        outcome = verdict.outcome if verdict is not None else "none"
        if not request.is_finished():
            outcome = "never ended"
        elif not self._ended_right(req_id, outcome):
            outcome = f"{outcome}, answered as {self.d.results[req_id][-1]}"
        elif not plan.answer_is_right:
            outcome = f"{outcome}, recomputed wrong"
        row = self.tally.row(DEPTH, plan.kind, _EXPECTED.get(plan.kind, ("mismatch",)))
        row.count(outcome, plan.changed)
        if outcome not in row.right(plan.changed):
            self.tally.example(f"{plan.kind}: {outcome}, {req_id} ({self.where})")

    def _ended_right(self, req_id: str, outcome: str) -> bool:
        """Whether the request ended as the mode says of this verdict."""
        fails = self.mode == "fail" and outcome != "verified"
        expected = FinishReason.ERROR if fails else FinishReason.LENGTH
        return self.d.results[req_id][-1].finish_reason == expected

    def check_left_overs(self) -> None:
        """Nothing of any request is left in any table."""
        for _ in range(5):
            self.p.step()
            self.d.step(self.p)
        for name, side in (("P", self.p), ("D", self.d)):
            left = {k: v for k, v in side.tables().items() if v}
            row = self.tally.row(DEPTH, "tables empty afterwards", ("verified",))
            row.count("left over" if left else "verified", False)
            if left:
                self.tally.example(f"{name} keeps {left} ({self.where})")


def _same_beginning(
    ours: KVChecksumPayload, other: KVChecksumPayload, large: int
) -> bool:
    """Whether they agree on every whole chunk of `large` tokens that both hold."""
    whole = min(ours.num_tokens, other.num_tokens) // large * large
    for group_id, mine in ours.groups.items():
        theirs = other.groups[group_id]
        first = max(mine.start, theirs.start)
        last = whole // mine.block_size
        if mine.block_size == 1 or ours.num_tokens == other.num_tokens:
            last = mine.start + len(mine.values)  # a state, or to the last token
        if not np.array_equal(
            mine.values[first - mine.start : last - mine.start],
            theirs.values[first - theirs.start : last - theirs.start],
        ):
            return False
    return True


def run_batch(seed: int, number: int) -> Tally:
    """One drawn pair of instances and its loads."""
    with conv_layout("DS"):  # the only one that NIXL transfers
        pair = Pair(seed, number)
        for wave in range(WAVES):
            pair.wave(damaged=wave % 2 > 0)
        pair.check_left_overs()
    return pair.tally


# ---- instances


@cache
def _model() -> str:
    return rig.write_model(Path(tempfile.mkdtemp(prefix="kv-checksum-campaign-")))


def _draw_instances(random: Generator, mode: str) -> tuple[Any, Any]:
    family = str(random.choice(["GQA", "window", "MLA", "states", "states alone"]))
    transport = str(random.choice(["pull", "push", "mooncake"]))
    sizes = [(16, 16), (16, 32), (32, 16)][random.integers(3)]
    both: dict[str, Any] = dict(transport=transport, num_blocks=300)
    make: Any = rig.Instance
    if family == "window":
        both["window"] = int(random.integers(20, 200))
    elif family == "MLA":
        make = Mla
    elif family != "GQA":
        make, sizes = hybrid.Hybrid, (16, 16)
        both |= dict(
            mode=str(random.choice(["none", "align"])),
            scratch=int(random.integers(0, 3)),
            family=str(random.choice(list(hybrid.FAMILIES))),
            tokens=family == "states",
        )

    def draw(role: str, block_size: int, **settings: Any) -> Any:
        return make(
            _model(),
            role,
            tp=int(2 ** random.integers(3)),
            pp=int(random.integers(1, 3)),
            block_size=block_size,
            **both,
            **settings,
        )

    ahead = bool(random.random() < 0.3)
    return (
        draw("kv_producer", sizes[0]),
        draw("kv_consumer", sizes[1], async_scheduling=ahead, **_MODES[mode]),
    )


def _describe(instance: Any) -> str:
    """The KV cache groups of an instance."""
    groups = [type(spec).__name__ for spec in instance.specs]
    if isinstance(instance, hybrid.Hybrid):
        groups = groups if instance.tokens else []
        groups.append(f"MambaSpec ({instance.family_name}, {instance.mode})")
    return " + ".join(groups)


def _target(d: Any) -> Target:
    """D's caches, per KV cache group and worker."""
    groups = d.kv_config.kv_cache_groups
    target = Target([[] for _ in groups], [[] for _ in groups])
    for stage in range(d.pp):
        for rank in range(d.tp):
            caches = d.caches_of(stage, rank)
            for group, workers in zip(groups, target.workers, strict=True):
                own = [caches[n] for n in group.layer_names if n in caches]
                layers = [LayerCache(c, d.num_blocks) for c in own]
                workers.append(Worker(layers, [x.blocks.numpy() for x in layers], rank))
    # Block ids of a load long gone: what stale bytes come from.
    target.others = [[d.num_blocks - 1, d.num_blocks - 2] for _ in groups]
    return target
