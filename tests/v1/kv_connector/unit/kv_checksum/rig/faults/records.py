# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draw faults of the machinery from a seed, and apply them to workers' records."""

import pickle
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumOutput,
    KVChecksumRecord,
)

KINDS = (
    "preempt",
    "stale",
    "drop",
    "duplicate",
    "garble",
    "late",
    "worker",
    "restart",
    "payload",
    "abort",
    "load",
)
"""Kinds of faults. In every run the KV of some loads is damaged besides."""

_OLD_RECORDS = 64


@dataclass
class Faults:
    """Draws faults of the `active` kinds until `calm`; `counts` what took effect."""

    rng: random.Random
    active: frozenset[str]
    counts: Counter[str]
    calm: bool = False

    def draw(self, kind: str, chance: float) -> bool:
        """Return whether a fault happens here; the more kinds are active, the rarer."""
        if self.calm or kind not in self.active:
            return False
        return self.rng.random() < chance / len(self.active) ** 0.5

    def draw_any(self, **chances: float) -> bool:
        """Draw as `draw` does, for what several kinds bring about."""
        return any([self.draw(kind, chance) for kind, chance in chances.items()])


@dataclass
class Load:
    """The truth about one load, whatever the checksums say.

    Attributes:
        damaged: its KV is not what was sent, or stored; `bad` says where: layer,
            block and the bytes of the block's first token.
        payload: whose checksums it is compared with: "own", those of an "other"
            request, or of an "old" one of the same id.
        sent: the payload that went out for it.
        excuses: why it may be unverified.
        unheard: a worker's sums of it never came, or are of something else.
        failed: on which ranks its connector reports a failure, or that it names
            blocks that were not loaded.
        unchecked: its connector brings no checksums, or it is used in the step that
            loads it.
        verdict: what the scheduler judged.
        end: "judged", "failed" or "aborted", once it has ended.

    """

    damaged: bool = False
    bad: tuple | None = None
    payload: str = "own"
    sent: bytes | None = None
    excuses: set[str] = field(default_factory=set)
    unheard: bool = False
    failed: set[int] = field(default_factory=set)
    invalid_blocks: bool = False
    arrived: bool = False
    unchecked: bool = False
    verdict: str | None = None
    end: str | None = None

    def allowed(self) -> set[str]:
        """Return the verdicts that are right."""
        if self.unchecked:
            return {"unverified"}
        if self.payload == "own":
            allowed = {"mismatch" if self.damaged else "verified"}
            may_be_unverified = bool(self.excuses)
        else:
            # Another's payload may have no block in common with what was loaded; an
            # old one may be of the same KV.
            allowed = {"mismatch"}
            may_be_unverified = True
            if self.payload == "old" and not self.damaged:
                allowed.add("verified")
        if may_be_unverified:
            allowed.add("unverified")
        return allowed - {"verified"} if self.unheard else allowed


def copy(record: KVChecksumRecord) -> KVChecksumRecord:
    """Return a record as it arrives in another process."""
    return pickle.loads(pickle.dumps(record))


class Misreports:
    """The faults of the workers' records on their way to the scheduler.

    Args:
        excuse: told the request ids of which something is lost, and why.
        pending: what the scheduler awaits: request ids with the number of the send
            or load.
        repeated: told an old record before it comes once more.

    """

    def __init__(
        self,
        faults: Faults,
        excuse: Callable[[Iterable[str], str], None],
        pending: Callable[[], dict[str, int]],
        repeated: Callable[[KVChecksumRecord], None],
    ) -> None:
        self.faults, self.rng = faults, faults.rng
        self.excuse, self.pending, self.repeated = excuse, pending, repeated
        self.old: list[KVChecksumRecord] = []
        self._held: list[tuple[int, int, KVChecksumRecord]] = []
        self._step = 0

    def apply(self, reports: list) -> None:
        """Change one step's reports, each a `KVConnectorOutput` of one worker."""
        self._step += 1
        found = [r.kv_checksums.finalize() if r.kv_checksums else [] for r in reports]
        records = [[copy(record) for record in mine] for mine in found]
        self.old += [copy(record) for mine in records for record in mine]
        del self.old[:-_OLD_RECORDS]
        self._drop(records)
        self._hold(records)
        for record in (record for mine in records for record in mine):
            if self.faults.draw("garble", 0.4):
                self._garble(record)
        self._repeat(records)
        self._deliver_held(records)
        for report, mine in zip(reports, records, strict=True):
            report.kv_checksums = KVChecksumOutput(mine) if mine else None

    def _scope(self, records: list[list[KVChecksumRecord]]) -> tuple[str, set[int]]:
        """Return some of the workers that report something, and a word for them."""
        ranks = [i for i, mine in enumerate(records) if mine]
        one = self.rng.choice(ranks)
        stage = {i for i in ranks if records[i][0].pp_rank == records[one][0].pp_rank}
        name = self.rng.choice(["one rank", "one PP stage", "all"])
        return name, {"one rank": {one}, "one PP stage": stage, "all": {*ranks}}[name]

    def _drop(self, records: list[list[KVChecksumRecord]]) -> None:
        if any(records) and self.faults.draw("drop", 0.3):
            name, ranks = self._scope(records)
            self.faults.counts[f"drop: {name}"] += 1
            for rank in ranks:
                for record in records[rank]:
                    self.excuse(record.checksums, "drop")
                    self.excuse(record.received, "payload")
                records[rank] = []

    def _hold(self, records: list[list[KVChecksumRecord]]) -> None:
        if any(records) and self.faults.draw("late", 0.3):
            name, ranks = self._scope(records)
            self.faults.counts[f"late: {name}"] += 1
            at = self._step + self.rng.randint(1, 3)
            for rank in ranks:
                for record in records[rank]:
                    self.excuse(_request_ids(record), "late")
                    self._held.append((at, rank, record))
                records[rank] = []

    def _deliver_held(self, records: list[list[KVChecksumRecord]]) -> None:
        due = [held for held in self._held if held[0] <= self._step]
        self._held = [held for held in self._held if held[0] > self._step]
        for _, rank, record in due:
            awaited = self.pending().keys() & _request_ids(record)
            when = "still awaited" if awaited else "after the verdict"
            self.faults.counts[f"late: {when}"] += 1
            records[rank].append(record)

    def _repeat(self, records: list[list[KVChecksumRecord]]) -> None:
        for mine in records:
            if mine and self.faults.draw("duplicate", 0.5):
                self.faults.counts["duplicate: in one step"] += 1
                mine.append(copy(self.rng.choice(mine)))
            if self.old and self.faults.draw_any(duplicate=0.5, restart=0.2):
                record = copy(self._old_record())
                pending = self.pending()
                awaited = pending.keys() & record.checksums.keys()
                when = "after the verdict"
                if any(record.seqs.get(r, 0) != pending[r] for r in awaited):
                    when = "while its id is loaded or sent again"
                elif awaited:
                    when = "while awaited"
                self.faults.counts[f"duplicate: {when}"] += 1
                self.repeated(record)
                mine.insert(self.rng.randint(0, len(mine)), record)

    def _old_record(self) -> KVChecksumRecord:
        """Return a record, rather of an earlier send or load of an awaited id."""
        pending = self.pending()
        named = [r for r in self.old if pending.keys() & _request_ids(r)]
        other = [
            r
            for r in named
            if r.received or any(pending.get(i, n) != n for i, n in r.seqs.items())
        ]
        return self.rng.choice(other or named or self.old)

    def _garble(self, record: KVChecksumRecord) -> None:
        """Let one request's sums be of something else, and say so, or be incomplete."""
        if not record.checksums:
            return
        req_id = self.rng.choice(sorted(record.checksums))
        groups = record.checksums[req_id]
        kinds = list(_GARBLED if groups else ["request"])
        how = self.rng.choice(kinds + ["entries"] * (req_id in record.stored))
        self.excuse([req_id], "garble")
        self.faults.counts[f"garble: {how}"] += 1
        if how in ("number", "tokens"):
            for part in groups.values():
                part.values[-1] += np.uint64(1)
        if how == "number":
            record.seqs[req_id] += self.rng.choice([-1, 1, 1000])
        elif how == "tokens":
            record.num_tokens[req_id] += 1
        elif how == "request":
            del record.checksums[req_id]
        elif how == "entries":
            del record.stored[req_id]
        elif how == "group":
            del groups[self.rng.choice(sorted(groups))]
        elif how == "layers":
            group_id = self.rng.choice(sorted(groups))
            del record.fingerprints[group_id]
            # All requests of the record share its layers.
            sharing = [r for r, g in record.checksums.items() if group_id in g]
            self.excuse(sharing, "garble")
        else:
            part = groups[self.rng.choice(sorted(groups))]
            part.start += 1
            part.values = part.values[self.rng.randint(0, 1) :] ^ np.uint64(1)


_GARBLED = ("blocks", "group", "layers", "number", "request", "tokens")


def _request_ids(record: KVChecksumRecord) -> set[str]:
    return {*record.checksums, *record.received}
