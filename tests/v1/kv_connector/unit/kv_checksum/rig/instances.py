# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run P and D in one process.

Schedulers, scheduler sides of the connectors, checksum workers and aggregator are real.
The forward is fake, because there is no accelerator: it writes KV made from token ids
and positions. So is the transfer (see `transports`), unless an instance gets real
connector workers.
"""

from collections import Counter, deque
from contextlib import contextmanager
from dataclasses import replace
from math import lcm

import torch

from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.payload import PromptDigests
from vllm.distributed.kv_transfer.kv_checksum.testing.configuration import (
    HEAD_SIZE,
    HEADS,
    LAYERS,
    vllm_config,
    write_model,
)
from vllm.distributed.kv_transfer.kv_checksum.testing.forward import (
    make_request,
    runner_output,
    spans,
    token_kv,
    tokens,
)
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from . import caches as u
from . import loaded, reference, transports

__all__ = ["RequestStatus", "SchedulerOutput", "write_model"]

WITHOUT_CARRIER = dict(
    kv_connector="ExampleConnector",
    kv_connector_extra_config={"shared_storage_path": "unused"},
    kv_checksum_ledger_blocks=0,
)
"""Settings of a connector of vLLM's whose loads nobody checks."""

NO_LEDGER = dict(kv_checksum_ledger_blocks=0)
"""Settings with which loads that bring no checksums are checked by nobody."""

# For tensors this small, threads cost more than they bring.
torch.set_num_threads(1)

MODES = {
    "open": dict(),
    "fail": dict(kv_checksum_fail_closed=True, policy="fail"),
    "recompute": dict(kv_checksum_fail_closed=True, policy="recompute"),
}
"""Settings of fail-open, and of fail-closed with each policy."""


MADE: list["Instance"] | None = None
"""Every instance of the running test; None outside of tests, where nobody asks."""


@contextmanager
def every_load_has_one_verdict():
    """Hold every instance that is made meanwhile to it, at the end."""
    global MADE
    made = MADE = []
    yield
    MADE = None
    for instance in made:
        instance.assert_every_load_has_one_verdict()


class Instance:
    """One vLLM instance: scheduler, and per (PP, TP) rank caches and a worker.

    The scheduler knows its first worker's layers and heads alone, as vLLM has it.
    `window` adds a second KV cache group of sliding-window layers. No connector moves
    the groups in `kept`. `transport` moves KV and payloads.
    """

    def __init__(
        self,
        model,
        role,
        *,
        transport="pull",
        block_size=16,
        num_blocks=200,
        tp=1,
        pp=1,
        window=None,
        kept=(),
        **settings,
    ):
        self.kept = kept
        self.transport = transports.FAKES[transport]()
        self.config = vllm_config(
            model,
            role,
            block_size=block_size,
            num_blocks=num_blocks,
            tp=tp,
            pp=pp,
            **{"kv_connector": self.transport.connector, **settings},
        )
        self.num_blocks = num_blocks
        self.block_size, self.tp, self.pp = block_size, tp, pp
        self.specs = self.token_specs(window)
        self.layers = [self.layer_numbers(g) for g in range(len(self.specs))]
        groups = [
            (u.names(*n), s) for n, s in zip(self.layers, self.specs, strict=True)
        ]
        self.model_kv_config = self.make_kv_config(groups)
        # Fresh caches hold the previous owner's bytes.
        self.kv = {
            n: u.random_cache(num_blocks, self.specs[g], seed=hash((role, n)) % 999)
            for g, numbers in enumerate(self.layers)
            for n in numbers
        }
        ranks = [(stage, rank) for stage in range(pp) for rank in range(tp)]
        self.workers = [self.make_worker(self.model_kv_config, *r) for r in ranks]
        kv_config = self.kv_config = generate_scheduler_kv_cache_config(
            [self.worker_kv_config(self.model_kv_config, *r) for r in ranks]
        )
        # Tokens of a block id, over all ranks that tokens are dealt out to.
        span = block_size * self.config.parallel_config.decode_context_parallel_size
        init_none_hash(sha256)
        # With async scheduling, one step is scheduled before another has ended.
        self.steps: deque[SchedulerOutput] = deque()
        self.steps_ahead = int(self.config.scheduler_config.async_scheduling)
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=lcm(
                span, *(g.kv_cache_spec.block_size for g in kv_config.kv_cache_groups)
            ),
            hash_block_size=span,
            log_stats=True,
        )
        self.hasher = get_request_block_hasher(span, sha256)
        if MADE is not None:
            MADE.append(self)
        self.aggregator = KVOutputAggregator(tp * pp)
        self.results: dict[str, list] = {}
        self.stats: dict[str, int] = {}
        # What a fault drill does to a load's blocks before they are summed.
        self.damage = lambda instance, req_id, block_ids: None
        # What happens to a payload on its way: other bytes, or None for a loss.
        self.alter = lambda data: data
        # Told each worker's report of a step, before the scheduler is.
        self.on_reports = lambda reports: None
        self.intercept_payloads()
        self.hold_loads = False
        # Requests whose load no worker is asked to sum.
        self.unsummed: list[str] = []
        self.loads_compared = 0
        self.scheduled: list[tuple[str, int]] = []

    def token_specs(self, window):
        """Return the unsharded specs of the groups that hold tokens."""
        specs = [u.full_spec(HEADS, self.block_size, HEAD_SIZE)]
        if window:
            specs.append(
                SlidingWindowSpec(
                    block_size=self.block_size,
                    num_kv_heads=HEADS,
                    head_size=HEAD_SIZE,
                    dtype=torch.bfloat16,
                    sliding_window=window,
                )
            )
        return specs

    def make_kv_config(self, groups):
        return u.config(self.num_blocks, *groups, kept=self.kept)

    def layer_numbers(self, group: int) -> range:
        return range(group * LAYERS, (group + 1) * LAYERS)

    def caches_of(self, stage, rank):
        """Return the caches of one worker, by layer name."""
        heads = slice(rank * HEADS // self.tp, (rank + 1) * HEADS // self.tp)
        return {
            u.names(n)[0]: c[:, heads]
            for n, c in self.kv.items()
            if n % LAYERS * self.pp // LAYERS == stage
        }

    def layers_with_backends(self):
        """Return vLLM's layers, by name, whose backends are not those of attention."""
        return {}

    def local_spec(self, spec):
        """Return a group's spec as one TP rank has it."""
        return replace(spec, num_kv_heads=HEADS // self.tp)

    def worker_kv_config(self, kv_config, stage, rank):
        """Return the model's groups as one worker has them: its layers, its heads."""
        here = self.caches_of(stage, rank)
        groups = [
            replace(
                group,
                layer_names=[n for n in group.layer_names if n in here],
                kv_cache_spec=self.local_spec(group.kv_cache_spec),
            )
            for group in kv_config.kv_cache_groups
        ]
        return replace(kv_config, kv_cache_groups=groups)

    def make_worker(self, kv_config, stage, rank):
        return u.worker(
            self.worker_kv_config(kv_config, stage, rank),
            self.caches_of(stage, rank),
            tp_rank=rank,
            tp_size=self.tp,
            pp_rank=stage,
            uniform=HEADS,
        )

    def intercept_payloads(self):
        """Let `alter` at what a producer's scheduler hands to its connector."""
        connector = self.scheduler.connector
        send = connector.send_kv_checksums

        def altered(request, checksums):
            checksums = self.alter(checksums)
            if checksums is not None:
                send(request, checksums)

        connector.send_kv_checksums = altered

    # ---- requests

    def add(self, req_id, tokens, params, max_tokens=1, **settings):
        request = make_request(
            req_id, tokens, params, max_tokens, self.hasher, **settings
        )
        self.scheduler.add_request(request)
        return request

    def write(self, request, first, last):
        """Run the forward: write the KV of tokens ``[first, last)``."""
        rows = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        for group, numbers in enumerate(self.layers):
            at = torch.arange(first, last)
            blocks = torch.tensor(rows[group])[at // self.block_size]
            at, blocks = at[blocks != 0], blocks[blocks != 0]
            ids = torch.tensor(list(request.all_token_ids))[at]
            for n in numbers:
                self.kv[n][blocks, :, at % self.block_size] = self.cells(n, at, ids)

    def cells(self, layer, at, ids):
        """Return what the forward writes into a layer for tokens at some positions."""
        return token_kv(layer, at, ids)[:, : self.kv[layer].shape[1]]

    def right_cells(self, layer, at, ids):
        """Yield everything that the forward may write there."""
        yield self.cells(layer, at, ids)

    def step(self, producer=None):
        """Schedule a step and run the oldest; `producer` is where loads come from."""
        self.steps.append(self.schedule())
        if len(self.steps) <= self.steps_ahead:
            return None
        output = self.steps.popleft()
        self.before_forward(output)
        for req_id, (first, last) in spans(output).items():
            request = self.scheduler.requests.get(req_id)
            # Of a request that was preempted meanwhile, nothing counts.
            if request is not None and not request.num_stale_output_tokens:
                self.write(request, first, last)
            self.scheduled.append((req_id, last - first))
        reports = self.transport.step(self, producer, output)
        self.on_reports(reports)
        per_worker = [self.runner_output(output, report) for report in reports]
        model_output = self.aggregator.aggregate(per_worker)
        return self.finish_step(output, model_output)

    def schedule(self):
        """Schedule a step; what it sums must be what its connector is told to load."""
        output = self.scheduler.schedule()
        if self.scheduler.kv_checksum is not None:
            assert not (d := loaded.differences(output, self.kv_config)), d
            self.unsummed += loaded.unsummed(output, self.kv_config)
            self.loads_compared += len(
                loaded.loads_of(output.kv_connector_metadata, self.kv_config).by_request
            )
        return output

    def assert_every_load_has_one_verdict(self):
        """Check that each load started was judged, failed, aborted or is under way."""
        kv_checksum = self.scheduler.kv_checksum
        if kv_checksum is None:
            return
        stats = Counter(self.stats) + kv_checksum._stats
        judged = sum(n for key, n in stats.items() if key.startswith("loads:"))
        ended = stats.get("loads_failed", 0) + stats.get("loads_aborted", 0)
        under_way = len(kv_checksum._recvs)
        assert stats.get("loads_started", 0) == judged + ended + under_way, stats
        unchecked = ("no_carrier", "sync_load", "from_decode")
        not_checked = sum(stats[f"unverified:{r}"] for r in unchecked)
        assert len(self.unsummed) <= not_checked + ended + under_way

    def runner_output(self, output, kv_output):
        return runner_output(self.scheduler, output, kv_output)

    def finish_step(self, output, model_output):
        results = self.scheduler.update_from_output(output, model_output)
        for client in results.values():
            for out in client.outputs:
                self.results.setdefault(out.request_id, []).append(out)
            stats = client.scheduler_stats and client.scheduler_stats.kv_checksum_stats
            for key, number in (stats or {}).items():
                self.stats[key] = self.stats.get(key, 0) + number
        return results

    def before_forward(self, output) -> None:
        """What a connector loads in the step that uses it."""

    def copy_states(self, producer, ours, theirs) -> None:
        """Transfer what is not copied token by token; block ids are per group."""

    def loaded(self, req_id, block_ids) -> None:
        """Take notice that all of a load has arrived, in these blocks per group."""

    def answer_kv_is_right(self, request) -> bool:
        """Return whether the prompt's KV now is what a local prefill writes.

        Of a sliding window, all that the next token looks at.
        """
        rows = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        ids = torch.tensor(list(request.prompt_token_ids))
        for spec, numbers, row in zip(self.specs, self.layers, rows, strict=False):
            window = getattr(spec, "sliding_window", None) or len(ids) + 1
            at = torch.arange(max(0, len(ids) + 1 - window), len(ids))
            blocks = torch.tensor(row)[at // self.block_size]
            at, blocks = at[blocks != 0], blocks[blocks != 0]
            for n in numbers:
                held = self.kv[n][blocks, :, at % self.block_size].view(torch.uint8)
                right = [
                    (held == cells.view(torch.uint8)).flatten(1).all(1)
                    for cells in self.right_cells(n, at, ids[at])
                ]
                if not torch.stack(right).any(0).all():
                    return False
        return True

    def run(self, request, producer=None, steps=40):
        """Step, the producer too, until the request ends; its last output."""
        for _ in range(steps):
            if producer is not None:
                producer.step()
            self.step(producer)
            if RequestStatus.is_finished(request.status) and not self.held_answers():
                break
        return self.results[request.request_id][-1]

    def held_answers(self) -> int:
        """Return how many answers wait for the sums of what was decoded."""
        kv_checksum = self.scheduler.kv_checksum
        return 0 if kv_checksum is None else len(kv_checksum._sends.answers.by_name)

    def loads(self, outcome: str) -> int:
        """Return how many loads of this instance's carrier ended as `outcome`."""
        return self.stats.get(f"loads:{outcome}:{self.transport.carrier.value}", 0)

    def tables(self) -> dict[str, int]:
        """Return sizes of every checksum table of scheduler and workers."""
        kv_checksum = self.scheduler.kv_checksum
        if kv_checksum is None:
            return {}
        sizes = {
            "sends": len(kv_checksum._sends.pending),
            "recvs": len(kv_checksum._recvs),
        }
        sizes["scheduled"] = bool(kv_checksum._scheduled)
        sizes["traces"] = len(kv_checksum._traces or ())
        sizes["answers"] = self.held_answers()
        for i, worker in enumerate(self.workers):
            sizes[f"worker{i}"] = len(worker._recvs) + len(worker._sends)
        sizes |= transports.scheduler_tables(self.scheduler.connector)
        return sizes | self.transport.tables()


def prefill(p: Instance, req_id, tokens, max_tokens=1):
    """Run a prompt on P; what D's request needs to load it."""
    params = p.transport.producer_params(req_id)
    request = p.add(req_id, tokens, params, max_tokens)
    answer = p.run(request).kv_transfer_params
    # The step that hands the finished blocks to the workers.
    p.step()
    return p.transport.consumer_params(p, params, answer)


def pair(model, p=None, d=None, **both):
    """Return a producer and a consumer, with settings of each and of both."""
    return (
        Instance(model, "kv_producer", **{**both, **(p or {})}),
        Instance(model, "kv_consumer", **{**both, **(d or {})}),
    )


def load(p, d, number, req_id="r", prompt=None):
    """Prefill on P, load on D; D's request and its last output."""
    prompt = prompt or tokens(number)
    params = prefill(p, f"p-{req_id}", prompt)
    request = d.add(req_id, prompt, params, max_tokens=2)
    return request, d.run(request, p)


def flip_bit(instance, req_id, block_ids):
    if block_ids:
        cell = instance.kv[1][block_ids[len(block_ids) // 2]].view(torch.uint8)
        cell[1, 0, 3] ^= 4


def change_payload(change):
    def apply(data):
        payload = wire.decode(data)
        change(payload)
        return wire.encode(payload)

    return apply


def fewer_tokens(payload):
    """Leave the first 40 of 100 tokens."""
    (prompt,) = (
        tokens(100, seed)
        for seed in range(3)
        if reference.prompt_digests(tokens(100, seed)) == payload.prompt
    )
    payload.prompt = PromptDigests(*reference.prompt_digests(prompt[:40]))
    payload.num_tokens = 40
    payload.groups[0].values = payload.groups[0].values[:3]
