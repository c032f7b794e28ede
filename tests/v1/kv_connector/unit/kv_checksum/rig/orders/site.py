# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make an instance whose connector is made up, for walks over orders of events.

Scheduler, KV cache manager and the checksum code in the scheduler are real. KV is one
number per block and worker.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.payload import (
    GroupChecksums,
    KVChecksumPayload,
    encode,
    encode_text,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.binding import PromptDigests
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from .. import caches as u
from .. import instances as rig
from .. import reference

BLOCK, WORKERS, FINGERPRINT = 16, 2, 0x1234_5678_9ABC_DEF0
MASK = 2**64 - 1

PROMPTS = {"a": rig.tokens(40, 1), "b": rig.tokens(40, 1)[:32] + rig.tokens(24, 2)}
"""Two prompts that have two blocks in common."""

MODES: dict[str, dict[str, Any]] = {
    "open": dict(policy="recompute"),
    "fail": dict(kv_checksum_fail_closed=True, policy="fail"),
    "recompute": dict(kv_checksum_fail_closed=True, policy="recompute"),
}


@cache
def right_kv(prompt: tuple[int, ...], rank: int) -> int:
    """Return one worker's KV of the last block of a prompt."""
    digest = blake2b(repr((prompt, rank)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


@cache
def right_blocks(prompt: tuple[int, ...]) -> list[list[int]]:
    """Return every worker's part, per block."""
    ends = [min(at + BLOCK, len(prompt)) for at in range(0, len(prompt), BLOCK)]
    return [[right_kv(prompt[:end], rank) for rank in range(WORKERS)] for end in ends]


@cache
def right_payload(prompt: tuple[int, ...]) -> KVChecksumPayload:
    values = np.array([sum(b) & MASK for b in right_blocks(prompt)], np.uint64)
    group = GroupChecksums(FINGERPRINT, BLOCK, 0, values)
    digests = PromptDigests(*reference.prompt_digests(list(prompt)))
    return KVChecksumPayload(len(prompt), WORKERS, {0: group}, digests)


@cache
def payload_bytes(prompt: tuple[int, ...]) -> bytes:
    return encode(right_payload(prompt))


@cache
def payload_text(prompt: tuple[int, ...]) -> str:
    return encode_text(right_payload(prompt))


@cache
def other(prompt: tuple[int, ...]) -> tuple[int, ...]:
    """Return a prompt of as many tokens with no block in common."""
    return tuple(rig.tokens(len(prompt), 3))


@dataclass(frozen=True)
class Setup:
    """One instance.

    Attributes:
        mode: what a load that is not verified leads to.
        carrier: how checksums come, or "none", "undeclared" for a connector that
            knows nothing of them; of an instance that sends, how they go.
        is_async: whether loads are asynchronous.
        steps_ahead: steps that are scheduled before an output is awaited.
        role: "load", or "send" for a prefill instance.
        deferred: whether loads wait for the steps before them.

    """

    mode: str = "open"
    carrier: str = "kv_transfer_params"
    is_async: bool = True
    steps_ahead: int = 0
    role: str = "load"
    deferred: bool = False

    @property
    def loaded_once(self) -> bool:
        """Return whether KV is offered once, by a prefill instance, not a store."""
        return self.carrier in ("kv_transfer_params", "connector")

    @property
    def unchecked(self) -> bool:
        return not self.is_async or self.carrier in ("none", "undeclared")


# ---- the connector


@dataclass
class Metadata(KVConnectorMetadata):
    """The blocks that a step tells workers to load, by request id."""

    loads: dict[str, list[int]] = field(default_factory=dict)


class UndeclaredConnector(KVConnectorBase_V1):
    """The scheduler's side of a connector that knows nothing of checksums."""

    requires_kv_delivery = False

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.setup = Setup()
        self.forget()

    def forget(self) -> None:
        self.starting: dict[str, list[int]] = {}
        self.told: list[tuple[str, int, list[int]]] = []
        # Kept, because a request that is gone may leave its identity to another.
        self.used: dict[int, Any] = {}
        self.offered: dict[int, Any] = {}
        self.sent: dict[str, bytes] = {}

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        if self.setup.role == "send" or id(request) in self.used:
            return 0, False
        whole = request.num_prompt_tokens
        if not self.setup.loaded_once:
            whole = (whole - 1) // BLOCK * BLOCK
        found = max(0, whole - num_computed_tokens)
        if found:
            self.offered[id(request)] = request
        return found, self.setup.is_async and found > 0

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        if not num_external_tokens:
            return
        if self.setup.loaded_once:
            self.used[id(request)] = request
        (ids,) = blocks.get_block_ids()
        ids = ids[: -(-request.num_prompt_tokens // BLOCK)]
        if not self.setup.loaded_once:
            ids = ids[: (request.num_prompt_tokens - 1) // BLOCK]
        first = len(ids) - -(-num_external_tokens // BLOCK)
        self.starting[request.request_id] = ids[first:]
        self.told.append((request.request_id, first, ids[first:]))

    def build_connector_meta(self, scheduler_output):
        loads, self.starting = self.starting, {}
        return Metadata(loads)

    def request_finished(self, request, block_ids):
        return False, ({} if self.setup.role == "send" else None)

    def start_load_kv(self, forward_context, **kwargs): ...

    def wait_for_layer_load(self, layer_name): ...

    def save_kv_layer(self, layer_name, kv_layer, attn_metadata, **kwargs): ...

    def wait_for_save(self): ...


class CarryingConnector(UndeclaredConnector):
    """A connector that carries checksums, or stores them with the KV."""

    def kv_checksum_carrier(self, request, receiving):
        if receiving != (self.setup.role == "load") or not self.setup.loaded_once:
            return None
        return KVChecksumCarrier(self.setup.carrier)

    def get_kv_checksum_sources(self, request):
        return {self._cache_hit_source} if self.setup.carrier == "stored" else set()

    def on_kv_checksum_failure(self, request, mismatches): ...

    def send_kv_checksums(self, request, checksums):
        assert request.request_id not in self.sent, "sent twice"
        assert request.status == RequestStatus.FINISHED_LENGTH_CAPPED, "sent"
        self.sent[request.request_id] = checksums


class Site:
    """A scheduler that runs many orders, one after another."""

    def __init__(self, model: str, setup: Setup) -> None:
        self.setup = setup
        undeclared, sync = setup.carrier == "undeclared", not setup.is_async
        name = "UndeclaredConnector" if undeclared else "CarryingConnector"
        self.config = rig.vllm_config(
            model,
            # Prefill instances load, too, from stores; theirs frees blocks at once.
            "kv_producer" if setup.role == "send" or sync else "kv_consumer",
            block_size=BLOCK,
            num_blocks=24,
            tp=WORKERS,
            async_scheduling=setup.steps_ahead > 0,
            kv_connector=name,
            kv_connector_module_path=__name__,
            **rig.NO_LEDGER,
            **MODES[setup.mode],
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(BLOCK, sha256)
        self.sampling = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0)
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config,
            kv_cache_config=u.config(24, (u.names(0), u.full_spec(2, BLOCK, 8))),
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK,
            hash_block_size=BLOCK,
        )
        if setup.role == "send":
            self.scheduler.max_num_scheduled_tokens = 24  # prompts come in chunks
        self.scheduler.defer_block_free |= setup.deferred
        self.scheduler.defer_async_loads = setup.deferred
        self.checksums = self.scheduler.kv_checksum
        self.connector = self.scheduler.connector
        self.connector.setup = setup

    def left(self) -> dict[str, int]:
        """Return what the checksum code and the scheduler still hold and must not."""
        checksums = self.checksums
        sizes = {
            name: len(value)
            for part in (checksums, checksums._sends, checksums._judging)
            for name, value in vars(part).items()
            if isinstance(value, dict | list | set)
            and name not in ("stats", "_stats", "_skipped_groups")
        }
        sizes["scheduled"] = int(bool(self.checksums._scheduled))
        sizes["requests"] = len(self.scheduler.requests)
        pool = self.scheduler.kv_cache_manager.block_pool
        sizes["blocks"] = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()
        return {name: size for name, size in sizes.items() if size}


Choose = Callable[[Sequence[Any]], Any]
"""Takes one of several; the first is what usually happens."""
