# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Find the connector in a MultiConnector that carries a request's payload.

A load's carrier is that of the connector chosen to load it. MultiConnector forgets its
choice when the request finishes, so the carrier is looked up when the load starts. A
producer's payload goes with the first connector that has a carrier for the request.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.support import serving_connector

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiConnector,
    )
    from vllm.v1.request import Request


def inherit_settings(outer: KVTransferConfig, inner: KVTransferConfig) -> None:
    """Copy the checksum settings of the outer configuration to a sub-connector's."""
    inner.enable_kv_checksum = outer.enable_kv_checksum
    inner.kv_checksum_fail_closed = outer.kv_checksum_fail_closed


def load_carrier(multi: MultiConnector, request: Request) -> KVChecksumCarrier | None:
    """Return a load's carrier: that of the sub-connector that loads it, or None."""
    connector = serving_connector(multi, request)
    if connector is multi:
        return None
    carrier: KVChecksumCarrier | None = connector.kv_checksum_carrier(
        request, receiving=True
    )
    return carrier


def send_route(
    connectors: Sequence[KVConnectorBase_V1], request: Request
) -> tuple[KVConnectorBase_V1 | None, KVChecksumCarrier | None]:
    """Return the sub-connector that takes a producer's payload, and its carrier.

    Both are None if there is none.
    """
    for connector in connectors:
        carrier = connector.kv_checksum_carrier(request, receiving=False)
        if carrier is not None:
            return connector, carrier
    return None, None
