# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Depth *tiers*: loads that bring no checksums, judged by the ledger.

One instance with a real scheduler and real checksum workers computes prompts, gives
them up and loads them again from a tier (`kv_checksum.rig.tier`), in the step that uses
them or between steps. The same prefix may be computed again with other bits, requests
are preempted and aborted, and the tier drops what it likes. What was stored is the
truth: a load is damaged if the bytes of any loaded block are not those under its key.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import torch
from kv_checksum.rig import instances as rig
from kv_checksum.rig import tier

from vllm.distributed.kv_transfer.kv_checksum.verdict import Unverified
from vllm.v1.request import RequestStatus

from .instances import model_folder
from .sides import keep_verdicts
from .tally import CHECK, CLEAN, Tally

DEPTH = "tiers"

WAVES = 24
"""Sets of concurrent requests in a batch; every other one is damaged."""

VARIANTS = 4
"""Bit patterns that the forward gives one KV; the ledger keeps as many sums."""

ONE_VERDICT = CHECK + "every load has one verdict"
NOT_SERVED = CHECK + "fail-closed, no token rests on bad KV"
SETS = CHECK + "what is summed is what is loaded"
CHECKS = (ONE_VERDICT, NOT_SERVED, SETS)

LESS_KNOWN = "clean, where not all is known"
"""Loads in a ledger that is smaller than the tier, or that end inside a block."""

LESS_KNOWN_DAMAGED = "damaged, where not all is known"


DROPPED = "not known, as a bad load came before"
"""Sums that may have rested on a bad load are not entered, also where they did not."""


class Computing(tier.TierInstance):
    """Its forward gives KV other bits whenever `variant` changes."""

    variant = 0

    def cells(self, layer: int, at: torch.Tensor, ids: torch.Tensor) -> Any:
        return super().cells(layer, at + 7919 * self.variant, ids)

    def right_cells(self, layer: int, at: torch.Tensor, ids: torch.Tensor) -> Any:
        """Yield every bit pattern of some tokens."""
        for variant in range(VARIANTS):
            yield super().cells(layer, at + 7919 * variant, ids)


# ---- damage


def _pick(batch: Batch, load: tier.Load) -> tuple[int, int]:
    """A group that loads blocks, and the index of one of them."""
    groups = [g for g, blocks in load.blocks.items() if blocks]
    group = int(batch.random.choice(groups))
    return group, int(batch.random.integers(len(load.blocks[group])))


def bit_flip(batch: Batch, load: tier.Load) -> None:
    group, at = _pick(batch, load)
    layer = int(batch.random.choice(list(batch.d.layers[group])))
    block = batch.d.kv[layer][load.blocks[group][at][2]].view(torch.uint8)
    cell = tuple(int(batch.random.integers(n)) for n in block.shape)
    block[cell] ^= 1 << int(batch.random.integers(8))


def stale_block(batch: Batch, load: tier.Load) -> None:
    """The block was not written: it holds what its last owner left."""
    group, at = _pick(batch, load)
    block = load.blocks[group][at][2]
    other = int(batch.random.integers(1, batch.d.num_blocks))
    for n in batch.d.layers[group]:
        batch.d.kv[n][block] = batch.d.kv[n][other]


def other_prefix(batch: Batch, load: tier.Load) -> None:
    """A block of another prefix at the same position."""
    group, at = _pick(batch, load)
    key, position, block = load.blocks[group][at]
    others = [
        k
        for k in batch.positions.get((group, position), ())
        if k != key and (group, k) in batch.d.tier.stored
    ]
    if others:
        chosen = others[int(batch.random.integers(len(others)))]
        for n, kv in batch.d.tier.stored[group, chosen].items():
            batch.d.kv[n][block] = kv


def swapped_chunks(batch: Batch, load: tier.Load) -> None:
    """Two chunks of one to four blocks change places."""
    group, _ = _pick(batch, load)
    ids = [i for _, _, i in load.blocks[group]]
    size = int(batch.random.integers(1, 5))
    if len(ids) < 2 * size:
        return
    first = int(batch.random.integers(len(ids) - 2 * size + 1))
    second = int(batch.random.integers(first + size, len(ids) - size + 1))
    a, b = ids[first : first + size], ids[second : second + size]
    for n in batch.d.layers[group]:
        batch.d.kv[n][a + b] = batch.d.kv[n][b + a]


def half_written(batch: Batch, load: tier.Load) -> None:
    """The copy ended inside a block: the layers, or the tokens, behind are old."""
    group, at = _pick(batch, load)
    block = load.blocks[group][at][2]
    layers = list(batch.d.layers[group])
    if batch.random.random() < 0.5:
        for n in layers[int(batch.random.integers(1, len(layers))) :]:
            batch.d.kv[n][block] = batch.d.kv[n][(block + 1) % batch.d.num_blocks]
    else:
        token = int(batch.random.integers(1, batch.d.block_size))
        for n in layers:
            batch.d.kv[n][block, :, token:] = 0


def other_group(batch: Batch, load: tier.Load) -> None:
    """Another group's block of the same position and prefix, or other layers' KV."""
    group, at = _pick(batch, load)
    block, layers = load.blocks[group][at][2], list(batch.d.layers[group])
    other = (group + 1) % len(batch.d.layers)
    theirs = load.blocks.get(other) or load.blocks[group]
    source = theirs[min(at, len(theirs) - 1)][2]
    shift = 1 if other == group else 0
    numbers = list(batch.d.layers[other])
    copies = [
        batch.d.kv[numbers[(i + shift) % len(numbers)]][source].clone()
        for i in range(len(layers))
    ]
    for n, copy in zip(layers, copies, strict=True):
        batch.d.kv[n][block] = copy


KINDS = {
    f.__name__: f
    for f in (
        bit_flip,
        stale_block,
        other_prefix,
        swapped_chunks,
        half_written,
        other_group,
    )
}


class Batch:
    """One drawn instance, and what is done to its loads."""

    def __init__(self, seed: int, number: int) -> None:
        self.random = np.random.default_rng([seed, number, 13])
        self.where = f"--depth tiers --seed {seed} --batch {number}"
        draw = self.random
        self.mode = str(draw.choice(list(rig.MODES)))
        # An entry that went by its age says nothing of other bits.
        self.small = bool(draw.random() < 0.15)
        # Blocks that are loaded in part are completed here, and not known.
        self.partial = bool(draw.random() < 0.15)
        how = str(draw.choice(["sync", "async", "spans steps"]))
        sizes = [dict(), dict(), dict(tp=2), dict(pp=2), dict(tp=2, pp=2)]
        ranks = sizes[int(draw.integers(len(sizes)))]
        window = int(draw.choice([0, 0, 40, 70]))
        settings = dict(
            num_blocks=int(draw.choice([40, 60, 120])) * (2 if window else 1),
            window=window or None,
            async_scheduling=bool(draw.random() < 0.5),
            kv_checksum_ledger_blocks=60 if self.small else 4096,
            leave=17 if self.partial else 1,
            whole=not self.partial,
            limits=bool(draw.random() < 0.5),
            sync=how == "sync",
            delay=int(draw.integers(1, 4)) if how == "spans steps" else 0,
        )
        self.d = Computing(model_folder(), **ranks, **settings, **rig.MODES[self.mode])
        self.tally = Tally()
        self.tally.draw(
            DEPTH,
            loads=how,
            on_failure=self.mode,
            TP=self.d.tp,
            PP=self.d.pp,
            groups=len(self.d.layers),
            async_scheduling=settings["async_scheduling"],
            blocks=self.d.num_blocks,
            small_ledger=self.small,
            loads_parts_of_blocks=self.partial,
        )
        self.verdicts = keep_verdicts(self.d.scheduler.kv_checksum)
        self.d.spoil = self.spoil
        self.kind = CLEAN
        self.loads: dict[str, tuple[str, bool]] = {}
        self.told = 0
        self.met_bad = False
        self.positions: dict[tuple[int, int], list[bytes]] = {}
        self.prompts: list[list[int]] = []
        self.fresh: list[list[int]] = []
        self.number = 0
        self.served = self._watch_served()
        self._watch_loads()

    # ---- hooks

    def _watch_loads(self) -> None:
        """Know which request a load is of when its blocks arrive."""
        load = self.d.load
        schedule = self.d.schedule

        def known(one: tier.Load) -> None:
            self.loading = next(r for r, x in self.by_request.items() if x is one)
            load(one)

        def scheduled() -> Any:
            output = schedule()
            loads = output.kv_connector_metadata.loads
            self.told += len(loads)
            self.by_request.update(loads)
            row = self.tally.row(DEPTH, SETS, ("verified",))
            for _ in loads:
                row.count("verified", False)
            return output

        self.by_request: dict[str, tier.Load] = {}
        self.d.load, self.d.schedule = known, scheduled

    def _watch_served(self) -> set[str]:
        """Note requests that get a token while their prompt's KV is not right."""
        served: set[str] = set()
        finish_step = self.d.finish_step

        def finish(output: Any, model_output: Any) -> Any:
            here = output.num_scheduled_tokens.keys() & self.d.scheduler.requests.keys()
            running = [self.d.scheduler.requests[r] for r in here]
            wrong = {
                r.request_id
                for r in running
                if r.status == RequestStatus.RUNNING
                and r.num_computed_tokens >= r.num_prompt_tokens
                and not r.num_output_tokens
                and not self.d.answer_kv_is_right(r)
            }
            results = finish_step(output, model_output)
            for client in results.values():
                got = {o.request_id for o in client.outputs if o.new_token_ids}
                served.update(wrong & got)
            return results

        self.d.finish_step = finish
        return served

    def spoil(self, d: Any, load: tier.Load) -> None:
        """A load has arrived: damage it, and look what that changed."""
        for group, blocks in load.blocks.items():
            for key, position, _ in blocks:
                known = self.positions.setdefault((group, position), [])
                if key not in known:
                    known.append(key)
        if self.kind != CLEAN:
            KINDS[self.kind](self, load)
        changed = False
        for group, blocks in load.blocks.items():
            for key, position, block in blocks:
                held = slice(0, load.num_tokens - position * d.block_size)
                for n, kv in d.tier.stored[group, key].items():
                    found = d.kv[n][block, :, held].view(torch.uint8)
                    changed |= not torch.equal(found, kv[:, held].view(torch.uint8))
        self.loads[self.loading] = (self.kind, changed)

    # ---- requests

    def wave(self, kind: str) -> None:
        """Some concurrent requests, whose loads are all damaged or all clean."""
        self.kind = kind
        if not self.small:
            self.d.variant = int(self.random.integers(VARIANTS))
        if self.random.random() < 0.3:
            stored = list(self.d.tier.stored)
            for key in self.random.permutation(len(stored))[: len(stored) // 4]:
                del self.d.tier.stored[stored[key]]
        self._evict(float(self.random.choice([0.3, 1.0, 1.0, 1.0])))
        requests = []
        for prompt in self._draw_prompts():
            self.number += 1
            request = self.d.add(
                f"r{self.number}",
                prompt,
                None,
                int(self.random.choice([1, 1, 1, 2, 2, 3, 4, 20])),
            )
            requests.append(request)
            for _ in range(int(self.random.integers(3))):
                self.d.step()
        aborted = requests[0] if self.random.random() < 0.15 else None
        for step in range(600):
            self.d.step()
            if aborted is not None and step == 1 and not aborted.is_finished():
                self.d.scheduler.finish_requests(
                    aborted.request_id, RequestStatus.FINISHED_ABORTED
                )
            if all(r.is_finished() for r in requests) and not self.d.transport.running:
                break
        else:
            self.tally.example(f"{requests} never end ({self.where})")
            self.tally.row(DEPTH, CLEAN, ("verified",)).count("never ended", False)
        self._note()

    def _evict(self, share: float) -> None:
        """Take a share of the blocks out of the local prefix cache."""
        pool = self.d.scheduler.kv_cache_manager.block_pool
        cached = [b.block_id for b in pool.blocks if b.block_hash is not None]
        drawn = self.random.random(len(cached)) < share
        pool.evict_blocks({i for i, hit in zip(cached, drawn, strict=True) if hit})

    def _draw_prompts(self) -> list[list[int]]:
        """Prompts that begin as those of the last wave do, older ones, and new ones."""
        again = [
            p[: int(self.random.integers(len(p) // 2, 1 + len(p)))] for p in self.fresh
        ]
        if self.prompts:
            again.append(self.prompts[int(self.random.integers(len(self.prompts)))])
        again = [
            p + rig.tokens(int(self.random.integers(1, 40)), self.number) for p in again
        ]
        self.fresh = [
            rig.tokens(
                int(self.random.integers(20, 300)), int(self.random.integers(2**32))
            )
            for _ in range(int(self.random.integers(2, 6)))
        ]
        self.prompts += self.fresh
        return [p[:400] for p in (*again, *self.fresh)]

    def _note(self) -> None:
        for req_id, (kind, changed) in self.loads.items():
            verdict = self.verdicts.pop(req_id, None)
            if verdict is None:
                continue  # aborted; the counters tell
            expected: tuple[str, ...] = ("mismatch",)
            if self.small or self.partial:
                kind = LESS_KNOWN_DAMAGED if changed else LESS_KNOWN
                expected = ("mismatch" if changed else "verified", "unverified")
            elif kind == CLEAN:
                expected = ("verified",)
            unknown = verdict.reason is Unverified.NOT_IN_LEDGER
            if unknown and self.met_bad and verdict.outcome == "unverified":
                kind, expected = DROPPED, ("unverified",)
            self.met_bad |= verdict.mismatched
            row = self.tally.row(DEPTH, kind, expected)
            row.count(verdict.outcome, changed)
            if verdict.outcome not in row.right(changed):
                self.tally.example(f"{req_id}: {kind} {verdict} ({self.where})")
        self.loads.clear()

    def check_end(self) -> None:
        for _ in range(8):
            self.d.step()
        row = self.tally.row(DEPTH, ONE_VERDICT, ("verified",))
        stats = Counter(self.d.stats) + self.d.scheduler.kv_checksum._stats
        judged = sum(n for key, n in stats.items() if key.startswith("loads:"))
        ended = judged + stats["loads_failed"] + stats["loads_aborted"]
        right = stats["loads_started"] == ended == self.told
        row.count("verified" if right else "not", False)
        if not right:
            self.tally.example(f"{self.told} loads, {dict(stats)} ({self.where})")
        if self.mode != "open":
            row = self.tally.row(DEPTH, NOT_SERVED, ("verified",))
            row.count("served" if self.served else "verified", False)
            if self.served:
                self.tally.example(f"served {self.served} ({self.where})")


def run_batch(seed: int, number: int) -> Tally:
    """One drawn instance and its loads."""
    batch = Batch(seed, number)
    kinds = list(KINDS)
    for wave in range(WAVES):
        damaged = wave > 1 and wave % 2
        kind = str(batch.random.choice(kinds)) if damaged else CLEAN
        batch.wave(kind)
    batch.check_end()
    return batch.tally
