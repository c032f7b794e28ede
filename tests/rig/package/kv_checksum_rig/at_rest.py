"""Look at, and damage, KV that lies in a worker's cache between two requests.

A worker extension: start a server with ``--worker-extension-cls kv_checksum_rig.at_rest.KVAtRest`` and
``VLLM_SERVER_DEV_MODE=1``, and call its methods through ``/collective_rpc`` (``rig.tampering`` does). They run between two
steps, where no forward writes.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch


class KVAtRest:
    """Methods that vLLM adds to its worker."""

    def rig_block_digests(self) -> dict[str, list[str]]:
        """Return a digest of every block's bytes, by layer."""
        return {
            name: [
                hashlib.blake2b(block.numpy().tobytes(), digest_size=8).hexdigest()
                for block in blocks
            ]
            for name, blocks in self._rig_blocks().items()
        }

    def rig_flip_bit(
        self, block: str, layer: str = "0", byte: str = "0", bit: str = "0"
    ) -> dict[str, Any]:
        """Flip one bit of a block of a layer, the first layer being number 0.

        The bytes of a block are counted in the order in which the cache's dims are.
        """
        name, blocks = list(self._rig_blocks().items())[int(layer)]
        data = blocks[int(block)]
        at = torch.unravel_index(torch.tensor(int(byte)), data.shape)
        old = int(data[at])
        data[at] = old ^ (1 << int(bit))
        return {"layer": name, "before": old, "after": int(data[at])}

    def _rig_blocks(self) -> dict[str, torch.Tensor]:
        """View every layer's cache as bytes, the first dim being that of blocks."""
        this: Any = self
        config = this.model_runner.kv_cache_config
        layers = this.model_runner.compilation_config.static_forward_context
        found = {}
        for group in config.kv_cache_groups:
            for name in group.layer_names:
                cache = layers[name].kv_cache
                found[name] = cache.view(torch.uint8).unflatten(
                    0, (config.num_blocks, -1)
                )
        return found
