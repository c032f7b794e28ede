# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Describe a connector to the suite."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_checksum.testing.instance import Instance
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1


class ConnectorFactory:
    """Says how to make a connector, and what goes from its producer to its consumer.

    Subclass it and override what differs. vLLM's own factory makes both sides of the
    connector from `settings`, as it does in a server.

    Attributes:
        connector: the connector's name.
        module_path: the module that has it; None if it is registered with vLLM.
        extra_config: its ``kv_connector_extra_config``.
        carrier: what its loads are to be compared with.
        loads_own: whether an instance loads only what it stored itself. It always is
            so with `KVChecksumCarrier.LEDGER`.
        block_size: tokens per block.
        timeout_s: how long one load may take.

    """

    connector: str = ""
    module_path: str | None = None
    extra_config: dict[str, Any] = {}
    carrier: KVChecksumCarrier = KVChecksumCarrier.CONNECTOR
    loads_own: bool = False
    block_size: int = 16
    timeout_s: float = 10.0

    def settings(self, role: str) -> dict[str, Any]:
        """Return the settings of ``--kv-transfer-config`` for a ``kv_role``."""
        return dict(
            kv_connector=self.connector,
            kv_connector_module_path=self.module_path,
            kv_connector_extra_config=dict(self.extra_config),
        )

    def surroundings(self) -> AbstractContextManager[Any]:
        """Return what is entered around the whole suite: servers, stand-ins."""
        return nullcontext()

    def starting(self, role: str) -> AbstractContextManager[Any]:
        """Return what is entered while an instance starts, such as its environment."""
        return nullcontext()

    def started(self, instance: Instance) -> None:
        """Take notice of an instance, whose ``scheduler`` and ``worker`` exist."""

    def producer_params(self, req_id: str) -> dict[str, Any]:
        """Return the ``kv_transfer_params`` with which a router asks the producer."""
        return dict(do_remote_decode=True, do_remote_prefill=False)

    def consumer_params(
        self, producer: Instance, params: dict[str, Any], answer: dict[str, Any] | None
    ) -> dict[str, Any] | None:
        """Return the ``kv_transfer_params`` with which it asks the consumer.

        Args:
            producer: the instance that computed the prompt.
            params: those with which it was asked.
            answer: those that it answered.

        """
        return answer

    def wait_until_stored(self, instance: Instance) -> None:
        """Wait until what an instance computed can be loaded (stored checksums)."""
        for _ in range(20):
            instance.step()
            time.sleep(0.001)

    def close(self, scheduler_side: KVConnectorBase_V1) -> None:
        """End the scheduler side of a connector, whose worker side has ended."""
        scheduler_side.shutdown()
