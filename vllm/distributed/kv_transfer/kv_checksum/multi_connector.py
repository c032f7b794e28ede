# SPDX-License-Identifier: Apache-2.0
"""MultiConnector: which of its connectors carries a request's payload.

A load's carrier is that of the connector chosen to load it. MultiConnector forgets its
choice when the request finishes, so the carrier is asked for when the load starts. A
producer's request goes with the first connector that has a carrier for it.
"""

from collections.abc import Sequence
from typing import Any

from .payload import KVChecksumCarrier


def carries(connector: Any) -> bool:
    """Whether `connector`, or one inside it, declares a carrier for any request."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    if inner := getattr(connector, "sub_connectors", None):
        return any(map(carries, inner))
    own = type(connector).kv_checksum_carrier
    return own is not KVConnectorBase_V1.kv_checksum_carrier


def inherit_settings(outer: Any, inner: Any) -> None:
    """Give a sub-connector's `KVTransferConfig` the checksum settings of the outer."""
    inner.enable_kv_checksum = outer.enable_kv_checksum
    inner.kv_checksum_fail_closed = outer.kv_checksum_fail_closed


def load_carrier(
    connectors: Sequence[Any], chosen: int | None, request: Any
) -> KVChecksumCarrier | None:
    """The carrier of a load; `chosen` is its connector's index, None if none loads."""
    if chosen is None:
        return None
    return connectors[chosen].kv_checksum_carrier(request, True)


def send_route(
    connectors: Sequence[Any], request: Any
) -> tuple[Any, KVChecksumCarrier | None]:
    """The connector that takes a producer's payload, and its carrier, or Nones."""
    for connector in connectors:
        carrier = connector.kv_checksum_carrier(request, False)
        if carrier is not None:
            return connector, carrier
    return None, None
