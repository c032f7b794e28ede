"""Keep blocks in the memory of a process, by block hash: connectors outside vLLM's tree.

``HostStore`` loads in the very step that uses what it loads. Settings in ``kv_connector_extra_config``:

- ``asynchronous``: loads last ``load_steps`` steps (default 2) instead, and the request waits for them.
- ``notices``: the connector sees by itself that a block is not what it stored, and tells vLLM that it could not be loaded.
- ``replace``: a block that is computed again takes the place of the one that is kept (default: the first one stays).

Loads can be damaged (``kv_checksum_rig.damage``).

``HostStoreWithCarrier`` says besides that its loads bring KV checksums, so that nothing is known of its synchronous loads
before one is offered.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch

from kv_checksum_rig.damage import Page, Tampering
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

_stored: dict[tuple[int, bytes], Page] = {}
"""Blocks by KV cache group and hash. Both halves of the connector live in one process."""


_digests: dict[tuple[int, bytes], int] = {}
"""What the blocks held when they were stored."""


def _digest(page: Page) -> int:
    value = 0
    for layer in page.layers:
        value = zlib.crc32(layer.numpy(), value)
    return value


@dataclass(frozen=True)
class Block:
    """A block to load or to save."""

    group: int
    position: int
    block_hash: bytes
    block_id: int

    @property
    def key(self) -> tuple[int, bytes]:
        """Return under what it is kept."""
        return self.group, self.block_hash


@dataclass
class Blocks(KVConnectorMetadata):
    """What one step loads, by request, and saves."""

    loads: dict[str, list[Block]] = field(default_factory=dict)
    saves: list[Block] = field(default_factory=list)

    def loads_by_request(self) -> dict[str, dict[int, list[int]]]:
        """Return the ids of the blocks that are loaded, by request and KV cache group."""
        found: dict[str, dict[int, list[int]]] = {}
        for req_id, blocks in self.loads.items():
            groups = found.setdefault(req_id, {})
            for block in blocks:
                groups.setdefault(block.group, []).append(block.block_id)
        return found


class HostStore(KVConnectorBase_V1, SupportsHMA):
    """See the module's docstring. For one process, and groups of one block size."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        (self._size,) = {group.kv_cache_spec.block_size for group in groups}
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        self._asynchronous: bool = extra.get("asynchronous", False)
        self._load_steps: int = extra.get("load_steps", 2)
        self._replace: bool = extra.get("replace", False)
        self._notices: bool = extra.get("notices", False)
        # Scheduler: this step's blocks, and requests with what is known of them.
        self._step = Blocks()
        self._requests: dict[str, Any] = {}
        self._local: dict[str, int] = {}
        self._saved: dict[str, int] = {}
        # Worker: layers by group, and how long loads still last.
        self._layers: list[list[torch.Tensor]] = []
        self._lasting: dict[str, int] = {}
        self._invalid: set[int] = set()
        self._tampering = Tampering()

    # ---- scheduler side

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Offer the stored blocks that follow, but for the prompt's last token."""
        self._requests[request.request_id] = request
        self._local[request.request_id] = num_computed_tokens
        found = 0
        for block_hash in request.block_hashes[
            : (request.num_tokens - 1) // self._size
        ]:
            if (0, block_hash) not in _stored:
                break
            found += self._size
        offered = max(0, found - num_computed_tokens)
        return offered, self._asynchronous and offered > 0

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Load what was offered, into the blocks that are not null."""
        first = self._local.get(request.request_id, 0) // self._size
        stop = first + num_external_tokens // self._size
        if stop > first:
            self._step.loads[request.request_id] = [
                Block(group, position, request.block_hashes[position], ids[position])
                for group, ids in enumerate(blocks.get_block_ids())
                for position in range(first, stop)
                if ids[position]
            ]
            self._saved[request.request_id] = stop

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        """Tell the other half what to load, and which blocks are full after this step."""
        computed = {
            new.req_id: new.num_computed_tokens
            for new in scheduler_output.scheduled_new_reqs
        }
        cached = scheduler_output.scheduled_cached_reqs
        computed.update(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for req_id, number in scheduler_output.num_scheduled_tokens.items():
            self._save_full_blocks(req_id, computed[req_id], number)
        for req_id in scheduler_output.finished_req_ids:
            for known in (self._requests, self._local, self._saved):
                known.pop(req_id, None)
        step, self._step = self._step, Blocks()
        return step

    def _save_full_blocks(self, req_id: str, computed: int, number: int) -> None:
        request = self._requests[req_id]
        # A token that is still being sampled has no hash yet.
        stop = min((computed + number) // self._size, len(request.block_hashes))
        # A load that failed is computed after all.
        first = min(self._saved.get(req_id, 0), computed // self._size)
        assert self._kv_cache_manager is not None
        for group, ids in enumerate(self._kv_cache_manager.get_block_ids(req_id)):
            self._step.saves += [
                Block(group, position, request.block_hashes[position], ids[position])
                for position in range(first, stop)
                if ids[position]
            ]
        self._saved[req_id] = max(first, stop)

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep each group's layers; their first dim is that of blocks."""
        self._layers = [
            [kv_caches[name] for name in group.layer_names]
            for group in self._kv_cache_config.kv_cache_groups
        ]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy the step's loads into the cache."""
        for req_id, blocks in self._step_metadata().loads.items():
            pages = [_stored[block.key] for block in blocks]
            restore = self._tampering.before_load(pages)
            if self._notices:
                self._invalid |= {
                    block.block_id
                    for block, page in zip(blocks, pages, strict=True)
                    if _digest(page) != _digests[block.key]
                }
            for block, page in zip(blocks, pages, strict=True):
                for layer, kept in zip(
                    self._layers[block.group], page.layers, strict=True
                ):
                    target = layer[block.block_id]
                    target.copy_(kept.view(target.dtype).view(target.shape))
            restore()
            if self._asynchronous:
                self._lasting[req_id] = self._load_steps

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are done when they were started."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """Copy full blocks out of the cache."""
        for block in self._step_metadata().saves:
            if block.key not in _stored or self._replace:
                layers = tuple(
                    layer[block.block_id]
                    .contiguous()
                    .view(torch.uint8)
                    .flatten()
                    .clone()
                    for layer in self._layers[block.group]
                )
                page = Page(block.group, block.position, len(_stored), layers)
                _stored[block.key] = page
                _digests[block.key] = _digest(page)
                self._tampering.stored([page])

    def get_block_ids_with_load_errors(self) -> set[int]:
        """Name the blocks that are not what was stored."""
        invalid, self._invalid = self._invalid, set()
        return invalid

    def get_finished(
        self, finished_req_ids: set[str]
    ) -> tuple[set[str] | None, set[str] | None]:
        """Let a step pass, and name the requests whose loads are over."""
        over = {req_id for req_id, left in self._lasting.items() if left <= 0}
        self._lasting = {
            req_id: left - 1
            for req_id, left in self._lasting.items()
            if req_id not in over
        }
        return None, over or None

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Leave the request's blocks to vLLM: they were saved in their steps."""
        return False, None

    def _step_metadata(self) -> Blocks:
        step = self._get_connector_metadata()
        assert isinstance(step, Blocks)
        return step


class HostStoreWithCarrier(HostStore):
    """The same, of a connector that claims to carry checksums."""

    def kv_checksum_carrier(
        self, request: Any, receiving: bool
    ) -> KVChecksumCarrier | None:
        """Say that loads bring them."""
        return KVChecksumCarrier.CONNECTOR if receiving else None
