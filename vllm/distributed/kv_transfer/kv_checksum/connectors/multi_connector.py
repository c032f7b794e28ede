# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""MultiConnector: which of its connectors carries a request's payload.

A load's carrier is that of the connector chosen to load it. MultiConnector forgets its
choice when the request finishes, so the carrier is asked for when the load starts. A
producer's request goes with the first connector that has a carrier for it.
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
    """Give a sub-connector's `KVTransferConfig` the checksum settings of the outer."""
    inner.enable_kv_checksum = outer.enable_kv_checksum
    inner.kv_checksum_fail_closed = outer.kv_checksum_fail_closed


def load_carrier(multi: MultiConnector, request: Request) -> KVChecksumCarrier | None:
    """The carrier of a load: that of the connector inside which loads it."""
    connector = serving_connector(multi, request)
    if connector is multi:
        return None
    carrier: KVChecksumCarrier | None = connector.kv_checksum_carrier(request, True)
    return carrier


def send_route(
    connectors: Sequence[KVConnectorBase_V1], request: Request
) -> tuple[KVConnectorBase_V1 | None, KVChecksumCarrier | None]:
    """The connector that takes a producer's payload, and its carrier, or Nones."""
    for connector in connectors:
        carrier = connector.kv_checksum_carrier(request, False)
        if carrier is not None:
            return connector, carrier
    return None, None
