# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Load and report as workers do, and know of each load what checksums do not tell."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumGroup,
    KVChecksumOutput,
    KVChecksumRecord,
)
from vllm.v1.outputs import KVConnectorOutput

from .site import (
    BLOCK,
    FINGERPRINT,
    WORKERS,
    Choose,
    Setup,
    other,
    payload_bytes,
    right_blocks,
    right_kv,
)


@dataclass
class Load:
    """One load of one request.

    Attributes:
        first, block_ids: what its connector was told to load.
        due: per worker, the steps until it reports; None: it has.
        lost: workers whose sums are lost on the way.
        failure: "", "request" or "blocks".
        payload: what becomes of it.
        end: what it must end as, once that is known.
        arrived: whether its workers were asked to load it.
        told_early: whether its payload came ahead of it.
        outcomes: the verdicts that fell.

    """

    request: Any
    first: int
    block_ids: list[int]
    due: list[int | None] = field(default_factory=lambda: [0] * WORKERS)
    lost: tuple[int, ...] = ()
    failure: str = ""
    damaged: bool = False
    payload: str = "right"
    arrived: bool = False
    told_early: bool = False
    end: str = ""
    outcomes: list[str] = field(default_factory=list)

    @property
    def req_id(self) -> str:
        return self.request.request_id

    def allowed(self, setup: Setup) -> set[str]:
        """Return the verdicts that are right for it."""
        if setup.unchecked or self.payload in ("late", "never"):
            return {"unverified"}
        if self.payload == "other":
            # Another prompt's, whatever the workers say; a worker may have brought it.
            by_worker = self.lost and setup.carrier != "kv_transfer_params"
            return {"mismatch", "unverified"} if by_worker else {"mismatch"}
        if self.lost:
            return {"unverified"}
        if self.damaged:
            return {"mismatch"}
        return {"verified"}


class Worker:
    """One worker: what it is asked, and what it reports."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.recvs: dict[str, Any] = {}

    def record(self, **values) -> KVChecksumRecord:
        return KVChecksumRecord(
            0, self.rank, **{"checksums": {}, **values}, fingerprints={0: FINGERPRINT}
        )

    def sums(self, req_id: str, blocks: Any, memory: dict, **values) -> Any:
        start, ids = blocks.groups[0]
        found = np.array([[memory[int(i)][self.rank]] for i in ids], np.uint64)
        return self.record(
            checksums={req_id: {0: KVChecksumGroup(start, ((1, 0),), found)}},
            num_tokens={req_id: blocks.num_tokens},
            seqs={req_id: blocks.seq},
            **values,
        )


class Workers:
    """Both workers and the KV that they hold.

    Args:
        setup: the instance.
        choose: decides whether sums of a send are lost.

    """

    def __init__(self, setup: Setup, choose: Choose) -> None:
        self.setup, self.choose = setup, choose
        self.each = [Worker(rank) for rank in range(WORKERS)]
        self.loads: list[Load] = []
        self.now: dict[str, Load] = {}
        self.memory: dict[int, list[int]] = {}
        self.bad_from: dict[int, Load] = {}
        self.old: list[KVChecksumRecord] = []
        self.late: list[tuple[int, bytes, str]] = []
        self.lost_sends: set[str] = set()
        self.tick = self.forwards = 0

    def step(
        self, tick: int, now: dict[str, Load], output: Any, forwards: Sequence
    ) -> tuple[list[KVConnectorOutput], list[Load]]:
        """Return a step's reports, and the loads that were brought in it.

        Args:
            now: each request's last load.
            forwards: what the step computes: requests, blocks, tokens.

        """
        self.tick, self.now = tick, now
        invalid: set[int] = set()
        in_step = self.start_loads(output, invalid)
        for forward in forwards:
            self.forwards += 1
            self.compute(*forward)
        return [self.report(w, output, invalid) for w in self.each], in_step

    def start_loads(self, output: Any, invalid: set[int]) -> list[Load]:
        """Start loads: those of this step arrive at once, asynchronous ones later."""
        told = output.kv_connector_metadata.loads
        in_step = []
        for load in self.loads:
            if told.get(load.req_id) != load.block_ids or load.arrived:
                continue
            load.arrived = True
            if self.setup.is_async:
                continue
            in_step.append(load)
            for rank in range(WORKERS):
                self.arrive(load, rank)
            if load.failure:
                invalid.add(load.block_ids[-1])
        return in_step

    def arrive(self, load: Load, rank: int) -> None:
        """Let one worker's part of a load arrive."""
        prompt = tuple(load.request.prompt_token_ids)
        for at, block in enumerate(load.block_ids):
            right = right_blocks(prompt)[load.first + at][rank]
            wrong = load.failure == "request" or (
                (load.damaged and rank == 1 and at == 0)
                or (load.failure == "blocks" and at == len(load.block_ids) - 1)
            )
            self.memory.setdefault(block, [0] * WORKERS)[rank] = right ^ (wrong << 7)
            if wrong:
                self.bad_from[block] = load

    def compute(self, request: Any, row: list[int], first: int, last: int) -> None:
        """Write KV of prompt tokens ``[first, last)``, bad if any before it is."""
        parts = right_blocks(tuple(request.prompt_token_ids))
        for at in range(first // BLOCK, -(-last // BLOCK)) if first < last else ():
            block = row[at]
            if self.setup.role == "send":
                # Another computation of the same tokens may give other bits.
                self.memory[block] = [
                    right_kv((part, self.forwards), rank)
                    for rank, part in enumerate(parts[at])
                ]
                continue
            before = [
                b
                for i, b in enumerate(row[: at + (first > at * BLOCK)])
                if self.memory.get(b) != parts[i]
            ]
            assert self.setup.mode == "open" or not before, "runs on bad KV"
            if before:
                self.bad_from[block] = self.bad_from[before[0]]
            bad = bool(before)
            self.memory[block] = [part ^ (bad << 9) for part in parts[at]]

    def report(self, worker: Worker, output: Any, invalid: set[int]) -> Any:
        scheduled = output.kv_checksum_scheduled
        records: list[KVChecksumRecord] = []
        started: set[str] = set()
        if scheduled is not None:
            started = {*scheduled.reqs_to_recv, *scheduled.reqs_to_load}
            worker.recvs.update(scheduled.reqs_to_recv)
            worker.recvs.update(scheduled.reqs_to_load)
        for req_id in output.finished_req_ids - started:
            worker.recvs.pop(req_id, None)
        result = KVConnectorOutput(finished_recving=set(), failed_recving=set())
        for load in self.loads:
            if load.arrived and self.setup.is_async:
                records += self.report_load(worker, load, result)
        for req_id, blocks in (scheduled.reqs_to_send if scheduled else {}).items():
            record = worker.sums(req_id, blocks, self.memory)
            self.old.append(record)
            if self.choose([False, True]):
                self.lost_sends.add(req_id)
            else:
                records.append(record)
        for at, data, req_id in list(self.late):
            if at == self.tick and worker.rank == 0:
                records.append(worker.record(received={req_id: data}))
        if worker.rank == 0:
            result.invalid_block_ids = invalid
        result.invalid_block_ids |= self.failed_blocks(worker, result)
        if records:
            result.kv_checksums = KVChecksumOutput(list(records))
        return result

    def failed_blocks(self, worker: Worker, result: Any) -> set[int]:
        """Return the blocks that worker 0 could not load."""
        return {
            load.block_ids[-1]
            for load in self.loads
            if worker.rank == 0
            and self.setup.is_async
            and load.failure == "blocks"
            and load.req_id in result.finished_recving
            and load is self.now[load.req_id]
        }

    def report_load(self, worker: Worker, load: Load, result: Any) -> list:
        """Return what a worker says of one load in this step."""
        due = load.due[worker.rank]
        records = []
        first = all(d is not None for d in load.due) and load.payload == "early"
        if first and worker.rank == 0 and not load.told_early:
            load.told_early = True
            records.append(worker.record(received={load.req_id: self.payload(load)}))
        if due is None:
            return records
        if due:
            load.due[worker.rank] = due - 1
            return records
        load.due[worker.rank] = None
        self.arrive(load, worker.rank)
        result.finished_recving.add(load.req_id)
        failed = load.failure == "request" and worker.rank == 1
        if failed:
            result.failed_recving.add(load.req_id)
        records += self.carried(worker, load)
        blocks = worker.recvs.pop(load.req_id, None)
        if blocks is None or failed:
            return records
        stored = {}
        if self.setup.carrier == "stored":
            stored = self.entries(worker, load, blocks)
        record = worker.sums(load.req_id, blocks, self.memory, **stored)
        self.old.append(record)
        return records if worker.rank in load.lost else [*records, record]

    def payload(self, load: Load) -> bytes:
        prompt = tuple(load.request.prompt_token_ids)
        return payload_bytes(other(prompt) if load.payload == "other" else prompt)

    def carried(self, worker: Worker, load: Load) -> list[KVChecksumRecord]:
        """Return the payload that this worker's connector received with the load."""
        if self.setup.carrier != "connector":
            return []
        with_rank = {"right": (0,), "other": (0,), "other worker": (1,)}
        data, req_id = self.payload(load), load.req_id
        prompt = tuple(load.request.prompt_token_ids)
        if load.payload == "twice" and worker.rank == 0:
            # The first copy counts.
            return [
                worker.record(received={req_id: data}),
                worker.record(received={req_id: payload_bytes(other(prompt))}),
            ]
        if load.payload == "late" and all(d is None for d in load.due):
            self.late.append((self.tick + 1, data, req_id))
        if worker.rank in with_rank.get(load.payload, ()):
            return [worker.record(received={req_id: data})]
        return []

    def entries(self, worker: Worker, load: Load, blocks: Any) -> dict[str, Any]:
        """Return stored checksums as they come back: sums of what was stored, tags."""
        if load.payload == "never" and worker.rank == 1:
            return {}
        start, ids = blocks.groups[0]
        hashes = load.request.block_hashes[start : start + len(ids)]
        tags = [int.from_bytes(h[:8], "little") ^ FINGERPRINT for h in hashes]
        prompt = tuple(load.request.prompt_token_ids)
        if load.payload == "other":
            prompt = other(prompt)
        parts = right_blocks(prompt)[start : start + len(ids)]
        values = [p[worker.rank] ^ t for p, t in zip(parts, tags, strict=True)]
        return dict(stored={load.req_id: {0: np.array(values, np.uint64)}})
