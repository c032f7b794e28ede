# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Walk one vLLM scheduler with checksums through everything that loads may meet.

The scheduler, its KV cache manager, requests, the aggregator of workers' outputs and
the checksum code in the scheduler are real, so every order of events is one that
vLLM's scheduler can produce:

- a load finishes in the scheduler when every worker has reported it, each in any
  step from the one that starts it; a failure of one worker is told with that;
- blocks that failed are told by any worker, in that step or in an earlier one, and
  the scheduler knows the load as failed until then;
- a request that is aborted while it loads keeps its blocks and its id until then;
- preempted, it asks for the same load again, where its connector offers it again;
- with async scheduling, a step's output comes when the next one is scheduled;
- a load in the step that uses it ends with that step.

What is made up: the connector, what its workers load and report, and the KV, which is
one number per block and worker. What was loaded is what the connector was told.
"""

import time
from collections import Counter, deque
from collections.abc import Sequence
from copy import copy
from typing import Any

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumGroup,
    KVChecksumOutput,
    KVChecksumRecord,
)
from vllm.distributed.kv_transfer.kv_checksum.payload import decode, decode_text
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from .. import instances as rig
from .site import (
    BLOCK,
    MASK,
    PROMPTS,
    WORKERS,
    Choose,
    Setup,
    Site,
    other,
    payload_text,
    right_blocks,
)
from .workers import Load, Workers

MAX_TICKS = 20


class Order:
    """One order of events, from the first request until nothing is left.

    Args:
        site: the instance, empty.
        names: the requests, by their prompt's.
        choose: decides what happens.

    """

    def __init__(self, site: Site, names: str, choose: Choose) -> None:
        self.site, self.setup, self.choose = site, site.setup, choose
        self.scheduler, self.connector = site.scheduler, site.connector
        self.workers = Workers(site.setup, choose)
        self.aggregator = KVOutputAggregator(WORKERS)
        self.waiting = list(names)
        self.requests: dict[str, Any] = {}
        self.now: dict[str, Load] = {}
        self.asked: dict[str, Any] = {}
        self.steps: deque = deque()
        self.extra: list[KVChecksumRecord] = []
        self.answers: dict[str, Any] = {}
        self.expected_answers: dict[str, list[int]] = {}
        self.tick = self.idle = self.reused = 0

    def go(self) -> Counter:
        """Run it; what its loads ended as."""
        checksums = self.site.checksums
        judge = checksums._judging.judge
        checksums._judging.judge = lambda request, load: self.judged(
            request, load, judge(request, load)
        )
        finished = self.connector.request_finished
        self.connector.request_finished = lambda request, ids: self.hand_over(
            request, ids, finished(request, ids)
        )
        try:
            while self.waiting or self.scheduler.requests or self.may_add_again():
                assert self.tick < MAX_TICKS, "hangs"
                self.between_steps()
                self.step()
                self.tick += 1
            self.step()  # hands the last finished ids to the workers
            while self.steps:
                self.run_step(*self.steps.popleft())
            return self.check_end()
        finally:
            checksums._judging.judge = judge
            self.connector.request_finished = finished

    def add(self, name: str) -> None:
        prompt = PROMPTS[name]
        params: dict[str, Any] = {"remote_engine_id": "p"}
        if self.setup.carrier == "kv_transfer_params" and self.setup.role == "load":
            what = self.choose(["right", "never", "other"])
            of = other(tuple(prompt)) if what == "other" else tuple(prompt)
            if what != "never":
                params["kv_checksums"] = payload_text(of)
            params["becomes"] = what
        sampling = copy(self.site.sampling)
        sampling.extra_args = {"kv_transfer_params": params}
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt),
            sampling_params=sampling,
            pooling_params=None,
            block_hasher=self.site.hasher,
        )
        self.requests[name] = request
        self.scheduler.add_request(request)

    def may_add_again(self) -> bool:
        """Return whether an id may be used again, at once or in the next step."""
        aborted = [
            r
            for r in self.requests.values()
            if r.status == RequestStatus.FINISHED_ABORTED
        ]
        self.idle = self.idle + 1 if aborted else 0
        return bool(aborted) and not self.reused and self.idle < 3

    def between_steps(self) -> None:
        """Do at most one thing between two steps, and let requests arrive."""
        arrived = len(self.requests)
        if self.waiting and not arrived:
            self.add(self.waiting.pop(0))
        elif self.waiting:
            # Usually when the first one runs: it finds that one's blocks.
            here = self.choose([self.tick >= 4, self.tick < 4])
            if here:
                self.add(self.waiting.pop(0))
        action = self.choose(["", *self.possible_actions()])
        if action:
            kind, name = action
            getattr(self, kind)(name)

    def possible_actions(self) -> list[tuple[str, str]]:
        found = []
        for name, request in self.requests.items():
            if not request.is_finished():
                found.append(("abort", name))
            elif (
                request.status == RequestStatus.FINISHED_ABORTED
                and name not in self.scheduler.requests
                and not self.reused
            ):
                found.append(("add_again", name))
            if request.status == RequestStatus.RUNNING and not request.num_preemptions:
                found += [("preempt", name), ("preempt_and_forget", name)]
        if self.stale_records():
            found.append(("repeat_stale", ""))
        return found

    def abort(self, name: str) -> None:
        load = self.now.get(name)
        if load is not None and not load.end:
            load.end = "aborted"
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def add_again(self, name: str) -> None:
        """Add another request of the same id."""
        self.reused += 1
        self.workers.lost_sends.discard(name)
        self.add(name)

    def preempt(self, name: str) -> None:
        request = self.requests[name]
        self.scheduler.running.remove(request)
        self.scheduler._preempt_request(request, time.monotonic(), True)
        self.scheduler.prev_step_scheduled_req_ids.discard(name)

    def preempt_and_forget(self, name: str) -> None:
        self.preempt(name)
        self.scheduler.kv_cache_manager.reset_prefix_cache()

    def stale_records(self) -> list[KVChecksumRecord]:
        """Return records of an earlier load or send of an id that is in use now."""
        checksums = self.site.checksums
        now = {**checksums._sends.pending, **checksums._recvs}
        return [
            record
            for record in self.workers.old
            for req_id, seq in record.seqs.items()
            if req_id in now and now[req_id].blocks.seq != seq
        ]

    def repeat_stale(self, name: str) -> None:
        record = self.stale_records()[0]
        sums = {
            req_id: {
                g: KVChecksumGroup(s.start, s.replica_keys, s.values ^ np.uint64(1))
                for g, s in groups.items()
            }
            for req_id, groups in record.checksums.items()
        }
        self.extra.append(
            KVChecksumRecord(
                record.pp_rank,
                record.tp_rank,
                sums,
                fingerprints=record.fingerprints,
                num_tokens=record.num_tokens,
                seqs=record.seqs,
            )
        )

    def step(self) -> None:
        output = self.scheduler.schedule()
        scheduled = output.kv_checksum_scheduled
        if scheduled is not None:
            self.asked |= scheduled.reqs_to_recv | scheduled.reqs_to_load
        self.note_loads()
        self.steps.append((output, self.forwards_of(output)))
        if len(self.steps) > self.setup.steps_ahead:
            self.run_step(*self.steps.popleft())

    def note_loads(self) -> None:
        """Note the loads that the connector was told of: these must be summed."""
        for req_id, first, ids in self.connector.told:
            old = self.now.get(req_id)
            if old is not None and not old.end:
                old.end = "aborted"  # scheduled again before its step's output
            load = Load(self.requests[req_id], first, ids)
            self.draw(load)
            self.workers.loads.append(load)
            self.now[req_id] = load
            asked = self.asked.pop(req_id, None)
            assert (asked is None) == self.setup.unchecked, "asked to sum"
            if asked is not None:
                start, summed = asked.groups[0]
                assert (start, list(summed)) == (first, ids), "other blocks summed"
        self.connector.told.clear()

    def draw(self, load: Load) -> None:
        """Draw what becomes of a load that starts."""
        setup, choose = self.setup, self.choose
        load.damaged = choose([False, True])
        if not setup.is_async:
            load.failure = choose(["", "blocks"])
            return
        load.due = [choose([1, 0, 2, 3]) for _ in range(WORKERS)]
        load.failure = choose(["", "request", "blocks"])
        if setup.unchecked:
            return
        lost = choose([(), (0,), (1,)])
        load.lost = lost
        if setup.carrier == "connector":
            load.payload = choose(
                ["right", "early", "other worker", "twice", "late", "never", "other"]
            )
        elif setup.carrier == "stored":
            load.payload = choose(["right", "never", "other"])
        else:
            load.payload = load.request.kv_transfer_params["becomes"]

    def run_step(self, output: Any, forwards: list) -> None:
        """Run a step on the workers, and give the scheduler its output."""
        reports, in_step = self.workers.step(self.tick, self.now, output, forwards)
        per_worker = [self.runner_output(output, report) for report in reports]
        result = self.aggregator.aggregate(per_worker)
        if self.extra:
            told = result.kv_connector_output
            extra, self.extra = KVChecksumOutput(self.extra), []
            told.kv_checksums = extra.aggregate(told.kv_checksums)
        self.expect(result.kv_connector_output, in_step)
        results = self.scheduler.update_from_output(output, result)
        for client in results.values():
            for out in client.outputs:
                if out.finish_reason is not None:
                    self.answers[out.request_id] = out.kv_transfer_params
        self.note_loads()  # those that waited for this step

    def forwards_of(self, output: Any) -> list[tuple[Any, list[int], int, int]]:
        """Return a step's requests, blocks and tokens; the tables change meanwhile."""
        found = []
        for req_id, (first, last) in rig.spans(output).items():
            request = self.scheduler.requests[req_id]
            (row,) = self.scheduler.kv_cache_manager.get_block_ids(req_id)
            last = min(last, request.num_prompt_tokens)
            found.append((request, list(row), first, last))
        return found

    def runner_output(self, output: Any, told: Any) -> ModelRunnerOutput:
        ids = list(output.num_scheduled_tokens)
        sampled = []
        for req_id, (_, last) in rig.spans(output).items():
            request = self.requests[req_id]
            sampled.append([7] if last >= request.num_tokens else [])
        return ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={r: i for i, r in enumerate(ids)},
            sampled_token_ids=sampled,
            kv_connector_output=told,
        )

    def expect(self, told: Any, in_step: list[Load]) -> None:
        """Note what this output ends, before the scheduler hears of it."""
        for load in self.now.values():
            if load.end:
                continue
            rows = self.scheduler.kv_cache_manager.get_block_ids(load.req_id)
            if (told.invalid_block_ids or set()) & set(rows[0]) or load.req_id in (
                told.failed_recving or ()
            ):
                load.end = "failed"
            elif load.req_id in (told.finished_recving or ()) or any(
                load is x for x in in_step
            ):
                load.end = "judged"

    def judged(self, request: Any, pending: Any, verdict: Any) -> Any:
        load = self.now[request.request_id]
        load.outcomes.append(verdict.outcome)
        assert load.request is request
        assert load.end == "judged", f"judged, but {load}"
        assert verdict.outcome in load.allowed(self.setup), (verdict, load)
        assert len(load.outcomes) == 1, f"judged twice: {load}"
        if verdict.outcome == "verified":
            self.check_whole_prompt(request, pending.blocks.num_tokens)
        return verdict

    def check_whole_prompt(self, request: Any, num_tokens: int) -> None:
        """Check that what a verified load found locally is right, too.

        Unless it came of a load that nobody could check and that was used all the
        same.
        """
        parts = right_blocks(tuple(request.prompt_token_ids))
        (row,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for at in range(-(-num_tokens // BLOCK)):
            if self.workers.memory.get(row[at]) != parts[at]:
                source = self.workers.bad_from[row[at]]
                unseen = source.end == "failed" or source.outcomes == ["unverified"]
                assert unseen and self.setup.mode == "open", f"on bad KV: {source}"

    def hand_over(self, request: Any, ids: list[int], result: Any) -> Any:
        """Send what is in the blocks of a prefill instance's request that ended."""
        if self.setup.role == "send":
            ids = ids[: -(-request.num_prompt_tokens // BLOCK)]
            sums = [sum(self.workers.memory.get(i, ())) & MASK for i in ids]
            self.expected_answers[request.request_id] = sums
        return result

    def check_end(self) -> Counter:
        stats, ends = (
            self.site.checksums._stats,
            Counter(x.end for x in self.workers.loads),
        )
        left = self.site.left()
        assert not left, left
        by_key = Counter({k: n for k, n in stats.items() if k.startswith("loads:")})
        outcomes = Counter(o for load in self.workers.loads for o in load.outcomes)
        if self.setup.mode != "open" and not self.setup.is_async:
            assert not self.workers.loads, "loaded in the step that uses it"
            declined = len(self.connector.offered)
            assert stats["loads_started"] == by_key.total() == declined, stats
            return Counter(declined=declined)
        assert stats["loads_started"] == len(self.workers.loads) + self.never_told(), (
            stats
        )
        assert by_key.total() == ends["judged"] == outcomes.total(), (stats, ends)
        name = "none" if self.setup.unchecked else self.setup.carrier
        for outcome in ("verified", "mismatch", "unverified"):
            assert by_key[f"loads:{outcome}:{name}"] == outcomes[outcome], stats
        assert stats["loads_failed"] == ends["failed"], (stats, ends)
        assert stats["loads_aborted"] == ends["aborted"] + self.never_told(), stats
        assert set(ends) <= {"judged", "failed", "aborted"}, ends
        self.check_answers()
        return outcomes + Counter({k: n for k, n in ends.items() if k != "judged"})

    def never_told(self) -> int:
        """Return loads that waited for earlier steps when their request was aborted."""
        stats = self.site.checksums._stats
        return (
            stats["loads_started"] - len(self.workers.loads)
            if self.setup.deferred
            else 0
        )

    def check_answers(self) -> None:
        """Check that payloads fit the blocks, and are missing if sums were lost."""
        for req_id, params in self.answers.items():
            if self.setup.role != "send":
                continue
            text = (params or {}).get("kv_checksums")
            data = self.connector.sent.get(req_id)
            if text is None and data is None:
                assert req_id in self.workers.lost_sends, "nothing sent"
                continue
            assert req_id not in self.workers.lost_sends or self.preempted(req_id), (
                "sent"
            )
            payload = decode(data) if text is None else decode_text(text)
            sent = [int(v) for v in payload.groups[0].values]
            assert sent == self.expected_answers[req_id], "other KV than sent"

    def preempted(self, req_id: str) -> bool:
        return self.requests[req_id].num_preemptions > 0


class Deviations:
    """Walks all sequences of choices of which at most `most` are unusual."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.path: list[list[int]] = []
        self.at = self.used = 0

    def choose(self, options: Sequence[Any]) -> Any:
        if self.used == self.most or len(options) == 1:
            return options[0]
        if self.at == len(self.path):
            self.path.append([0, len(options)])
        chosen = self.path[self.at][0]
        self.at += 1
        self.used += chosen > 0
        return options[chosen]

    def advance(self) -> bool:
        """Go to the next sequence; return whether there is one."""
        self.at = self.used = 0
        while self.path and self.path[-1][0] + 1 == self.path[-1][1]:
            self.path.pop()
        if self.path:
            self.path[-1][0] += 1
        return bool(self.path)


def walk(model: str, setup: Setup, names: str, most: int) -> tuple[int, Counter]:
    """Walk every order of at most `most` unusual events; count orders and ends."""
    site, choices, ends, number = Site(model, setup), Deviations(most), Counter(), 0
    while True:
        try:
            ends += Order(site, names, choices.choose).go()
        except Exception as error:
            error.add_note(f"{setup}, requests {names!r}, choices {choices.path}")
            raise
        number += 1
        site.checksums._stats.clear()
        site.connector.forget()
        site.scheduler.kv_cache_manager.reset_prefix_cache()
        if not choices.advance():
            return number, ends
