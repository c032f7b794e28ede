# SPDX-License-Identifier: Apache-2.0
"""Whether a scheduler checks loads in this configuration, and what it says if not."""

from types import SimpleNamespace
from typing import Any

from vllm.logger import init_logger

from .coverage import connector_coverage, refuse_unchecked, why_off
from .payload import KVChecksumCarrier
from .scheduler import KVChecksumScheduler

logger = init_logger(__name__)


def create_kv_checksum_scheduler(
    vllm_config: Any, connector: Any, kv_cache_manager: Any, kv_cache_config: Any
) -> KVChecksumScheduler | None:
    """Create the scheduler's part, or None if checksums are off or cannot work here.

    Where no connector is covered it still counts the loads, as unverified.

    Raises:
        ValueError: as `coverage.refuse_unchecked`.
    """
    transfer = vllm_config.kv_transfer_config
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
        logger.info(
            "KV checksums are on: loads through %s are verified, carried by %s, %s",
            transfer.kv_connector,
            _carriers(connector),
            f"fail-closed ({transfer.kv_load_failure_policy})"
            if transfer.kv_checksum_fail_closed
            else "fail-open",
        )
        for reason in unchecked:
            logger.warning(
                "KV checksums do not cover a connector: %s; what it loads is counted "
                "as unverified",
                reason,
            )
    return KVChecksumScheduler(
        vllm_config, connector, kv_cache_manager, kv_cache_config
    )


def _carriers(connector: Any) -> str:
    """How loads bring checksums, as the metrics call it."""
    load = SimpleNamespace(request_id="", kv_transfer_params=None)
    pending, carriers = [connector], set()
    while pending:
        one = pending.pop()
        pending += getattr(one, "sub_connectors", None) or ()
        if carrier := one.kv_checksum_carrier(load, True):
            carriers.add(carrier.value)
        elif one.get_kv_checksum_sources(load):
            carriers.add(KVChecksumCarrier.STORED.value)
    return ", ".join(sorted(carriers))
