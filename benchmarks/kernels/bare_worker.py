# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Build the real worker over layers that are given, where vLLM may not be installed.

vLLM's part, which finds the layers of a KV cache configuration, is left out.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from without_vllm import stand_in_for_vllm

stand_in_for_vllm()

from vllm.distributed.kv_transfer.kv_checksum.worker import worker as worker_module  # noqa: E402
from vllm.distributed.kv_transfer.kv_checksum.worker.views import (  # noqa: E402
    GroupView,
    LayerView,
)


def bare_worker(
    groups: Mapping[int, tuple[int, Sequence[LayerView]]],
) -> worker_module.KVChecksumWorker:
    """Return a worker of groups: per id, tokens per block and the layers."""
    views = {
        group_id: GroupView(group_id, block_size, list(layers), 0, ((1, 0),))
        for group_id, (block_size, layers) in groups.items()
    }
    blocks = [layer.blocks for _, layers in groups.values() for layer in layers]
    config: Any = SimpleNamespace(
        transfer_group_ids=list(groups),
        kv_cache_groups=dict.fromkeys(groups),
        num_blocks=len(blocks[0]),
    )
    caches = {str(number): cache for number, cache in enumerate(blocks)}
    with (
        patch.object(worker_module, "build_group", lambda i, *_: views[i]),
        patch.object(worker_module, "describe_group", lambda _: "given layers"),
    ):
        return worker_module.KVChecksumWorker(
            config, caches, tp_rank=0, tp_size=1, pp_rank=0, uniform_kv_heads=None
        )
