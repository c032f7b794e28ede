# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Create the scheduler's part, or refuse a configuration in which it cannot work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.scheduler.ledger import Ledger
from vllm.distributed.kv_transfer.kv_checksum.scheduler.ledger_loads import LedgerLoads
from vllm.distributed.kv_transfer.kv_checksum.scheduler.scheduler import (
    KVChecksumScheduler,
)
from vllm.distributed.kv_transfer.kv_checksum.support import (
    ConnectorCoverage,
    connector_coverage,
    num_reporting_workers,
    refuse_unchecked,
    transfer_config,
    why_off,
)
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import resolve_dcp_kv_cache_spec

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = init_logger(__name__)

_LOAD: Any = SimpleNamespace(request_id="", kv_transfer_params=None)
"""Stands for any load, to ask a connector of it."""


def create_kv_checksum_scheduler(
    vllm_config: VllmConfig,
    connector: KVConnectorBase_V1,
    kv_cache_manager: KVCacheManager,
    kv_cache_config: KVCacheConfig,
) -> KVChecksumScheduler | None:
    """Create the scheduler's part and log what it covers.

    Return None if checksums are off, or cannot work in this configuration. Where no
    connector is covered, loads are still counted, as unverified.

    Raises:
        ValueError: in the cases of `support.refuse_unchecked`.

    """
    transfer = transfer_config(vllm_config)
    if not transfer.enable_kv_checksum:
        return None
    refuse_unchecked(vllm_config, kv_cache_config)
    if (reason := why_off(vllm_config)) is not None:
        logger.warning(
            "KV checksums are off (enable_kv_checksum has no effect): %s", reason
        )
        return None
    coverage = connector_coverage(vllm_config, kv_cache_config)
    unchecked = [c.not_checked for c in coverage if c.not_checked is not None]
    if len(unchecked) == len(coverage):
        logger.warning(
            "KV checksums are off (enable_kv_checksum has no effect): %s; loads are "
            "counted as unverified",
            "; ".join(unchecked),
        )
    else:
        for one, instance in zip(coverage, _single_connectors(connector), strict=True):
            _log_coverage_of(one, instance, transfer)
    kv_cache_config = in_request_tokens(vllm_config, kv_cache_config)
    ledger = None
    if any(one.by_ledger for one in coverage):
        ledger = _create_ledger(vllm_config, kv_cache_manager, kv_cache_config)
        connector.set_kv_checksum_ledger(ledger)
    return KVChecksumScheduler(
        vllm_config, connector, kv_cache_manager, kv_cache_config, ledger
    )


def in_request_tokens(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig
) -> KVCacheConfig:
    """Return the KV cache groups with block sizes that count tokens of all ranks.

    Under context parallelism a block id stands for one block on each rank.
    """
    dcp_size = vllm_config.parallel_config.decode_context_parallel_size
    if dcp_size == 1:
        return kv_cache_config
    groups = [
        replace(g, kv_cache_spec=resolve_dcp_kv_cache_spec(g.kv_cache_spec, dcp_size))
        for g in kv_cache_config.kv_cache_groups
    ]
    return replace(kv_cache_config, kv_cache_groups=groups)


def _create_ledger(
    vllm_config: VllmConfig,
    kv_cache_manager: KVCacheManager,
    kv_cache_config: KVCacheConfig,
) -> LedgerLoads:
    """Create the ledger, and have the block pools tell it which blocks become full."""
    ledger = LedgerLoads(
        Ledger(transfer_config(vllm_config).kv_checksum_ledger_blocks),
        kv_cache_config,
        kv_cache_manager.block_pool.hash_block_size,
        num_reporting_workers(vllm_config.parallel_config),
    )
    for manager in kv_cache_manager.coordinator.single_type_managers:
        manager.block_pool.kv_checksum_ledger = ledger
    logger.info(
        "KV checksums: the ledger remembers the sums of %d blocks that this instance "
        "computes (%d MiB)",
        ledger.ledger.num_entries,
        ledger.ledger.num_bytes // 2**20,
    )
    return ledger


def _single_connectors(connector: KVConnectorBase_V1) -> Iterator[KVConnectorBase_V1]:
    """Yield the connector, or those inside it, in the order of `connector_coverage`."""
    inner = getattr(connector, "sub_connectors", None)
    if not inner:
        yield connector
    for one in inner or ():
        yield from _single_connectors(one)


def _log_coverage_of(
    covered: ConnectorCoverage,
    connector: KVConnectorBase_V1,
    transfer: KVTransferConfig,
) -> None:
    """Log in one line how a connector's loads bring checksums, or why they do not."""
    if covered.not_checked is not None:
        logger.warning(
            "KV checksums do not cover a connector: %s; what it loads is counted as "
            "unverified",
            covered.not_checked,
        )
        return
    logger.info(
        "KV checksums are on: loads through %s are verified, %s, %s",
        covered.name,
        "by the ledger of what this instance computed"
        if covered.by_ledger
        else _how_brought(connector),
        f"fail-closed ({transfer.kv_load_failure_policy})"
        if transfer.kv_checksum_fail_closed
        else "fail-open",
    )
    carrier = connector.kv_checksum_carrier(_LOAD, receiving=True)
    by_request = carrier is KVChecksumCarrier.KV_TRANSFER_PARAMS
    from_requests = transfer.kv_checksum_quarantine_from_requests
    if transfer.kv_checksum_quarantine and by_request and not from_requests:
        logger.warning(
            "KV checksums: kv_checksum_quarantine has no effect on %s: its checksums "
            "come in kv_transfer_params, where clients could write others to bring a "
            "good instance into quarantine; set kv_checksum_quarantine_from_requests "
            "if trusted routers alone can set kv_transfer_params",
            covered.name,
        )


def _how_brought(connector: KVConnectorBase_V1) -> str:
    """Return how loads bring checksums; carriers are named as in the metrics."""
    if (carrier := connector.kv_checksum_carrier(_LOAD, receiving=True)) is not None:
        return f"carried by {carrier.value}"
    if connector.get_kv_checksum_sources(_LOAD):
        return "stored with their KV"
    return "each as its connector tells when it starts"
