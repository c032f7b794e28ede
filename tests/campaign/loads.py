# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run depth *loads*: whole requests through the real schedulers of P and D.

Instances as the unit tests have them (`kv_checksum.rig.instances`): real schedulers,
connectors' scheduler sides, checksum workers, payloads and verdicts; the forward and
the transfer are faked.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from kv_checksum.rig import instances as rig
from kv_checksum.rig import loaded, reference

from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.fault_drill.damage import (
    PAYLOAD_KINDS,
    NotApplicable,
    damage_payload,
)
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumPayload
from vllm.v1.engine import FinishReason

from .drawing import where
from .instances import (
    describe,
    draw_instances,
    evict_some,
    first_token_kept,
    holds_of,
    prompt_kv_is_right,
    target_of,
)
from .models import compared_size, conv_layout
from .sides import keep_verdicts
from .strike import KINDS_OF as ALL_KINDS_OF
from .strike import OPEN, PADDING, UNUSED, Chunk, content, strike
from .tally import CHECK, CLEAN, Tally

DEPTH = "loads"

KINDS_OF = {
    holds: tuple(kind for kind in kinds if kind != PADDING)
    for holds, kinds in ALL_KINDS_OF.items()
}
"""The pages of these instances have no padding."""

WAVES = 16
"""Sets of concurrent loads in a batch, half of them clean."""

WRONG_BEFORE = "limit: KV already wrong when its producer summed it"
LATE = "limit: a late writer, after the verdict"
WINDOW_START = "limit: first block of a window, of which P sent a part"
SAME_BEGINNING = "limit: payload of a prompt that begins this one, or the reverse"
UNALIGNED = "unverified: D's first block begins inside a unit of P"

SETS = CHECK + "what is summed is what is loaded"
ONE_VERDICT = CHECK + "every load has one verdict"
WHOLE_PROMPT = CHECK + "a verified load's whole prompt KV is right"
EMPTY = CHECK + "tables empty afterwards"
CHECKS = (SETS, ONE_VERDICT, WHOLE_PROMPT, EMPTY)

_EXPECTED = {
    **dict.fromkeys((UNUSED, OPEN, WRONG_BEFORE, LATE, WINDOW_START), ("verified",)),
    CLEAN: ("verified",),
    **dict.fromkeys(CHECKS, ("verified",)),
    **dict.fromkeys(PAYLOAD_KINDS, ("unverified",)),
    UNALIGNED: ("unverified",),
    "other_request_payload": ("mismatch",),
    SAME_BEGINNING: ("verified", "unverified"),
}

_MODES = {
    "open": {},
    "fail": dict(kv_checksum_fail_closed=True, policy="fail"),
    "recompute": dict(kv_checksum_fail_closed=True, policy="recompute"),
}


@dataclass
class _Plan:
    """The damage done to one load, and what came of it.

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
    """P and D of one drawn configuration, and the damage done to their loads."""

    def __init__(self, seed: int, number: int, only: str) -> None:
        self.random = np.random.default_rng([seed, number])
        self.where = where(DEPTH, seed, number, only)
        self.mode = str(self.random.choice(list(_MODES)))
        self.p, self.d = draw_instances(self.random, _MODES[self.mode], only)
        # KV that is wrong for good and not seen would spoil the look at later
        # answers, which may rest on it: in other batches there is none.
        self.spoils = self.mode != "recompute" and self.random.random() < 0.4
        self.tally = Tally()
        self.tally.draw(
            DEPTH,
            groups=describe(self.d),
            carrier=self.d.transport.connector,
            on_failure=self.mode,
            TP=f"{self.p.tp}/{self.d.tp}",
            PP=f"{self.p.pp}/{self.d.pp}",
            block_size=f"{self.p.block_size}/{self.d.block_size}",
            async_scheduling=bool(self.d.steps_ahead),
            blocks_of_D=self.d.num_blocks,
        )
        self.verdicts = keep_verdicts(self.d.scheduler.kv_checksum)
        self.plans: dict[str, _Plan] = {}
        self.payloads: list[bytes] = []
        self.told: list[str] = []
        # How often prompts share a prefix, and blocks of prefixes are given up.
        lags = self.random.random() < 0.5 and len(self.d.layers) > 1
        self.sharing = 0.9 if lags else 0.4
        self.target = target_of(self.d)
        self.only_tokens = len(self.target.workers) == len(self.d.layers)
        # With states, NIXL takes a token from a request of both flags, which is
        # another one then; preempted, such a request waits forever.
        self.both_flags = (
            self.p.transport.connector == "NixlConnector"
            and self.only_tokens
            and self.d.num_blocks == 300
        )
        self.p.alter = self.alter
        self.d.loaded = self.loaded
        self.d.schedule = self.schedule
        self.prompts: list[list[int]] = []
        self.number = 0
        self.sending = ""

    # ---- hooks

    def alter(self, payload: bytes) -> bytes | None:
        """Change a payload on its way."""
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
        if (
            plan.changed
            and plan.kind == "other_request_payload"
            and _begin_alike(wire.decode(damaged), self.prompts[-1])
        ):
            plan.kind = SAME_BEGINNING
        return damaged

    def schedule(self) -> Any:
        """Schedule a step of D; it must sum what its connector is told to load."""
        output = self.d.scheduler.schedule()
        config, metadata = self.d.kv_config, output.kv_connector_metadata
        wrong = loaded.differences(output, config) + loaded.unsummed(output, config)
        row = self.tally.row(DEPTH, SETS, _EXPECTED[SETS])
        for req_id in loaded.loads_of(metadata, config).by_request:
            self.told.append(req_id)
            row.count("verified", False)
        for line in wrong:
            row.count("differ", False)
            self.tally.example(f"summed is not loaded: {line} ({self.where})")
        return output

    def loaded(self, req_id: str, block_ids: list[list[int]]) -> None:
        """Damage a load that arrived on D and is not summed yet."""
        plan = self.plans[req_id]
        plan.block_ids = block_ids
        chunks = self._chunks(req_id, block_ids)
        first = [c.start for c in chunks if not c.group][:1] or [1 << 30]
        lag = any(c.group and c.block_size > 1 and c.start < first[0] for c in chunks)
        self.tally.draw(DEPTH, loads_in_which_a_group_lags=lag)
        before = [content(self.target, chunk) for chunk in chunks]
        compared = [content(self.target, chunk, compared=True) for chunk in chunks]
        limits = [chunk.kind for chunk in chunks]
        if any(plan.kind in kinds for kinds in KINDS_OF.values()):
            self._damage(plan, chunks)
        after = [content(self.target, chunk) for chunk in chunks]
        for i, (chunk, old) in enumerate(zip(chunks, compared, strict=True)):
            if content(self.target, chunk, compared=True) != old:
                limits[i] = CLEAN
        if plan.kind in (*PAYLOAD_KINDS, SAME_BEGINNING):
            return
        hit = {
            limit
            for limit, old, new in zip(limits, before, after, strict=True)
            if old != new
        }
        if plan.kind not in (WRONG_BEFORE, LATE):
            plan.changed = bool(hit)
        if CLEAN in hit:
            return  # a mismatch, whatever else there is
        if UNALIGNED in limits:
            plan.kind = UNALIGNED
        elif hit:
            plan.kind = WINDOW_START

    def _damage(self, plan: _Plan, chunks: list[Chunk]) -> None:
        """Damage of the plan's kind to some chunk, or of another kind."""
        limits = [chunk.kind for chunk in chunks]
        for _ in range(50):
            at = int(self.random.integers(len(chunks)))
            kinds = KINDS_OF[chunks[at].holds]
            if plan.kind not in kinds:
                plan.kind = kinds[self.random.integers(len(kinds))]
            if limits[at] != CLEAN and not self.spoils:
                continue
            try:
                strike(self.target, chunks, at, plan.kind, self.random)
                return
            except NotApplicable:
                plan.kind = kinds[self.random.integers(len(kinds))]
        plan.kind = CLEAN

    def _chunks(self, req_id: str, block_ids: list[list[int]]) -> list[Chunk]:
        """Return the loaded blocks, as the connector chose them.

        Those that cannot be compared have the reason as their kind.
        """
        end = self.d.scheduler.requests[req_id].num_computed_tokens
        size, p_size = self.d.block_size, self.p.block_size
        chunks = []
        for group, ids in enumerate(block_ids):
            holds = holds_of(self.d, group)
            if holds not in ("tokens", "latents"):
                spec = self.d.kv_config.kv_cache_groups[group].kv_cache_spec
                state = loaded.without_scratch(ids, spec)
                one = Chunk(req_id, group, state, 0, 1, end, holds=holds)
                chunks += [one] if state else []
                continue
            first = -(-end // size) - len(ids)
            sent = 0
            if holds == "tokens":
                sent = first_token_kept(self.p.specs[group], end) // p_size * p_size
            unit = compared_size(p_size, size)
            for at, block in enumerate(ids, first):
                chunk = Chunk(req_id, group, [block], at, size, end, holds=holds)
                if first * size % unit:
                    chunk.kind, chunk.compared = UNALIGNED, (0, 0)
                elif at * size < sent:
                    chunk.kind, chunk.compared = WINDOW_START, (sent, end)
                chunks.append(chunk)
        return chunks

    # ---- loads

    def wave(self, damaged: bool) -> None:
        """Run some concurrent loads, all damaged or all clean."""
        if self.random.random() < self.sharing:
            evict_some(self.d, self.random)
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
            self._release(request)

    def _draw_kind(self) -> str:
        kinds = [*KINDS_OF["tokens"], *PAYLOAD_KINDS]
        if self.spoils:
            kinds += [WRONG_BEFORE, LATE]
        for group in range(len(self.target.workers)):
            holds = holds_of(self.d, group)
            kinds += KINDS_OF[holds] if holds != "tokens" else ()
        return str(kinds[self.random.integers(len(kinds))])

    def _look_at(self, request: Any) -> None:
        """Look at D between two of its steps."""
        req_id = request.request_id
        plan, verdict = self.plans[req_id], self.verdicts.get(req_id)
        if verdict is None or request.is_finished():
            return
        if plan.kind == LATE and not plan.changed and plan.block_ids:
            group = max(g for g, ids in enumerate(plan.block_ids) if ids)
            worker = next(w for w in self.target.workers[group] if w.parts)
            worker.parts[0].covered[plan.block_ids[group][-1]] ^= 1
            plan.changed = True
        if request.num_output_tokens != 1:
            return
        recomputed = self.mode == "recompute" and verdict.outcome != "verified"
        if recomputed and self.only_tokens:
            plan.answer_is_right = prompt_kv_is_right(self.d, request) is not False
        elif verdict.outcome == "verified" and not self.spoils:
            self._check_prompt(request)

    def _check_prompt(self, request: Any) -> None:
        """Check the KV, found or loaded, that a verified load's answer rests on."""
        right = prompt_kv_is_right(self.d, request)
        if right is None:
            return
        row = self.tally.row(DEPTH, WHOLE_PROMPT, _EXPECTED[WHOLE_PROMPT])
        row.count("verified" if right else "wrong", False)
        if not right:
            self.tally.example(f"{request.request_id} on bad KV ({self.where})")

    def _start(self, req_id: str) -> Any:
        prompt = rig.tokens(
            int(self.random.integers(1, 200)), int(self.random.integers(2**32))
        )
        if self.prompts and self.random.random() < self.sharing:
            earlier = self.prompts[self.random.integers(len(self.prompts))]
            prompt = earlier[: self.random.integers(1, 1 + len(earlier))] + prompt
        self.prompts.append(prompt[:300])
        self.sending = req_id
        if self.plans[req_id].kind == WRONG_BEFORE:
            self._spoil_next_write(self.plans[req_id])
        params = rig.prefill(self.p, f"p-{req_id}", prompt[:300])
        if self.both_flags and self.random.random() < 0.2:
            params |= {"do_remote_decode": True}  # as routers do that merge them
        return self.d.add(req_id, prompt[:300], params, max_tokens=2)

    def _spoil_next_write(self, plan: _Plan) -> None:
        """Let P's forward write one wrong token."""
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
            # All of it was in D's prefix cache: P's lease runs out.
            self._end_lease(f"p-{req_id}")
            return
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
        """Return whether the request ended as the mode says of this verdict."""
        fails = self.mode == "fail" and outcome != "verified"
        expected = FinishReason.ERROR if fails else FinishReason.LENGTH
        return self.d.results[req_id][-1].finish_reason == expected

    def _end_lease(self, p_id: str) -> None:
        """Free what P kept of a request that nobody asks for any more."""
        transport = self.p.transport
        if p_id in self.p.scheduler.requests:
            transport.sent.add(p_id)
        getattr(transport, "finished_blocks", {}).pop(p_id, None)
        getattr(transport, "sends", {}).pop(f"xfer-{p_id}", None)

    def _release(self, request: Any) -> None:
        """Free what D would send on, which nobody asks for."""
        if request.is_finished() and request.request_id in self.d.scheduler.requests:
            self.d.transport.sent.add(request.request_id)

    def check_end(self) -> None:
        """Check that every load had a verdict, and that no table holds any request."""
        for _ in range(5):
            self.p.step()
            self.d.step(self.p)
        row = self.tally.row(DEPTH, EMPTY, _EXPECTED[EMPTY])
        for name, side in (("P", self.p), ("D", self.d)):
            left = {k: v for k, v in side.tables().items() if v}
            row.count("left over" if left else "verified", False)
            if left:
                self.tally.example(f"{name} keeps {left} ({self.where})")
        row = self.tally.row(DEPTH, ONE_VERDICT, _EXPECTED[ONE_VERDICT])
        for req_id in self.told:
            row.count("verified" if self.verdicts.fell[req_id] == 1 else "not", False)
        stats = Counter(self.d.stats) + self.d.scheduler.kv_checksum._stats
        judged = sum(n for key, n in stats.items() if key.startswith("loads:"))
        started, fell = stats["loads_started"], self.verdicts.fell
        if {started, judged} != {len(self.told)} or fell.keys() - self.told:
            row.count("not", False)
            self.tally.example(f"{len(self.told)} loads, {dict(stats)} ({self.where})")


def _begin_alike(payload: KVChecksumPayload, prompt: list[int]) -> bool:
    """Tell if a payload's prompt begins the other, or that ends in its last unit."""
    number = payload.num_tokens
    if number <= len(prompt):
        return payload.prompt.whole == reference.prompt_digest(prompt[:number])
    filled = number // 16 * 16
    return filled <= len(prompt) and payload.prompt.beginning == (
        reference.prompt_digest(prompt[:filled])
    )


def run_batch(seed: int, number: int, only: str = "all") -> Tally:
    """Draw a pair of instances, and run its loads."""
    with conv_layout("DS"):  # the only one that NIXL transfers
        pair = Pair(seed, number, only)
        for wave in range(WAVES):
            pair.wave(damaged=wave % 2 > 0)
        pair.check_end()
    return pair.tally
