# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run P and D, or instances that share a store, from the first request to the end."""

import gc
import types
from collections import Counter
from dataclasses import dataclass, field

import torch

from vllm.v1.request import RequestStatus

from .. import instances as rig
from .. import store
from .instances import FaultyInstance
from .records import Faults, Load
from .stores import FaultyStore

MAX_STEPS = 150
NUM_REQUESTS = 14

P_SPLITS = [(1, 1), (2, 1), (1, 2)]
D_SPLITS = [(1, 1), (2, 1), (1, 2), (2, 2)]


@dataclass
class Transfer:
    """A client's request: a prefill on P whose KV is loaded on D, or one alone."""

    number: int
    p_id: str
    d_id: str
    prompt: list[int]
    born: int
    stage: str = "P"
    request: object = None
    params: dict = field(default_factory=dict)
    load: Load = field(default_factory=Load)
    # Its producer's KV is gone: the load fails.
    gone: bool = False
    sent_by: object = None
    at: int = 0


class Run:
    """The part that both kinds of runs share.

    `shares`: how many halves of a prompt it may have in common with others.
    """

    shares = (0, 1, 2)

    def __init__(self, model: str, faults: Faults, outcomes: Counter) -> None:
        self.model, self.faults, self.rng = model, faults, faults.rng
        self.outcomes = outcomes
        self.tick, self.admitted = 0, 0
        self.live: list[Transfer] = []
        # All instances, those that were replaced, too.
        self.started: list = []
        self.free_ids: list[tuple[str, str]] = []
        self.families = [rig.tokens(220, self.rng.randrange(10**6)) for _ in range(3)]
        self.mode = self.rng.choice(list(rig.MODES.values()))

    def settings(self, splits) -> dict:
        tp, pp = self.rng.choice(splits)
        return dict(
            tp=tp,
            pp=pp,
            num_blocks=96,
            async_scheduling="stale" in self.faults.active or self.rng.random() < 0.5,
            faults=self.faults,
        )

    def go(self) -> None:
        while self.admitted < NUM_REQUESTS or self.live:
            self.tick += 1
            self.faults.calm = self.admitted == NUM_REQUESTS and self.tick > 80
            if self.admitted < NUM_REQUESTS and self.rng.random() < 0.6:
                self.admit()
            self.misbehave()
            self.step()
            for transfer in self.live:
                assert self.tick - transfer.born < MAX_STEPS, f"hangs: {transfer}"
        self.faults.calm = True
        # A load whose request is gone still arrives, in any of the next steps, and
        # leases run out.
        for _ in range(24):
            self.tick += 1
            self.step()
        for instance, before in self.instances():
            assert self.left(instance) == before, (self.left(instance), before)
        for instance in self.started:
            instance.check_counters()

    def prompt(self) -> list[int]:
        """Draw a prompt: families share a prefix, many end near a block's end."""
        number = 16 * self.rng.randint(1, 9) + self.rng.choice([-3, -2, -1, 0, 1, 7])
        family = self.rng.choice(self.families)
        tail = rig.tokens(40, self.rng.randrange(10**6))
        shared = self.rng.choice(self.shares) * number // 2
        return (family[: max(1, shared)] + tail * 9)[:number]

    def new_transfer(self) -> Transfer:
        self.admitted += 1
        ids = f"p{self.admitted}", f"d{self.admitted}"
        for pair in self.free_ids:
            if self.may_reuse(*pair):
                self.free_ids.remove(pair)
                ids = pair
                self.faults.counts["abort: its id reused"] += 1
                break
        return Transfer(self.admitted, *ids, self.prompt(), self.tick)

    def judged(self, load: Load) -> None:
        """Check a verdict when it falls."""
        assert load.verdict in load.allowed(), load
        truth = "damaged" if load.damaged else "intact"
        if load.unchecked:
            truth += ", not checked"
        elif load.payload != "own":
            truth += f", {load.payload} checksums"
        elif load.excuses:
            truth += ", sums or payload lost"
        self.outcomes[truth, load.verdict] += 1

    def check_end(self, transfer: Transfer) -> None:
        """Check that a request of D which ended by itself fits its load's outcome."""
        load, status = transfer.load, transfer.request.status
        failed = self.mode.get("policy", "fail") == "fail" and (
            bool(load.failed)
            or (load.verdict not in (None, "verified") and bool(self.mode))
        )
        if status == RequestStatus.FINISHED_ABORTED:
            return
        if load.arrived and not load.failed:
            assert load.verdict is not None, f"not judged: {transfer}"
        expected = (
            RequestStatus.FINISHED_ERROR
            if failed
            else RequestStatus.FINISHED_LENGTH_CAPPED
        )
        assert status == expected, (status, transfer, self.mode)

    def draw_abort(self) -> bool:
        return self.faults.draw_any(abort=0.15, stale=0.05, duplicate=0.1)

    def abort(self, instance, request, where: str) -> None:
        scheduler = instance.scheduler
        if request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
            arrived = request.request_id in scheduler.finished_recving_kv_req_ids
            stage = "loaded, not run yet" if arrived else "loading"
        elif request.num_in_flight_tokens:
            stage = "step in flight"
        else:
            stage = "waiting" if request.num_computed_tokens == 0 else "between steps"
        self.faults.counts[f"abort: {where}, {stage}"] += 1
        load = instance.loads_now.get(request.request_id)
        if load is not None and load.end is None:
            load.end = "aborted"
        scheduler.finish_requests(request.request_id, RequestStatus.FINISHED_ABORTED)
        assert request.request_id not in instance.awaited(), "kept"

    @staticmethod
    def left(instance) -> dict:
        """Return everything that may grow: tables, blocks in use, what workers hold."""
        kv_checksum = instance.scheduler.kv_checksum
        sizes = {
            name: len(value)
            for name, value in vars(kv_checksum).items()
            if isinstance(value, dict | list | set) and name != "_skipped_groups"
        }
        for i, worker in enumerate(instance.workers):
            sizes[f"tensors of worker {i}"] = count_tensors(worker)
        pool = instance.scheduler.kv_cache_manager.block_pool
        sizes["blocks"] = pool.get_num_free_blocks()
        sizes["requests"] = len(instance.scheduler.requests)
        return sizes | {k: int(v) for k, v in instance.tables().items()}


def count_tensors(root: object) -> int:
    """Count the tensors that an object refers to, code and modules left out."""
    seen, todo, found = set(), [root], 0
    while todo:
        item = todo.pop()
        if id(item) in seen or isinstance(item, type | types.ModuleType):
            continue
        seen.add(id(item))
        if isinstance(item, torch.Tensor):
            found += 1
        elif isinstance(item, types.FunctionType):
            todo += [c.cell_contents for c in item.__closure__ or ()]
            todo += item.__defaults__ or ()
        else:
            todo += gc.get_referents(item)
    return found


class PairRun(Run):
    """P and D over one of the P/D carriers."""

    def __init__(self, model, transport, faults, outcomes):
        super().__init__(model, faults, outcomes)
        self.transport = transport
        self.window = None if "load" in faults.active else self.rng.choice([None, 40])
        self.p_settings = self.settings(P_SPLITS)
        self.d_settings = self.settings(D_SPLITS) | self.mode
        self.sent: list[tuple[int, bytes]] = []
        self.of_id: dict[str, Transfer] = {}
        self.unreleased: list[tuple[int, Transfer]] = []
        self.start_p()
        self.start_d()

    def start_p(self) -> None:
        self.p = FaultyInstance(
            self.model,
            "kv_producer",
            transport=self.transport,
            window=self.window,
            **self.p_settings,
        )
        self.p.excuse_send = self.excuse_send
        self.p.alter_payload = self.alter_payload
        self.p.before_update = self.abort_on_p
        self.p_before = self.left(self.p)
        self.started.append(self.p)

    def start_d(self) -> None:
        self.d = FaultyInstance(
            self.model,
            "kv_consumer",
            transport=self.transport,
            window=self.window,
            **self.d_settings,
        )
        self.d.new_load = lambda req_id: self.by_id(req_id).load
        self.d.producer_gone = lambda req_id: self.by_id(req_id).gone
        self.d.judged = self.judged
        self.d.before_update = self.abort_on_d
        self.d_before = self.left(self.d)
        self.started.append(self.d)

    def instances(self):
        return [(self.p, self.p_before), (self.d, self.d_before)]

    def by_id(self, req_id: str) -> Transfer:
        return self.of_id[req_id]

    def excuse_send(self, req_id: str, why: str) -> None:
        if req_id in self.of_id:
            self.of_id[req_id].load.excuses.add(why)

    def alter_payload(self, p_id: str, data: bytes) -> bytes | None:
        """Lose a payload, or let another request's come instead."""
        transfer = self.of_id[p_id]
        others = [old for first, old in self.sent if first != transfer.prompt[0]]
        self.sent.append((transfer.prompt[0], data))
        transfer.load.sent = data
        if not self.faults.draw("payload", 0.4):
            return data
        if others and self.rng.random() < 0.5:
            self.faults.counts["payload: another request's"] += 1
            transfer.load.payload = "other"
            transfer.load.sent = self.rng.choice(others)
            return transfer.load.sent
        self.faults.counts["payload: lost"] += 1
        transfer.load.excuses.add("payload")
        return None

    # ---- a request's way

    def admit(self) -> None:
        transfer = self.new_transfer()
        self.of_id[transfer.p_id] = self.of_id[transfer.d_id] = transfer
        self.live.append(transfer)
        self.start_prefill(transfer)

    def start_prefill(self, transfer: Transfer) -> None:
        transfer.load, transfer.gone, transfer.stage = Load(), False, "P"
        transport = self.p.transport
        params = transport.producer_params(transfer.p_id)
        if "transfer_id" in params:
            params["transfer_id"] = f"{transfer.number}-{self.tick}"
        transfer.params = params
        self.p.results.pop(transfer.p_id, None)
        transfer.request = transfer.sent_by = self.p.add(
            transfer.p_id, transfer.prompt, dict(params), self.rng.choice([1, 1, 3, 6])
        )
        if self.transport == "mooncake":
            # A router sends a request to both sides at once.
            transfer.params = transport.consumer_params(self.p, params, None)
            self.start_load(transfer)

    def start_load(self, transfer: Transfer) -> None:
        transfer.stage = "D"
        transfer.request = self.d.add(
            transfer.d_id,
            transfer.prompt,
            dict(transfer.params),
            self.rng.randint(1, 5),
        )

    def step(self) -> None:
        self.p.step()
        for transfer in self.live:
            if transfer.stage == "P" and transfer.request.is_finished():
                self.hand_over(transfer)
        self.d.step(self.p)
        for transfer in list(self.live):
            if transfer.stage == "D" and transfer.request.is_finished():
                self.check_end(transfer)
                self.end(transfer)
        self.release()

    def hand_over(self, transfer: Transfer) -> None:
        answer = self.p.results[transfer.p_id][-1].kv_transfer_params
        self.p.alter = lambda data: self.alter_payload(transfer.p_id, data)
        transfer.params = self.p.transport.consumer_params(
            self.p, transfer.params, answer
        )
        self.start_load(transfer)

    def end(self, transfer: Transfer) -> None:
        self.live.remove(transfer)
        self.unreleased.append((self.tick + 4, transfer))
        if transfer.request.status == RequestStatus.FINISHED_ABORTED:
            self.free_ids.append((transfer.p_id, transfer.d_id))

    def release(self) -> None:
        """Free what nobody loaded any more, as when its lease runs out."""
        for at, transfer in list(self.unreleased):
            p_id, d_id = transfer.p_id, transfer.d_id
            loading = (
                d_id in self.d.scheduler.requests or d_id in self.d.transport.loading
            )
            if at > self.tick or (loading and self.of_id[d_id] is transfer):
                continue
            self.unreleased.remove((at, transfer))
            transport, requests = self.p.transport, self.p.scheduler.requests
            if transfer.sent_by is requests.get(p_id) and p_id not in transport.sent:
                transport.sent.add(p_id)
                getattr(transport, "finished_blocks", {}).pop(p_id, None)
                getattr(transport, "sends", {}).pop(
                    transfer.params.get("transfer_id"), None
                )

    def may_reuse(self, p_id: str, d_id: str) -> bool:
        return (
            p_id not in self.p.scheduler.requests
            and d_id not in self.d.scheduler.requests
            and not {p_id, d_id} & (self.p.in_flight() | self.d.in_flight())
            and all(p_id != transfer.p_id for _, transfer in self.unreleased)
        )

    # ---- what goes wrong

    def misbehave(self) -> None:
        if self.faults.draw("restart", 0.06):
            self.restart_d()
        if self.faults.draw("restart", 0.06):
            self.restart_p()

    def abort_on_p(self) -> None:
        live = [t for t in self.live if not t.sent_by.is_finished()]
        if not live or not self.draw_abort():
            return
        transfer = self.rng.choice(live)
        self.abort(self.p, transfer.sent_by, "P")
        if transfer.stage == "D":
            transfer.gone = True  # D waits for what will not come
        else:
            self.end(transfer)

    def abort_on_d(self) -> None:
        live = [t for t in self.live if t.stage == "D" and not t.request.is_finished()]
        if live and self.draw_abort():
            transfer = self.rng.choice(live)
            self.abort(self.d, transfer.request, "D")
            self.end(transfer)

    def restart_d(self) -> None:
        """Start D anew; the old one's records come late, and clients ask again."""
        old = self.d
        self.faults.counts["restart: D"] += 1
        self.faults.counts["restart: D's loads under way"] += len(old.transport.loading)
        self.start_d()
        self.d.misreports.old = old.misreports.old
        for transfer in self.live:
            if transfer.stage == "D":
                # P sends its KV once.
                transfer.gone |= transfer.load.arrived
                load, transfer.load = transfer.load, Load()
                transfer.load.excuses = load.excuses
                transfer.load.payload, transfer.load.sent = load.payload, load.sent
                self.start_load(transfer)

    def restart_p(self) -> None:
        old = self.p
        self.faults.counts["restart: P"] += 1
        self.start_p()
        self.p.misreports.old = old.misreports.old
        ended = [transfer for _, transfer in self.unreleased]
        for transfer in self.live + ended:
            if transfer in ended:
                transfer.gone = True
            elif transfer.stage == "P":
                self.start_prefill(transfer)
            elif not transfer.load.arrived:
                self.faults.counts["restart: P, whose KV was to be loaded"] += 1
                transfer.gone = True


class StoreRun(Run):
    """Two instances that share a store.

    Args:
        kind: the class of the instances.

    """

    shares = (1, 2, 2)

    def __init__(self, model, faults, outcomes, kind=FaultyStore):
        super().__init__(model, faults, outcomes)
        self.kind = kind
        store.STORE.clear()
        # Few blocks: what was stored is soon no longer in a cache here.
        self.shared = self.settings(P_SPLITS) | self.mode | dict(num_blocks=40)
        self.both = [self.start(), self.start()]
        self.before = [self.left(instance) for instance in self.both]

    def start(self) -> FaultyStore:
        instance = self.kind(self.model, **self.shared)
        self.started.append(instance)
        instance.judged = self.judged
        instance.before_update = lambda: self.abort_one(instance)
        instance.new_load = lambda req_id: self.new_load(instance, req_id)
        return instance

    def instances(self):
        return zip(self.both, self.before, strict=True)

    def new_load(self, instance, req_id: str) -> Load:
        load = Load()
        for transfer in self.live:
            if transfer.d_id == req_id:
                transfer.load = load
        return load

    def admit(self) -> None:
        transfer = self.new_transfer()
        self.live.append(transfer)
        self.submit(transfer, self.rng.randrange(2))

    def submit(self, transfer: Transfer, at: int) -> None:
        transfer.at, transfer.load = at, Load()
        transfer.request = self.both[at].add(
            transfer.d_id, transfer.prompt, None, self.rng.randint(1, 5)
        )

    def may_reuse(self, p_id: str, d_id: str) -> bool:
        return all(
            d_id not in x.scheduler.requests and d_id not in x.in_flight()
            for x in self.both
        )

    def step(self) -> None:
        for instance in self.both:
            instance.step()
        for transfer in list(self.live):
            if transfer.request.is_finished():
                self.check_end(transfer)
                self.live.remove(transfer)

    def abort_one(self, instance) -> None:
        live = [
            t
            for t in self.live
            if self.both[t.at] is instance and not t.request.is_finished()
        ]
        if live and self.draw_abort():
            transfer = self.rng.choice(live)
            self.abort(instance, transfer.request, "store")
            self.live.remove(transfer)
            self.free_ids.append((transfer.p_id, transfer.d_id))

    def misbehave(self) -> None:
        if not self.faults.draw("restart", 0.1):
            return
        at = self.rng.randrange(2)
        old = self.both[at]
        self.faults.counts["restart: an instance that stores"] += 1
        self.both[at] = self.start()
        self.before[at] = self.left(self.both[at])
        self.both[at].misreports.old = old.misreports.old
        for transfer in self.live:
            if transfer.at == at:
                self.submit(transfer, at)
