# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Prepare one process for connectors' worker sides, and end them in it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed import parallel_state
from vllm.utils.network_utils import get_distributed_init_method, get_open_port

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


def start_groups(port: int | None = None) -> None:
    """Start the process groups of one process alone, unless they are there.

    Args:
        port: where they meet; a free one by default.

    """
    if not parallel_state.model_parallel_is_initialized():
        address = get_distributed_init_method("127.0.0.1", port or get_open_port())
        parallel_state.init_distributed_environment(1, 0, address, 0, backend="gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)


def shut_down(connector: KVConnectorBase_V1) -> None:
    """Shut a worker side down, with the NIXL agent whose threads outlive it.

    A server's process ends next. Here one goes on, and such a thread can poll without
    a pause: what ran after it took ten times as long.
    """
    connector.shutdown()
    for one in getattr(connector, "sub_connectors", None) or [connector]:
        side = getattr(one, "connector_worker", None)
        if agent := getattr(side, "nixl_wrapper", None):
            del agent.agent
