# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Decide which connectors' loads are checked in a configuration, and refuse others.

The decision rests on the configuration alone, so that what `kv_checksum_fail_closed`
refuses is refused before any connector exists. What depends on the KV cache groups is
known once they are planned, and asked again then; what depends on the caches
themselves, once the workers have them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.stored import why_not_summed

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, ParallelConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
    from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import (
        MultiConnector,
    )
    from vllm.v1.executor.abstract import Executor
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.request import Request
    from vllm.v1.worker.worker_base import WorkerBase

_EXECUTORS = {
    *("uni", "mp", "ray", None),
    *("UniProcExecutor", "MultiprocExecutor", "RayExecutorV2"),
}
"""Executors that bring the reports of all workers to the scheduler."""


@dataclass(frozen=True)
class ConnectorCoverage:
    """Coverage of one connector, or of one inside a MultiConnector.

    Attributes:
        name: the connector's name in the configuration.
        not_checked: why nobody checks the loads of this connector, or None.
        carrier: what brings the checksums of its loads; None if nobody checks them.

    """

    name: str
    not_checked: str | None
    carrier: KVChecksumCarrier | None = None

    @property
    def by_ledger(self) -> bool:
        """Tell whether its loads bring no checksums, and the ledger checks them."""
        return self.carrier is KVChecksumCarrier.LEDGER


def transfer_config(vllm_config: VllmConfig) -> KVTransferConfig:
    """Return the KV transfer configuration of an instance that has a connector."""
    config = vllm_config.kv_transfer_config
    assert config is not None
    return config


def declares(connector_class: type, method: str) -> bool:
    """Tell whether a connector's class overrides a method of `KVConnectorBase_V1`."""
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1

    return getattr(connector_class, method) is not getattr(KVConnectorBase_V1, method)


def serving_connector(
    connector: KVConnectorBase_V1, request: Request
) -> KVConnectorBase_V1:
    """Return the connector that loads `request`.

    That is `connector` itself, unless it holds others: then the one that it chose for
    the request, once it has chosen.
    """
    while inner := getattr(connector, "sub_connectors", None):
        multi = cast("MultiConnector", connector)
        chosen = multi._requests_to_connector.get(request.request_id)
        if chosen is None:
            break
        connector = inner[chosen]
    return connector


def connector_coverage(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None = None
) -> list[ConnectorCoverage]:
    """Tell for every connector of a configuration whether its loads are checked.

    A connector that holds others (a MultiConnector) is replaced by those.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: the KV cache groups, or None if they are not planned yet.

    """
    coverage = []
    for connector_class, config in _connector_classes(vllm_config):
        name = str(transfer_config(config).kv_connector)
        why = _why_brings_none(connector_class, config, kv_cache_config)
        no_ledger = None if why is None else why_no_ledger(vllm_config)
        if no_ledger is not None:
            coverage.append(ConnectorCoverage(name, f"{why}, and {no_ledger}"))
            continue
        ledger = KVChecksumCarrier.LEDGER
        carrier = _carrier_of(connector_class) if why is None else ledger
        coverage.append(ConnectorCoverage(name, None, carrier))
    return coverage


def _carrier_of(connector_class: type[KVConnectorBase_V1]) -> KVChecksumCarrier:
    """Return the carrier of a connector that brings checksums itself."""
    if not declares(connector_class, "kv_checksum_carrier"):
        return KVChecksumCarrier.STORED
    if declares(connector_class, "send_kv_checksums"):
        return KVChecksumCarrier.CONNECTOR
    return KVChecksumCarrier.KV_TRANSFER_PARAMS


def _connector_classes(
    vllm_config: VllmConfig,
) -> Iterator[tuple[type[KVConnectorBase_V1], VllmConfig]]:
    """Yield connector classes with their configurations.

    A connector that holds others is replaced by those, in order.
    """
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    found = KVConnectorFactory.get_connector_class(transfer_config(vllm_config))
    pending: list[tuple[type[KVConnectorBase_V1], VllmConfig]] = [(found, vllm_config)]
    while pending:
        connector_class, config = pending.pop(0)
        if wrapped := getattr(connector_class, "kv_checksum_wrapped_class", None):
            pending.insert(0, (wrapped(config), config))
        elif inner := getattr(
            connector_class, "_get_connector_classes_and_configs", None
        ):
            pending = [*inner(config), *pending]
        else:
            yield connector_class, config


def why_no_ledger(vllm_config: VllmConfig) -> str | None:
    """Return why no ledger of this instance's sums is kept, or None."""
    if not transfer_config(vllm_config).kv_checksum_ledger_blocks:
        return "the ledger is off (kv_checksum_ledger_blocks is 0)"
    if not vllm_config.cache_config.enable_prefix_caching:
        return "the ledger needs prefix caching (--enable-prefix-caching)"
    return None


def _why_brings_none(
    connector_class: type[KVConnectorBase_V1],
    vllm_config: VllmConfig,
    kv_cache_config: KVCacheConfig | None,
) -> str | None:
    name = connector_class.__name__
    if declares(connector_class, "kv_checksum_carrier"):
        return None
    if not declares(connector_class, "get_kv_checksum_sources"):
        return f"{name} neither carries nor stores KV checksums"
    reason = connector_class._why_kv_checksums_not_stored(vllm_config, kv_cache_config)
    return reason and f"{name} stores no KV checksums: {reason}"


def why_off(vllm_config: VllmConfig) -> str | None:
    """Return why checksums cannot work at all in this configuration, or None."""
    parallel = vllm_config.parallel_config
    reason = _why_no_context_parallelism(vllm_config)
    if reason is None and parallel.world_size > 1:
        reason = _why_reports_are_lost(parallel)
    return reason


def _why_no_context_parallelism(vllm_config: VllmConfig) -> str | None:
    """Return why context parallelism keeps checksums from working, or None.

    It is None without context parallelism, too.
    """
    parallel = vllm_config.parallel_config
    dcp, pcp = (
        parallel.decode_context_parallel_size,
        parallel.prefill_context_parallel_size,
    )
    if max(dcp, pcp) == 1:
        return None
    from vllm.v1.kv_cache_interface import KVCacheSpec

    if not hasattr(KVCacheSpec, "dcp_sharded"):  # vLLM 0.30.0
        return "this vLLM does not tell which caches context parallelism shards"
    for connector_class, _ in _connector_classes(vllm_config):
        if not connector_class._kv_checksums_follow_context:
            return (
                "context parallelism (DCP or PCP > 1) is supported with NixlConnector "
                f"alone, not with {connector_class.__name__}"
            )
    if pcp > 1 and dcp > 1 and (parallel.tensor_parallel_size > 1 or dcp != pcp):
        return "context parallelism over PCP and TP ranks together is not supported"
    return None


def _why_reports_are_lost(parallel_config: ParallelConfig) -> str | None:
    """Return why some workers' reports do not reach the scheduler, or None.

    That depends on how the executor collects the workers' outputs.
    """
    import vllm.envs as envs

    names = _executor_names(parallel_config.distributed_executor_backend)
    if not names.isdisjoint({"external_launcher", "ExecutorWithExternalLauncher"}):
        return "with the external launcher each rank sees its own worker only"
    # These executors are those of vLLM before 0.33.0.
    if "RayDistributedExecutor" in names or (
        "ray" in names and not getattr(envs, "VLLM_USE_RAY_V2_EXECUTOR_BACKEND", True)
    ):
        if parallel_config.pipeline_parallel_size == 1:
            return None
        return (
            "with pipeline parallelism the legacy Ray executor brings reports of the "
            "last stage alone (VLLM_USE_RAY_V2_EXECUTOR_BACKEND=1 selects the other)"
        )
    if names.isdisjoint(_EXECUTORS):
        backend = parallel_config.distributed_executor_backend
        return f"it is not known whether {backend} brings reports of all workers"
    return None


def _executor_names(backend: str | type[Executor] | None) -> set[str | None]:
    """Return an executor's short name, or the names of its class and its bases."""
    if isinstance(backend, str) and "." in backend:
        from vllm.utils.import_utils import resolve_obj_by_qualname

        backend = resolve_obj_by_qualname(backend)
    if isinstance(backend, type):
        return {c.__name__ for c in backend.__mro__}
    return {backend}


def num_reporting_workers(parallel_config: ParallelConfig) -> int:
    """Return the number of workers that sum, and must report.

    PCP ranks count where each holds other tokens (with DCP), and not where they hold
    copies of each other's KV: the first one's is transferred.
    """
    workers = (
        parallel_config.tensor_parallel_size * parallel_config.pipeline_parallel_size
    )
    if parallel_config.decode_context_parallel_size > 1:
        workers *= parallel_config.prefill_context_parallel_size
    return workers


def why_not_on(vllm_config: VllmConfig) -> str | None:
    """Return why checksums are not on, by choice or by set-up, or None if they are."""
    if not transfer_config(vllm_config).enable_kv_checksum:
        return "enable_kv_checksum is off"
    return why_off(vllm_config)


def sums_blocks(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None = None
) -> bool:
    """Tell whether checksums are on and any connector needs sums."""
    if why_not_on(vllm_config) is not None:
        return False
    coverage = connector_coverage(vllm_config, kv_cache_config)
    return any(connector.not_checked is None for connector in coverage)


def ask_workers(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig, executor: Executor
) -> None:
    """Record in the scheduler's KV cache configuration which groups a worker skips.

    Call this when the workers have their caches, before the scheduler and its
    connectors are made: then both sides of a connector decide alike what is stored.

    Raises:
        ValueError: as `refuse_unchecked`.

    """
    if vllm_config.kv_transfer_config is None:
        return
    if not sums_blocks(vllm_config, kv_cache_config):
        return
    skipped: dict[int, str] = {}
    for reasons in executor.collective_rpc(skipped_groups):
        skipped = {**reasons, **skipped}
    kv_cache_config.kv_checksum_skipped = skipped
    refuse_unchecked(vllm_config, kv_cache_config)


def skipped_groups(worker: WorkerBase) -> dict[int, str]:
    """Return the groups that one of vLLM's workers skips: reasons by group id.

    This runs on the worker. It skips none if checksums are off.
    """
    runner: Any = worker.model_runner
    checksums = getattr(runner.kv_connector, "kv_checksum_worker", None)
    return {} if checksums is None else dict(checksums.skipped)


def refuse_unchecked(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None = None
) -> None:
    """Refuse set-ups that can bring unchecked loads, if loads fail closed.

    Without `kv_checksum_fail_closed` nothing is refused.

    Raises:
        ValueError: for such a set-up; the message names the connector and what to
            change.

    """
    transfer = getattr(vllm_config, "kv_transfer_config", None)
    if transfer is None or not transfer.kv_checksum_fail_closed:
        return
    reasons = [why_off(vllm_config)]
    advice = "use a set-up that KV checksums support"
    if reasons == [None]:
        coverage = connector_coverage(vllm_config, kv_cache_config)
        reasons = [connector.not_checked for connector in coverage]
        unchecked = [c.name for c in coverage if c.not_checked is not None]
        advice = f"take {', '.join(unchecked)} out of the configuration"
    if found := [reason for reason in reasons if reason is not None]:
        raise ValueError(
            f"kv_checksum_fail_closed is set, but {'; '.join(found)}: loads that "
            "nobody checks would fail. Unset kv_checksum_fail_closed in "
            "--kv-transfer-config, "
            f"or {advice}."
        )


def why_whole_blocks_differ(kv_cache_groups: Sequence[KVCacheGroupSpec]) -> str | None:
    """Return why a stored value may not be one whole block of every token, or None."""
    from vllm.v1.kv_cache_interface import (
        FullAttentionSpec,
        MLAAttentionSpec,
        iter_layer_specs,
    )

    for group in kv_cache_groups:
        for spec in iter_layer_specs(group.kv_cache_spec):
            # Subclasses may hold something else than every token's KV.
            if type(spec) not in (FullAttentionSpec, MLAAttentionSpec):
                return f"{type(spec).__name__} layers are not full attention"
    return None


def why_groups_not_stored(kv_cache_config: KVCacheConfig) -> str | None:
    """Return why not every value of a store is one block that is summed, or None."""
    return why_whole_blocks_differ(
        kv_cache_config.prefix_cacheable_groups
    ) or why_not_summed(
        kv_cache_config.kv_checksum_skipped, kv_cache_config.prefix_cacheable_group_ids
    )
