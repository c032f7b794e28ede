# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Let the machinery of instances misbehave, as `Faults` draws it.

Schedulers, connectors' scheduler sides, checksum workers and the aggregator are real.
A forward writes other bytes each time it computes the same tokens, as GPUs may, so
sums of a step that was rolled back differ from those of its repetition.
"""

import pickle
import time
from collections import Counter

import torch

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumScheduled
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from .. import instances as rig
from ..transports import copy_tokens
from .records import Faults, Load, Misreports

_MAX_PREEMPTIONS = 5


class Faulty:
    """The faults of `rig.Instance` and its heirs."""

    def __init__(self, *args, faults: Faults, **settings):
        super().__init__(*args, **settings)
        self.faults, self.rng = faults, faults.rng
        self.loads_now: dict[str, Load] = {}
        self.all_loads: list[Load] = []
        # Gives the load that a request starts; told what is lost of a send.
        self.new_load = lambda req_id: Load()
        self.excuse_send = lambda req_id, why: None
        # Told of a load whose verdict fell; called when a step's output is here.
        self.judged = lambda load: None
        self.before_update = lambda: None
        self.due: list[dict[str, int]] = [{} for _ in self.workers]
        self.number = 0
        # Less than many prompts: they come in chunks.
        self.scheduler.max_num_scheduled_tokens = 112
        self.misreports = Misreports(
            faults, self.excuse, self.awaited, self.note_repeated
        )
        self._watch_scheduler()

    def _watch_scheduler(self) -> None:
        scheduler, kv_checksum = self.scheduler, self.scheduler.kv_checksum
        self._preempt = scheduler._preempt_request
        scheduler._preempt_request = self._count_preemption
        self._allocate = scheduler.kv_cache_manager.allocate_slots
        scheduler.kv_cache_manager.allocate_slots = self._allocate_slots
        self._add_recv = kv_checksum.add_recv
        kv_checksum.add_recv = self._note_load
        self._judge = kv_checksum._judging.judge
        kv_checksum._judging.judge = self._note_verdict

    def _note_load(self, request, *args) -> None:
        self._add_recv(request, *args)
        req_id = request.request_id
        before = self.loads_now.get(req_id)
        if before is not None and before.end is None:
            before.end = "aborted"  # scheduled again before its step's output
        load = self.loads_now[req_id] = self.new_load(req_id)
        load.unchecked = self.unchecked
        self.all_loads.append(load)

    unchecked = False

    def _note_failures(self, told: KVConnectorOutput) -> None:
        """Note the loads that the scheduler is about to be told of as failed."""
        rows = self.scheduler.kv_cache_manager.get_block_ids
        for req_id, load in self.loads_now.items():
            if load.end is None and (
                req_id in (told.failed_recving or ())
                or (told.invalid_block_ids and {*rows(req_id)[0]} & self.invalid)
            ):
                load.end = "failed"

    def check_counters(self) -> None:
        """Check that every load has one end, and that the counters say which."""
        self.assert_every_load_has_one_verdict()
        kv_checksum = self.scheduler.kv_checksum
        stats = Counter(self.stats) + kv_checksum._stats
        ends = Counter(load.end for load in self.all_loads)
        judged = sum(n for key, n in stats.items() if key.startswith("loads:"))
        declined = 0
        if self.loads_in_step and kv_checksum.fail_closed:
            assert not self.all_loads, "loaded in the step that uses it"
            declined = stats["unverified:sync_load"]
        assert stats["loads_started"] == self.loads_compared + declined, (stats, ends)
        assert self.loads_compared == len(self.all_loads), (stats, ends)
        assert judged == ends["judged"] + declined, (stats, ends)
        assert stats["loads_failed"] == ends["failed"], (stats, ends)
        assert stats["loads_aborted"] == ends["aborted"], (stats, ends)
        assert len(kv_checksum._recvs) == ends[None], (stats, ends)

    loads_in_step = False

    def _note_verdict(self, request, pending):
        verdict = self._judge(request, pending)
        load = self.loads_now[request.request_id]
        assert load.verdict is None, f"{request.request_id} is judged twice"
        assert load.arrived and not load.failed, f"{request.request_id}: {load}"
        load.verdict, load.end = verdict.outcome, "judged"
        if load.payload == "own" and pending.received not in (None, b"", load.sent):
            # A late one, of an earlier request of the id.
            load.payload = "old"
        self.judged(load)
        return verdict

    def awaited(self) -> dict[str, int]:
        """Return the sends and loads whose sums are awaited, with their numbers."""
        kv_checksum = self.scheduler.kv_checksum
        pending = {**kv_checksum._sends.pending, **kv_checksum._recvs}
        return {req_id: p.blocks.seq for req_id, p in pending.items()}

    def excuse(self, req_ids, why: str) -> None:
        repeated = self.faults.active & {"duplicate", "restart"}
        for req_id in req_ids:
            load = self.loads_now.get(req_id)
            if load is None:
                self.excuse_send(req_id, why)
                continue
            load.excuses.add(why)
            load.unheard |= why in ("drop", "garble", "worker") and not repeated

    def note_repeated(self, record) -> None:
        """Note that a repeated record may bring an old payload for a reused id."""
        for req_id, data in record.received.items():
            pending = self.scheduler.kv_checksum._recvs.get(req_id)
            if pending is None or pending.received is not None:
                continue
            load = self.loads_now[req_id]
            if data != load.sent:
                load.payload = "old"
                self.faults.counts["payload: an old one for a reused id"] += 1

    # ---- preemption

    def _count_preemption(self, request, *args, **kwargs) -> None:
        counts = self.faults.counts
        load = self.loads_now.get(request.request_id)
        if request.num_output_tokens:
            counts["preempt: while decoding"] += 1
        elif load is not None and load.verdict is not None:
            counts["preempt: right after the load"] += 1
        elif request.num_computed_tokens < request.num_prompt_tokens:
            counts["preempt: between chunks"] += 1
        else:
            counts["preempt: the final prefill step in flight"] += 1
        self._preempt(request, *args, **kwargs)

    def _allocate_slots(self, request, *args, **kwargs):
        if (
            request.status == RequestStatus.RUNNING
            and _may_preempt(request)
            and self.faults.draw("preempt", 0.1)
        ):
            self.faults.counts["preempt: no block is free"] += 1
            return None
        return self._allocate(request, *args, **kwargs)

    def preempt_one(self) -> None:
        """Preempt a request as `reset_prefix_cache(reset_running_requests=True)`."""
        scheduler = self.scheduler
        running = [r for r in scheduler.running if _may_preempt(r)]
        if not running or not self.faults.draw_any(
            preempt=0.4, stale=0.4, duplicate=0.1
        ):
            return
        request = self.rng.choice(running)
        scheduler.running.remove(request)
        # Such a step's output may come while the request computes again only if it
        # is dropped.
        drop = scheduler.requires_kv_delivery or self.rng.random() < 0.5
        scheduler._preempt_request(request, time.monotonic(), drop_stale_output=drop)
        if self.rng.random() < 0.5:
            scheduler.kv_cache_manager.reset_prefix_cache()

    # ---- a step

    def step(self, producer=None):
        self.preempt_one()
        self.replace_a_worker()
        output = self.schedule()
        self.steps.append((output, self._forwards(output)))
        if len(self.steps) <= self.steps_ahead:
            return None
        output, forwards = self.steps.popleft()
        self.number += 1
        self.load_in_step(output)
        for forward in forwards:
            self._forward(*forward)
        reports = self.move(producer, output)
        self._count_stale(output, reports)
        self.misreports.apply(reports)
        per_worker = [self.runner_output(output, report) for report in reports]
        result = self.aggregator.aggregate(per_worker)
        self.before_update()
        self._note_failures(result.kv_connector_output)
        outputs = self.finish_step(output, result)
        finished = result.kv_connector_output.finished_recving or set()
        assert not finished & self.scheduler.kv_checksum._recvs.keys(), "kept"
        return outputs

    def load_in_step(self, output) -> None:
        """Load what the step needs that brings it."""

    def in_flight(self) -> set[str]:
        """Return the requests of steps whose output has not arrived."""
        return {r for output, _ in self.steps for r in output.num_scheduled_tokens}

    def _forwards(self, output):
        """Return a step's requests, block ids and tokens, before tables change."""
        rows = self.scheduler.kv_cache_manager.get_block_ids
        return [
            (self.scheduler.requests[req_id], rows(req_id), first, last)
            for req_id, (first, last) in rig.spans(output).items()
        ]

    def _forward(self, request, rows, first, last) -> None:
        self._check_not_run_on(request, rows, first)
        ids = list(request.all_token_ids)
        ids += [7] * (last - len(ids))  # sampled by a step that was dropped
        at = torch.arange(first, last)
        tokens = torch.tensor(ids)[at] + self.rng.randrange(8191)
        for group, numbers in enumerate(self.layers):
            blocks = torch.tensor(rows[group])[at // self.block_size]
            live = blocks != 0
            place = blocks[live], slice(None), at[live] % self.block_size
            for n in numbers:
                self.kv[n][place] = rig.token_kv(n, at[live], tokens[live])

    def _check_not_run_on(self, request, rows, first) -> None:
        """Check that, fail-closed, no request runs on what its load damaged."""
        load = self.loads_now.get(request.request_id)
        if load is None or load.bad is None or load.verdict is None:
            return
        layer, block, cells = load.bad
        used = list(rows[0][: first // self.block_size + 1])
        if self.scheduler.kv_checksum.fail_closed and block in used:
            at = used.index(block)
            if at * self.block_size < first:
                now = self.kv[layer].view(torch.uint8)[block, :, 0]
                assert not torch.equal(now, cells), f"runs on damaged KV: {load}"

    def _count_stale(self, output, reports) -> None:
        counts, awaited = self.faults.counts, self.awaited()
        for req_id in output.num_scheduled_tokens:
            request = self.scheduler.requests.get(req_id)
            if request is None or request.is_finished():
                counts["stale: output of a request that ended"] += 1
            elif request.num_stale_output_tokens:
                counts["stale: output of a preempted request"] += 1
        for report in reports:
            records = report.kv_checksums.finalize() if report.kv_checksums else []
            for req_id, seq in ((r, n) for x in records for r, n in x.seqs.items()):
                if req_id not in awaited:
                    counts["stale: sums of a request that ended"] += 1
                elif seq != awaited[req_id]:
                    counts["stale: sums of an earlier prefill"] += 1

    # ---- workers and what they load

    def replace_a_worker(self) -> None:
        """Start a worker anew, which forgets what it was asked to sum."""
        at = self.rng.randrange(len(self.workers))
        old = self.workers[at]
        if not old._recvs or not self.faults.draw("worker", 0.3):
            return
        self.faults.counts["worker: replaced between load and verdict"] += 1
        self.excuse(old._recvs, "worker")
        self.workers[at] = self.make_worker(
            self.model_kv_config, old.pp_rank, old.tp_rank
        )

    def arrive(self, req_id: str, block_ids: list[int]) -> None:
        """Let a load's KV arrive; ranks report it in this step or in a later one."""
        load = self.loads_now[req_id]
        load.arrived = True
        if not load.failed and self.faults.draw("load", 0.4):
            load.failed = {self.rng.randrange(len(self.workers))}
            load.invalid_blocks = len(self.specs) == 1 and self.rng.random() < 0.5
            how = "invalid block ids" if load.invalid_blocks else "failed_recving"
            self.faults.counts[f"load: {how}"] += 1
        if load.invalid_blocks:
            self.invalid.add(self.rng.choice(block_ids))
        for due in self.due:
            due[req_id] = self.number + self.rng.choice([0, 0, 0, 1, 2])

    invalid: set[int]

    def report(self, rank: int, output, results) -> KVConnectorOutput:
        """Return what one worker reports for a step."""
        due = self.due[rank]
        finished = {r for r, number in due.items() if number <= self.number}
        for req_id in finished:
            del due[req_id]
        results.finished_recving |= finished
        failed = {
            r
            for r in finished
            if rank in self.loads_now[r].failed and not self.loads_now[r].invalid_blocks
        }
        worker = self.workers[rank]
        worker.bind(pickle.loads(pickle.dumps(output.kv_checksum_scheduled)))
        report = KVConnectorOutput(
            finished_sending=results.finished_sending or None,
            finished_recving=results.finished_recving or None,
            failed_recving=failed,
            invalid_block_ids=self.invalid if rank == 0 else set(),
        )
        report.kv_checksums = worker.post_forward(
            report.finished_recving,
            failed,
            output.finished_req_ids,
            received=results.kv_checksums,
        )
        scheduled = output.kv_checksum_scheduled or KVChecksumScheduled()
        starting = {*scheduled.reqs_to_recv, *scheduled.reqs_to_load}
        ended = output.finished_req_ids - starting
        assert not (finished | ended) & worker._recvs.keys(), "kept by a worker"
        return report

    def damage_blocks(self, load: Load, block_ids: list[int]) -> None:
        """Damage, perhaps, a load's KV in one of its blocks."""
        if not block_ids or self.rng.random() > 0.25:
            return
        layer, block = self.rng.choice(self.layers[0]), self.rng.choice(block_ids)
        cells = self.kv[layer].view(torch.uint8)[block]
        before = cells[:, 0].clone()  # a block's first token always counts
        how = self.rng.choice(["bit", "token", "zeros"])
        if how == "bit":
            head, at = self.rng.randrange(cells.shape[0]), self.rng.randrange(32)
            cells[head, 0, at] ^= 1 << self.rng.randrange(8)
        elif how == "token":
            cells[:, 0] = cells[:, 1].clone()
        else:
            cells[:] = 0
        load.damaged = not torch.equal(before, cells[:, 0])
        if load.damaged:
            load.bad = layer, block, cells[:, 0].clone()


def _may_preempt(request) -> bool:
    return request.num_preemptions < _MAX_PREEMPTIONS


class FaultyInstance(Faulty, rig.Instance):
    """One side of a pair."""

    def __init__(self, *args, **settings):
        # What becomes of the payload of a request; None for a loss.
        self.alter_payload = lambda req_id, data: data
        # Whether the producer of a load is gone, and whatever it was to send.
        self.producer_gone = lambda req_id: False
        self._late: list[tuple[int, int, dict[str, bytes]]] = []
        super().__init__(*args, **settings)

    def intercept_payloads(self):
        connector = self.scheduler.connector
        send = connector.send_kv_checksums

        def altered(request, checksums):
            assert request.status != RequestStatus.FINISHED_ABORTED, "sent"
            data = self.alter_payload(request.request_id, checksums)
            if data is not None:
                send(request, data)

        connector.send_kv_checksums = altered

    def move(self, producer, output):
        transport, self.invalid = self.transport, set()
        transport.take_metadata(output.kv_connector_metadata)
        for req_id, local in list(transport.loading.items()):
            if self.rng.random() < 0.4:
                continue
            if self.producer_gone(req_id):
                self.loads_now[req_id].failed = {0}
            elif not self._transfer(producer, req_id, local):
                continue
            del transport.loading[req_id]
            self.arrive(req_id, local[0])
        sent, transport.sent = transport.sent, set()
        reports = []
        for rank in range(len(self.workers)):
            results = KVConnectorTransferResults(set(sent))
            transport.add_received(rank, results)
            self._delay_payloads(rank, results)
            reports.append(self.report(rank, output, results))
        return reports

    def _transfer(self, producer, req_id, local) -> bool:
        """Move KV and payload of a load, if its producer is ready."""
        remote = self.transport.remote(producer, req_id)
        if remote is None:
            return False
        their_id, their_blocks = remote
        copy_tokens(self, producer, req_id, local, their_id, their_blocks)
        self.damage_blocks(self.loads_now[req_id], local[0])
        self.transport.carry_payload(self, producer, req_id)
        producer.transport.sent.add(their_id)
        return True

    def _delay_payloads(self, rank: int, results) -> None:
        """Let payloads that a connector brings come late, or once more."""
        for number, late_rank, payloads in list(self._late):
            if number <= self.number and late_rank == rank:
                self._late.remove((number, late_rank, payloads))
                for req_id, data in payloads.items():
                    results.kv_checksums.setdefault(req_id, data)
        for req_id, data in list(results.kv_checksums.items()):
            if not self.faults.draw("payload", 0.15):
                continue
            later = self.number + self.rng.randint(1, 4), rank, {req_id: data}
            self._late.append(later)
            if self.rng.random() < 0.5:
                self.faults.counts["payload: late"] += 1
                self.excuse([req_id], "payload")
                del results.kv_checksums[req_id]
            else:
                self.faults.counts["payload: twice"] += 1
