# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Describe an instance in the labels of one gauge, which others can compare.

``vllm-kv-checksum doctor`` reads it. Everything follows from the configuration, so it
is there before the first request, and the values never change while a process lives.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_checksum.checksum import DEFINITION
from vllm.distributed.kv_transfer.kv_checksum.metrics import carrier_label
from vllm.distributed.kv_transfer.kv_checksum.payload import PAYLOAD_VERSION
from vllm.distributed.kv_transfer.kv_checksum.support import (
    connector_coverage,
    transfer_config,
    why_off,
)

if TYPE_CHECKING:
    from prometheus_client import Gauge

    from vllm.config import VllmConfig

NAME = "vllm:kv_checksum_info"


def describe(vllm_config: VllmConfig) -> dict[str, str]:
    """Return the gauge's own labels.

    Args:
        vllm_config: the configuration of an instance with `enable_kv_checksum`.

    """
    transfer = transfer_config(vllm_config)
    coverage = connector_coverage(vllm_config)
    fail_mode = "open"
    if transfer.kv_checksum_fail_closed:
        fail_mode = f"closed_{transfer.kv_load_failure_policy}"
    return {
        "state": "on" if why_off(vllm_config) is None else "off",
        "definition": str(DEFINITION),
        "payload_version": str(PAYLOAD_VERSION),
        "role": str(transfer.kv_role),
        "fail_mode": fail_mode,
        "connectors": ",".join(sorted({one.name for one in coverage})),
        "carriers": ",".join(sorted({carrier_label(one.carrier) for one in coverage})),
        "block_size": str(vllm_config.cache_config.block_size),
    }


def export_kv_checksum_info(
    vllm_config: VllmConfig,
    gauge_cls: type[Gauge],
    labelnames: list[str],
    per_engine_labelvalues: dict[int, list[object]],
) -> None:
    """Export the description of an instance as a gauge that is always 1.

    Args:
        vllm_config: the configuration of an instance with `enable_kv_checksum`.
        gauge_cls: the Prometheus class of the logger.
        labelnames: the logger's label names.
        per_engine_labelvalues: label values by engine index.

    """
    labels = describe(vllm_config)
    gauge = gauge_cls(
        name=NAME,
        documentation="How this instance checks KV loads, in its labels.",
        multiprocess_mode="mostrecent",
        labelnames=[*labelnames, *labels],
    )
    for values in per_engine_labelvalues.values():
        gauge.labels(*values, *labels.values()).set(1)
