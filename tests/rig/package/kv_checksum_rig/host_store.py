"""Load KV in the very step that uses it, by connectors outside vLLM's tree.

``HostStore`` keeps the blocks of prompts in the memory of its process, by block hash. ``HostStoreWithCarrier`` says
besides that its loads bring KV checksums, so that nothing is known of its synchronous loads before one is offered.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)

_stored: dict[bytes, list[torch.Tensor]] = {}
"""Copies of blocks, layer by layer. Both halves of the connector live in one process."""


@dataclass
class Blocks(KVConnectorMetadata):
    """The blocks that one step loads and saves: hashes and ids."""

    loads: list[tuple[bytes, int]] = field(default_factory=list)
    saves: list[tuple[bytes, int]] = field(default_factory=list)


class HostStore(KVConnectorBase_V1):
    """See the module's docstring. For one process and one KV cache group."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        (group,) = kv_cache_config.kv_cache_groups
        self._size: int = group.kv_cache_spec.block_size
        self._step = Blocks()
        self._prompts: dict[str, Any] = {}
        self._local: dict[str, int] = {}
        self._layers: list[torch.Tensor] = []

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """Offer the stored blocks that follow, but for the prompt's last token."""
        self._prompts[request.request_id] = request
        self._local[request.request_id] = num_computed_tokens
        found = 0
        for block_hash in request.block_hashes[
            : (request.num_tokens - 1) // self._size
        ]:
            if block_hash not in _stored:
                break
            found += self._size
        return max(0, found - num_computed_tokens), False

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        """Load what was offered."""
        ids = blocks.get_block_ids()[0]
        first = self._local.pop(request.request_id) // self._size
        stop = first + num_external_tokens // self._size
        hashes = request.block_hashes[first:stop]
        self._step.loads += zip(hashes, ids[first:stop], strict=True)

    def build_connector_meta(self, scheduler_output: Any) -> Blocks:
        """Tell the other half what to load, and which prompts' blocks to save."""
        for new in scheduler_output.scheduled_new_reqs:
            request = self._prompts.pop(new.req_id)
            number = request.num_prompt_tokens // self._size
            hashes = request.block_hashes[:number]
            self._step.saves += zip(hashes, new.block_ids[0][:number], strict=True)
        step, self._step = self._step, Blocks()
        return step

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Keep the layers; their first dim is that of blocks."""
        self._layers = list(kv_caches.values())

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Copy the step's loads into the cache."""
        for block_hash, block in self._step_metadata().loads:
            for layer, copy in zip(self._layers, _stored[block_hash], strict=True):
                layer[block].copy_(copy)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: loads are done when they were started."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing: whole blocks are saved after the step."""

    def wait_for_save(self) -> None:
        """Copy the prompts' blocks out of the cache."""
        for block_hash, block in self._step_metadata().saves:
            if block_hash not in _stored:
                _stored[block_hash] = [layer[block].clone() for layer in self._layers]

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
