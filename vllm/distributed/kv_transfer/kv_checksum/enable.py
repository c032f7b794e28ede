# SPDX-License-Identifier: Apache-2.0
"""Whether a scheduler checks loads in this configuration, and what it says if not."""

from types import SimpleNamespace
from typing import Any

from vllm.logger import init_logger

from .multi_connector import carries
from .offload import why_not_parallel
from .payload import KVChecksumCarrier
from .scheduler import KVChecksumScheduler
from .stored_loads import stores_checksums, why_not_stored

logger = init_logger(__name__)


def create_kv_checksum_scheduler(
    vllm_config: Any, connector: Any, kv_cache_manager: Any, kv_cache_config: Any
) -> KVChecksumScheduler | None:
    """The scheduler's part, or None if checksums are off or cannot work here.

    Raises:
        ValueError: they cannot work here and `kv_checksum_fail_closed` is set.
    """
    transfer = vllm_config.kv_transfer_config
    if not transfer.enable_kv_checksum:
        return None
    reason = _why_not(vllm_config, connector)
    if reason is None:
        logger.info(
            "KV checksums are on: loads through %s are verified, carried by %s, %s",
            transfer.kv_connector,
            _carriers(connector),
            f"fail-closed ({transfer.kv_load_failure_policy})"
            if transfer.kv_checksum_fail_closed
            else "fail-open",
        )
        for inner in getattr(connector, "sub_connectors", ()):
            if not carries(inner):
                logger.warning(
                    "KV checksums: %s carries none between instances; what it loads "
                    "from another instance is not verified",
                    type(inner).__name__,
                )
        return KVChecksumScheduler(
            vllm_config, connector, kv_cache_manager, kv_cache_config
        )
    if transfer.kv_checksum_fail_closed:
        raise ValueError(
            f"kv_checksum_fail_closed is set, but {reason}. Unset "
            "kv_checksum_fail_closed and enable_kv_checksum in "
            "--kv-transfer-config, or use a set-up that checksums support."
        )
    logger.warning(
        "KV checksums are off (enable_kv_checksum has no effect): %s", reason
    )
    return None


def _carriers(connector: Any) -> str:
    """How loads bring checksums, as the metrics call it."""
    inner = getattr(connector, "sub_connectors", None) or [connector]
    load = SimpleNamespace(request_id="", kv_transfer_params=None)
    carriers = [c.kv_checksum_carrier(load, True) for c in inner]
    if any(stores_checksums(c) and why_not_stored(c) is None for c in inner):
        carriers.append(KVChecksumCarrier.STORED)
    return ", ".join(sorted({c.value for c in carriers if c is not None}))


def _why_not(vllm_config: Any, connector: Any) -> str | None:
    """Why checksums cannot work in this configuration, or None."""
    parallel = vllm_config.parallel_config
    if not carries(connector):
        name = vllm_config.kv_transfer_config.kv_connector
        if not stores_checksums(connector):
            return f"the KV connector {name} does not carry KV checksums"
        reason = why_not_stored(connector)
        if reason is not None:
            return f"{name} stores no KV checksums: {reason}"
    if (reason := why_not_parallel(parallel)) is not None:
        return reason
    if parallel.distributed_executor_backend == "external_launcher" and (
        parallel.world_size > 1
    ):
        return "with the external launcher each rank sees its own worker only"
    return None
