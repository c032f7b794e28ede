"""LMCache's connector where there is no GPU: another copy engine, and nothing else.

LMCache copies between KV caches and its memory objects on several kinds of accelerators, not on CPUs: there it
finds no engine and goes on without a cache. Its adapter, chunks, token database, storage manager, back ends and
lookup run as they are. For ``--kv-transfer-config``::

    {
        "kv_connector": "LMCacheOnCPU",
        "kv_connector_module_path": "kv_checksum_rig.lmcache_cpu",
        "kv_role": "kv_both",
    }

LMCache lies in a folder of its own, which ``KV_CHECKSUM_RIG_LMCACHE`` names: this module puts it behind the
environment's packages, so that it shadows none of them. Loads can be damaged (``kv_checksum_rig.damage``); a chunk of
several blocks counts as one chunk.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import torch

from kv_checksum_rig.damage import Page, Tampering

if os.environ["KV_CHECKSUM_RIG_LMCACHE"] not in sys.path:
    sys.path.append(os.environ["KV_CHECKSUM_RIG_LMCACHE"])

import lmcache.v1.gpu_connector as engines  # noqa: E402
from lmcache.v1.gpu_connector.gpu_connectors import (  # noqa: E402
    GPUConnectorInterface,
)

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_connector import (  # noqa: E402
    LMCacheConnectorV1,
)


class BlockCopies(GPUConnectorInterface):
    """Copies whole blocks, as they lie in the cache, to and from LMCache's memory objects.

    A memory object has the bytes of its tokens' blocks; block by block, layer by layer, they are put one after the other.

    Args:
        shape: of a chunk's KV as LMCache counts it: layers, K and V, tokens, heads, head size.
        block_size: tokens per block.

    """

    def __init__(self, shape: Sequence[int], block_size: int) -> None:
        self._num_layers, _, _, heads, head_size = shape
        self._width = heads * head_size
        self._block_size = block_size
        self._tampering = Tampering()

    def get_shape(self, num_tokens: int) -> torch.Size:
        """Return the shape of a memory object for so many tokens."""
        return torch.Size([2, self._num_layers, num_tokens, self._width])

    def from_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Store the blocks of the tokens from ``start`` to ``end``."""
        self.batched_from_gpu([memory_obj], [start], [end], **kwargs)

    def to_gpu(self, memory_obj: Any, start: int, end: int, **kwargs: Any) -> None:
        """Load them."""
        self.batched_to_gpu([memory_obj], [start], [end], **kwargs)

    def batched_from_gpu(
        self, memory_objs: Any, starts: list[int], ends: list[int], **kwargs: Any
    ) -> None:
        """Store several runs of tokens."""
        pairs = self._pairs(memory_objs, starts, ends, kwargs)
        for block, page in pairs:
            caches = kwargs["kvcaches"]
            page.fill([_bytes(cache[block].contiguous()) for cache in caches])
        self._tampering.stored(page for _, page in pairs)

    def batched_to_gpu(
        self,
        memory_objs: Any = None,
        starts: list[int] | None = None,
        ends: list[int] | None = None,
        **kwargs: Any,
    ) -> None:
        """Load several runs of tokens, all of one request's load."""
        pairs = self._pairs(memory_objs, starts or [], ends or [], kwargs)
        restore = self._tampering.before_load([page for _, page in pairs])
        for block, page in pairs:
            for cache, kept in zip(kwargs["kvcaches"], page.layers, strict=True):
                target = cache[block]
                target.copy_(kept.view(target.dtype).view(target.shape))
        restore()

    def _pairs(
        self, objects: Any, starts: list[int], ends: list[int], given: dict[str, Any]
    ) -> list[tuple[int, Page]]:
        """Return each block of the cache that is named, and where it is kept."""
        size = self._block_size
        found = []
        for chunk, (kept, start, end) in enumerate(
            zip(objects, starts, ends, strict=True)
        ):
            slots = given["slot_mapping"][start:end:size].tolist()
            pages = _bytes(kept.tensor).view(len(slots), self._num_layers, -1)
            for n, slot in enumerate(slots):
                layers = tuple(pages[n].unbind())
                found.append((slot // size, Page(0, start // size + n, chunk, layers)))
        return found


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8).flatten()


class LMCacheOnCPU(LMCacheConnectorV1):
    """vLLM's LMCache connector with the copies above; for one KV cache group of full attention."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        size = vllm_config.cache_config.block_size

        def create(config: Any, metadata: Any, *args: Any, **kwargs: Any) -> Any:
            return BlockCopies(metadata.kv_shape, size)

        engines.CreateGPUConnector = create
        super().__init__(vllm_config, role, kv_cache_config)
