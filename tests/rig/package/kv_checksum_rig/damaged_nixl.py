"""Lose or damage the first block of a KV cache group in NIXL connectors, between the transfer and the first look at it.

Which block that is, they take from what NIXL was told to transfer, not from what is summed. For
``kv_connector_extra_config``: ``{"lost_block": {"group": 2, "prefix": "lost-"}}`` names the group and what the client's
ids of the requests begin with. The block is zeroed, or with ``"flip": true`` one bit of it is flipped.
"""

from __future__ import annotations

import logging
from typing import Any

import torch

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlPullConnector,
    NixlPushConnector,
)

SAYS = "KV CHECKSUM RIG: lost"

logger = logging.getLogger("vllm.kv_checksum_rig")


class _LosesABlock:
    """A mixin for the worker side of NIXL connectors: loses or damages a block."""

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Note the group's layers."""
        this: Any = self
        options = this._kv_transfer_config.kv_connector_extra_config["lost_block"]
        self._group: int = options["group"]
        self._prefix: str = options["prefix"]
        self._flip: bool = options.get("flip", False)
        group = this._kv_cache_config.kv_cache_groups[self._group]
        self._damaged = [kv_caches[name] for name in group.layer_names]
        self._first: dict[str, int] = {}
        super().register_kv_caches(kv_caches)  # type: ignore[misc]

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        """Note the first block that is transferred of the group."""
        this: Any = self
        groups = list(this._kv_cache_config.transfer_group_ids)
        for req_id, meta in connector_metadata.reqs_to_recv.items():
            # Empty where P is told that nothing will be loaded.
            by_group = dict(zip(groups, meta.local_block_ids, strict=False))
            blocks = by_group.get(self._group)
            if self._prefix in req_id and blocks:
                self._first[req_id] = int(blocks[0])
        super().bind_connector_metadata(connector_metadata)  # type: ignore[misc]

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """Damage it once its load has finished."""
        results = super().get_transfer_results(finished_req_ids)  # type: ignore[misc]
        for req_id in results.finished_recving & self._first.keys():
            block = self._first.pop(req_id)
            if self._flip:
                data = self._damaged[-1][block].view(torch.uint8)
                data[(0,) * data.dim()] ^= 1
            else:
                for layer in self._damaged:
                    layer[block].zero_()
            logger.info("%s block %d of %s", SAYS, block, req_id)
        return results


class LossyNixlConnector(_LosesABlock, NixlPullConnector):
    """NIXL pull that loses or damages a block."""


class LossyNixlPushConnector(_LosesABlock, NixlPushConnector):
    """NIXL push that loses or damages a block."""
