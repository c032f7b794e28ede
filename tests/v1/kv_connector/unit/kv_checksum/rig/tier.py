# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""An instance whose connector keeps KV by block hash and brings no checksums.

Real scheduler and real checksum workers. What is fake: the tier and its connector (a
dictionary; the tests of real servers use vLLM's OffloadingConnector and LMCache) and
the forward. The tier keeps what was stored first, as real ones do.
"""

from dataclasses import dataclass, field

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput

from . import instances as rig


@dataclass
class Load:
    """Blocks that one request loads: hash, position and id, by KV cache group.

    `num_tokens` are local or loaded: the last block may hold others behind them.
    """

    blocks: dict[int, list[tuple[bytes, int, int]]]
    is_sync: bool
    num_tokens: int
    steps_left: int = 0

    def ids(self) -> dict[int, list[int]]:
        return {g: [i for _, _, i in blocks] for g, blocks in self.blocks.items()}


@dataclass
class Metadata(KVConnectorMetadata):
    loads: dict[str, Load] = field(default_factory=dict)
    saves: list[tuple[int, bytes, int]] = field(default_factory=list)

    def loads_by_request(self):
        """Block ids per request and group, to hold against what is summed."""
        return {req_id: load.ids() for req_id, load in self.loads.items()}


class TierConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side; `TierInstance` moves the blocks."""

    requires_kv_delivery = False

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self.is_sync = extra.get("sync", False)
        self.limits = extra.get("limits", False)
        # Tokens of a prompt that are never offered, and whether whole blocks are.
        self.leave = extra.get("leave", 1)
        self.whole = extra.get("whole", False)
        self.stored: dict[tuple[int, bytes], dict] = {}
        self.offers = True
        # Tokens that are local, by request, when the connector was asked.
        self.local: dict[str, int] = {}
        self.ledger = None
        self._requests: dict = {}
        self._loads: dict[str, Load] = {}
        groups = kv_cache_config.kv_cache_groups
        # What vLLM's own tiers hold: no rings.
        self.specs = {
            i: groups[i].kv_cache_spec
            for i in kv_cache_config.prefix_cacheable_group_ids
        }

    def bind_kv_cache_manager(self, kv_cache_manager):
        self._kv_cache_manager = kv_cache_manager

    def set_kv_checksum_ledger(self, ledger):
        self.ledger = ledger

    def _has(self, request, num_tokens) -> bool:
        for group_id, spec in self.specs.items():
            stop = num_tokens // spec.block_size
            first = 0
            if isinstance(spec, SlidingWindowSpec):
                first = max(0, num_tokens - spec.sliding_window + 1) // spec.block_size
            hashes = request.block_hashes[first:stop]
            if not all((group_id, h) in self.stored for h in hashes):
                return False
        return True

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        self.local[request.request_id] = num_computed_tokens
        return self._found(request, num_computed_tokens, request.num_tokens)

    def limit_matched_tokens(self, request, num_computed_tokens, max_num_new_tokens):
        if not self.limits:
            return 0, False
        return self._found(
            request, num_computed_tokens, num_computed_tokens + max_num_new_tokens
        )

    def _found(self, request, num_computed_tokens, most):
        if not self.offers or request.skip_reading_prefix_cache:
            return 0, False
        size = self.specs[0].block_size
        found = num_computed_tokens
        for tokens in range(size, most + 1, size):
            if self._has(request, tokens):
                found = max(found, tokens)
        found = min(found, request.num_tokens - self.leave)
        if self.whole:
            found -= found % size
        number = max(0, found - num_computed_tokens)
        return number, bool(number) and not self.is_sync

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        self._requests[request.request_id] = request
        if not num_external_tokens:
            return
        size = self.specs[0].block_size
        rows = blocks.get_block_ids()
        total = self.local[request.request_id] + num_external_tokens
        load = Load({}, self.is_sync, total)
        for group_id in self.specs:
            first = (total - num_external_tokens) // size
            stop = -(-total // size)
            load.blocks[group_id] = [
                (request.block_hashes[at], at, rows[group_id][at])
                for at in range(first, stop)
                if rows[group_id][at]
            ]
        self._loads[request.request_id] = load

    def build_connector_meta(self, scheduler_output):
        meta = Metadata(loads=self._loads)
        self._loads = {}
        for req_id, number in scheduler_output.num_scheduled_tokens.items():
            request = self._requests[req_id]
            rows = self._kv_cache_manager.get_block_ids(req_id)
            done = min(request.num_computed_tokens + number, request.num_tokens)
            for group_id, spec in self.specs.items():
                for at in range(done // spec.block_size):
                    if at < len(request.block_hashes) and rows[group_id][at]:
                        key = request.block_hashes[at]
                        meta.saves.append((group_id, key, rows[group_id][at]))
                        if self.ledger and (group_id, key) not in self.stored:
                            self.ledger.allow_stored(request, group_id, at, at + 1)
        return meta

    def request_finished(self, request, block_ids):
        return False, None

    def request_finished_all_groups(self, request, block_ids):
        self._requests.pop(request.request_id, None)
        return False, None

    def start_load_kv(self, forward_context, **kwargs): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self): ...


class TierWorkers:
    """In place of the connector's workers: moves blocks, and runs checksum workers."""

    carrier = None
    connector = "TierConnector"

    def __init__(self, delay: int = 0):
        self.delay = delay
        self.running: dict[str, Load] = {}

    def tables(self):
        return {}

    def step(self, instance, producer, output):
        meta = output.kv_connector_metadata
        for req_id, load in meta.loads.items():
            if not load.is_sync:
                load.steps_left = self.delay
                self.running[req_id] = load
        finished = {r for r, load in self.running.items() if not load.steps_left}
        for req_id, load in list(self.running.items()):
            load.steps_left -= 1
            if req_id in finished:
                instance.load(self.running.pop(req_id))
        reports = []
        for worker in instance.workers:
            worker.bind(output.kv_checksum_scheduled)
            report = KVConnectorOutput(finished_recving=finished or None)
            report.kv_checksums = worker.post_forward(
                finished, set(), output.finished_req_ids
            )
            reports.append(report)
        for save in meta.saves:
            instance.save(*save)
        return reports


class TierInstance(rig.Instance):
    """An instance that stores every full block, and loads what it has no more."""

    def __init__(
        self,
        model,
        *,
        delay=0,
        sync=False,
        limits=False,
        leave=1,
        whole=False,
        drill=None,
        **settings,
    ):
        extra = dict(sync=sync, limits=limits, leave=leave, whole=whole)
        connector = dict(
            kv_connector="TierConnector",
            kv_connector_module_path=__name__,
            kv_connector_extra_config=extra,
        )
        if drill is not None:
            # It comes with a later patch than the ledger.
            from vllm.distributed.kv_transfer.kv_checksum.fault_drill.connector import (
                KVChecksumFaultDrill,
            )

            options = {**drill, "connector": "TierConnector"}
            options["connector_module_path"] = __name__
            connector = dict(
                kv_connector=KVChecksumFaultDrill.__name__,
                kv_connector_module_path=KVChecksumFaultDrill.__module__,
                kv_connector_extra_config={**extra, "kv_checksum_fault_drill": options},
            )
        super().__init__(model, "kv_both", **connector, **settings)
        self.transport = TierWorkers(delay)
        self.tier = self.scheduler.connector
        self.loaded_blocks: list[dict[int, list[int]]] = []
        # Changes a load's blocks, per group, once they have arrived.
        self.spoil = lambda instance, load: None

    def before_forward(self, output):
        for load in output.kv_connector_metadata.loads.values():
            if load.is_sync:
                self.load(load)

    def load(self, load: Load):
        for group_id, blocks in load.blocks.items():
            for block_hash, _, block_id in blocks:
                value = self.tier.stored[group_id, block_hash]
                for n, kv in value.items():
                    self.cache(n)[block_id] = kv
        self.loaded_blocks.append(load.ids())
        self.spoil(self, load)

    def cache(self, layer):
        return self.kv[layer]

    def layers_of(self, group_id):
        return self.layers[group_id]

    def save(self, group_id, block_hash, block_id):
        if (group_id, block_hash) not in self.tier.stored:
            self.tier.stored[group_id, block_hash] = {
                n: self.cache(n)[block_id].clone() for n in self.layers_of(group_id)
            }

    def outcome(self, verdict: str) -> int:
        return self.stats.get(f"loads:{verdict}:ledger", 0)

    def ask(self, req_id, prompt, max_tokens=2, **kwargs):
        """Run a request to its end; its last output."""
        return self.run(self.add(req_id, prompt, None, max_tokens), **kwargs)

    def evict(self):
        """Run prompts until no block of the ones before is left in the cache."""
        self.tier.offers = False
        blocks = (self.num_blocks - 3) // len(self.specs)
        for i in range(3):
            prompt = rig.tokens(blocks * 16 - 40, 10_000 + i)
            self.ask(f"evict{i}-{len(self.results)}", prompt, max_tokens=1)
        self.tier.offers = True


def flip_bit(instance, load, group_id=0, at=-1, layer=1):
    """Change one bit of one loaded block."""
    _, _, block_id = load.blocks[group_id][at]
    cell = instance.kv[instance.layers[group_id][layer]][block_id].view(torch.uint8)
    cell[1, 0, 3] ^= 4


# ---- what tests of the ledger begin with

SYNC = {"async": dict(), "sync": dict(sync=True), "late": dict(delay=3)}

PROMPT = rig.tokens(200)


def make(model, *, num_blocks=40, **settings):
    return TierInstance(model, num_blocks=num_blocks, **settings)


def first_use(model, prompt=PROMPT, **settings):
    """Return an instance that has computed a prompt and holds it in the tier alone."""
    d = make(model, **settings)
    assert d.ask("first", prompt).finish_reason == FinishReason.LENGTH
    d.evict()
    return d


def ended_well(d, req_id):
    return d.results[req_id][-1].finish_reason == FinishReason.LENGTH


def served_on_wrong_kv(d):
    """Collect requests that get a token while their prompt's KV is not right."""
    served, finish_step = set(), d.finish_step

    def finish(output, model_output):
        here = output.num_scheduled_tokens.keys() & d.scheduler.requests.keys()
        requests = [d.scheduler.requests[r] for r in here]
        wrong = {
            r.request_id
            for r in requests
            if r.status == rig.RequestStatus.RUNNING and not d.answer_kv_is_right(r)
        }
        results = finish_step(output, model_output)
        for client in results.values():
            served.update(
                wrong & {o.request_id for o in client.outputs if o.new_token_ids}
            )
        return results

    d.finish_step = finish
    return served


def tokens_of(d, req_id):
    return [t for out in d.results.get(req_id, ()) for t in out.new_token_ids]
