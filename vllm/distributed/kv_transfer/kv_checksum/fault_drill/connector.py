# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Wrap a connector and damage chosen loads, to try alarms before they are needed.

This is never for production. The drill behaves as the connector that it wraps, except
that loads for which a fault is set are damaged after they finished and before they are
checked; those of the step that uses them before it does. Its `kv_connector` is
"KVChecksumFaultDrill", its `kv_connector_module_path` this module, and its
`kv_connector_extra_config`::

    {
        "kv_checksum_fault_drill": {
            "damage_kv_on_purpose": true,
            "connector": "NixlPushConnector",
            "faults": {
                "drill-flip": "bit_flip",
                "drill-": {"kind": "stale_block", "blocks": 3},
                "": {"kind": "lost_payload", "probability": 0.001},
            },
        }
    }

`connector` names the wrapped connector (with `connector_module_path` if it is in no
registry). `faults` maps prefixes of the client's request id (``X-Request-Id``; the
first that fits counts, "" fits all) to a kind of damage (listed in `damage`) or to the
settings of a `Fault`. Two things differ from the wrapped connector: its transfer
statistics are collected but not reported, and vLLM does not recognize it by name (NIXL
with Mamba layers on CPU: set ``VLLM_SSM_CONV_STATE_LAYOUT=DS`` yourself).
"""

from __future__ import annotations

import binascii
import functools
import importlib
import random
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import pybase64 as base64
import torch

from vllm.distributed.kv_transfer.kv_checksum.checksum import is_ring_spec
from vllm.distributed.kv_transfer.kv_checksum.fault_drill.damage import (
    KINDS,
    PAYLOAD_KINDS,
    LayerCache,
    LoadedBlocks,
    NotApplicable,
    damage_payload,
    inflict,
)
from vllm.distributed.kv_transfer.kv_checksum.payload import (
    KV_TRANSFER_PARAMS_KEY,
    transfer_params,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import (
    loaded_blocks,
    tier_blocks,
)
from vllm.distributed.kv_transfer.kv_checksum.support import transfer_config
from vllm.distributed.kv_transfer.kv_checksum.worker.formats import (
    TokenOrder,
    layer_formats,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorRole,
    SupportsHMA,
)
from vllm.logger import init_logger
from vllm.v1.kv_cache_interface import AttentionSpec, KVCacheSpec, iter_layer_specs

if TYPE_CHECKING:
    from vllm.config import KVTransferConfig, VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorMetadata,
        KVConnectorTransferResults,
    )
    from vllm.forward_context import ForwardContext
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)

_OPTION = "kv_checksum_fault_drill"
_SAYS = "KV CHECKSUM FAULT DRILL"


@dataclass(frozen=True)
class Fault:
    """The damage to the loads of one prefix.

    Attributes:
        kind: a kind of `damage.KINDS` or `PAYLOAD_KINDS`.
        probability: share of the loads that are damaged.
        group: the KV cache group that is damaged; None: the first one loaded.
        blocks: number of blocks, for kinds that damage single blocks.
        skip: number of the first loaded blocks that are left intact.
        tp_rank: the one TP rank that damages its part; None: all of them.

    """

    kind: str
    probability: float = 1.0
    group: int | None = None
    blocks: int = 1
    skip: int = 0
    tp_rank: int | None = None


@dataclass
class _Order:
    """An order to damage a load, sent from the scheduler to the workers.

    Attributes:
        fault: the damage.
        num_tokens: tokens of the request that the load covers.
        groups: per KV cache group id, the position of the first block and all ids.
        others: per KV cache group id, the ids of the previous load's blocks.
        is_sync: whether the step that uses the load brings it.

    """

    fault: Fault
    num_tokens: int
    groups: dict[int, tuple[int, list[int]]]
    others: dict[int, list[int]]
    is_sync: bool


def drill_options(extra_config: dict[str, Any]) -> dict[str, Any]:
    """Return the drill's options, checked.

    Raises:
        ValueError: no opt-in, or no connector to wrap.

    """
    options = extra_config.get(_OPTION)
    if not isinstance(options, dict) or options.get("damage_kv_on_purpose") is not True:
        raise ValueError(
            "the KV checksum fault drill damages KV on purpose: set "
            f'kv_connector_extra_config["{_OPTION}"]["damage_kv_on_purpose"] to true, '
            "or use another kv_connector"
        )
    if not isinstance(options.get("connector"), str):
        raise ValueError(
            f'kv_connector_extra_config["{_OPTION}"]["connector"] must name the '
            "connector that the KV checksum fault drill wraps"
        )
    return options


def drill_faults(options: dict[str, Any]) -> dict[str, Fault]:
    """Parse the configured faults, by request id prefix.

    Raises:
        ValueError: a fault or a setting that does not exist, or a bad value.

    """
    faults = {}
    known = {f.name for f in fields(Fault)}
    for prefix, given in (options.get("faults") or {}).items():
        settings = {"kind": given} if isinstance(given, str) else dict(given)
        kind = settings.get("kind")
        if kind not in KINDS and kind not in PAYLOAD_KINDS:
            raise ValueError(
                f"unknown fault {kind!r} in {_OPTION}; known: "
                f"{', '.join([*KINDS, *PAYLOAD_KINDS])}"
            )
        if set(settings) - known:
            raise ValueError(
                f"unknown settings {sorted(set(settings) - known)} of fault "
                f"{prefix!r} in {_OPTION}; known: {', '.join(sorted(known))}"
            )
        fault = Fault(**settings)
        if not 0 <= fault.probability <= 1 or fault.blocks < 1 or fault.skip < 0:
            raise ValueError(
                f"fault {prefix!r} in {_OPTION}: probability must lie in 0..1, "
                "blocks be at least 1 and skip at least 0"
            )
        faults[prefix] = fault
    return faults


def wrapped_connector(extra_config: dict[str, Any]) -> type[KVConnectorBase_V1]:
    """Return the class of the connector that the drill wraps.

    Raises:
        ValueError: in the cases of `drill_options`, or the drill cannot wrap it.

    """
    options = drill_options(extra_config)
    path = options.get("connector_module_path")
    if path is None:
        real = KVConnectorFactory.get_connector_class_by_name(options["connector"])
    else:
        real = getattr(importlib.import_module(path), options["connector"])
    if not issubclass(real, KVConnectorBase_V1) or not issubclass(real, SupportsHMA):
        raise ValueError(
            f"the KV checksum fault drill cannot wrap {options['connector']}, which "
            "does not support vLLM's hybrid memory allocator"
        )
    return real


@functools.cache
def _drilled(real: type) -> type[KVChecksumFaultDrill]:
    """Create a class of `real` with the drill's methods before its own."""
    return type(
        f"KVChecksumFaultDrill_{real.__name__}", (KVChecksumFaultDrill, real), {}
    )


class KVChecksumFaultDrill(KVConnectorBase_V1, SupportsHMA):
    """Damages chosen loads of the connector that it wraps; see the module's docstring.

    An instance's class also derives from the wrapped connector's class, which does
    everything that is not defined here.
    """

    def __new__(
        cls,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ) -> KVChecksumFaultDrill:
        extra_config = transfer_config(vllm_config).kv_connector_extra_config
        return object.__new__(_drilled(wrapped_connector(extra_config)))  # type: ignore[arg-type]

    def __init__(
        self,
        vllm_config: VllmConfig,
        role: KVConnectorRole,
        kv_cache_config: KVCacheConfig,
    ):
        extra_config = transfer_config(vllm_config).kv_connector_extra_config
        options = drill_options(extra_config)
        self._faults = drill_faults(options)
        # Scheduler: tokens held locally and whether the next ones are offered for the
        # step that uses them; the last load's blocks; this step's orders.
        self._offered: dict[str, tuple[int, bool]] = {}
        self._last_loaded: dict[int, list[int]] = {}
        self._new_orders: dict[str, _Order] = {}
        # Worker: orders of loads in progress, layers by KV cache group.
        self._orders: dict[str, _Order] = {}
        self._layers: dict[int, list[LayerCache]] = {}
        # On the side that takes payloads: the payload before the present one.
        self._last_payload: bytes | None = None
        super().__init__(vllm_config, role, kv_cache_config)
        logger.warning("%s is on for %s: %s", _SAYS, options["connector"], self._faults)

    @classmethod
    def kv_checksum_wrapped_class(
        cls, vllm_config: VllmConfig
    ) -> type[KVConnectorBase_V1]:
        """Return the class that does everything that is not defined here."""
        extra_config = transfer_config(vllm_config).kv_connector_extra_config
        return wrapped_connector(extra_config)

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        extra_config = transfer_config(vllm_config).kv_connector_extra_config
        real = wrapped_connector(extra_config)
        return real.get_required_kvcache_layout(vllm_config)

    @classmethod
    def supports_sleep_mode(cls, kv_transfer_config: KVTransferConfig) -> bool:
        real = wrapped_connector(kv_transfer_config.kv_connector_extra_config)
        return real.supports_sleep_mode(kv_transfer_config)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        real = wrapped_connector(extra_config)
        return real.requires_piecewise_for_cudagraph(extra_config)

    def get_kv_connector_stats(self) -> None:
        """Discard the wrapped connector's statistics.

        vLLM rebuilds statistics by the connector's class, without its configuration,
        and so cannot know which connector is wrapped here. They are collected all the
        same, because the wrapped connector keeps them until then.
        """
        super().get_kv_connector_stats()

    # ---- scheduler side

    def _fault(self, req_id: str) -> Fault | None:
        client_id = req_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        for prefix, fault in self._faults.items():
            if client_id.startswith(prefix):
                return fault if random.random() < fault.probability else None
        return None

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        offer = super().get_num_new_matched_tokens(request, num_computed_tokens)  # type: ignore[safe-super]
        self._offered[request.request_id] = num_computed_tokens, not offer[1]
        return offer

    def limit_matched_tokens(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int
    ) -> tuple[int | None, bool]:
        offer = super().limit_matched_tokens(
            request, num_computed_tokens, max_num_new_tokens
        )
        self._offered[request.request_id] = num_computed_tokens, not offer[1]
        return offer

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)  # type: ignore[safe-super]
        first, is_sync = self._offered.pop(request.request_id, (0, False))
        if num_external_tokens <= 0:
            return
        config, num_tokens = self._kv_cache_config, first + num_external_tokens
        if is_sync:
            loaded = tier_blocks(config, blocks, first, num_tokens, is_sync).blocks
        else:
            loaded = loaded_blocks(config, blocks, num_tokens).blocks
        groups = {
            group_id: (start, [int(block) for block in ids])
            for group_id, (start, ids) in loaded.groups.items()
        }
        others, self._last_loaded = (
            self._last_loaded,
            {group_id: ids for group_id, (_, ids) in groups.items()},
        )
        fault = self._fault(request.request_id)
        if fault is not None:
            self._new_orders[request.request_id] = _Order(
                fault, loaded.num_tokens, groups, others, is_sync
            )
        params = transfer_params(request)
        text = params.get(KV_TRANSFER_PARAMS_KEY)
        if text is not None:
            self._damage_text(request.request_id, fault, params, text)

    def _damage_text(
        self, req_id: str, fault: Fault | None, params: dict[str, Any], text: Any
    ) -> None:
        try:
            payload = base64.b64decode(text, validate=True)
        except (TypeError, ValueError, binascii.Error):
            return  # This is no payload of ours, and is left as it is.
        damaged = self._damaged(req_id, fault, payload)
        if damaged is None:
            del params[KV_TRANSFER_PARAMS_KEY]
        else:
            params[KV_TRANSFER_PARAMS_KEY] = base64.b64encode(damaged).decode("ascii")

    def build_connector_meta(
        self, scheduler_output: SchedulerOutput
    ) -> KVConnectorMetadata:
        meta: Any = super().build_connector_meta(scheduler_output)  # type: ignore[safe-super]
        if self._new_orders:
            meta.kv_checksum_fault_drill, self._new_orders = self._new_orders, {}
        return meta

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._offered.pop(request.request_id, None)
        return super().request_finished_all_groups(request, block_ids)  # type: ignore[safe-super]

    # ---- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        formats = layer_formats(self._vllm_config, kv_caches)
        num_blocks = self._kv_cache_config.num_blocks
        for group_id in self._kv_cache_config.transfer_group_ids:
            group = self._kv_cache_config.kv_cache_groups[group_id]
            if any(map(_compresses, iter_layer_specs(group.kv_cache_spec))):
                logger.warning(
                    "%s cannot damage KV cache group %d: it keeps no row per token",
                    _SAYS,
                    group_id,
                )
                continue
            # A cache that several layers share is listed once.
            layers = {
                kv_caches[name].data_ptr(): LayerCache(
                    kv_caches[name],
                    num_blocks,
                    formats[name].order is TokenOrder.CPU_VECTORS,
                    formats[name].order is TokenOrder.CPU_TILES,
                )
                for name in group.layer_names
                if name in kv_caches
            }
            self._layers[group_id] = list(layers.values())
        super().register_kv_caches(kv_caches)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        self._orders.update(getattr(connector_metadata, "kv_checksum_fault_drill", {}))
        super().bind_connector_metadata(connector_metadata)

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)  # type: ignore[safe-super]
        for req_id in [r for r, order in self._orders.items() if order.is_sync]:
            self._damage_kv(req_id, self._orders.pop(req_id))

    def get_transfer_results(
        self, finished_req_ids: set[str]
    ) -> KVConnectorTransferResults:
        results = super().get_transfer_results(finished_req_ids)
        payloads = getattr(results, "kv_checksums", None) or {}
        for req_id, payload in list(payloads.items()):
            order = self._orders.get(req_id)
            fault = order.fault if order is not None else None
            damaged = self._damaged(req_id, fault, payload)
            if damaged is None:
                del payloads[req_id]
            else:
                payloads[req_id] = damaged
        for req_id in results.finished_recving:
            order = self._orders.pop(req_id, None)
            if order is not None and req_id not in results.failed_recving:
                self._damage_kv(req_id, order)
        for req_id in finished_req_ids:
            self._orders.pop(req_id, None)
        return results

    # ---- damage

    def _damage_kv(self, req_id: str, order: _Order) -> None:
        fault = order.fault
        if fault.kind not in KINDS or not self._is_rank(fault.tp_rank):
            return
        group = fault.group
        if group is None:
            group = min(order.groups, default=0)
        start, ids = order.groups.get(group, (0, []))
        start, ids = start + fault.skip, ids[fault.skip :]
        load = LoadedBlocks(
            self._layers.get(group, []),
            ids,
            start,
            order.num_tokens,
            [i for i in order.others.get(group, []) if i not in ids],
            fault.blocks,
        )
        try:
            inflict(fault.kind, load)
        except NotApplicable as why:
            logger.warning("%s left %s as it is: %s", _SAYS, req_id, why)
            return
        logger.warning(
            "%s: %s in KV cache group %d, blocks from %d, of %s",
            _SAYS,
            fault.kind,
            group,
            ids[0],
            req_id,
        )

    def _is_rank(self, tp_rank: int | None) -> bool:
        from vllm.distributed.parallel_state import get_tp_group

        return tp_rank is None or tp_rank == get_tp_group().rank_in_group

    def _damaged(
        self, req_id: str, fault: Fault | None, payload: bytes
    ) -> bytes | None:
        """Return the bytes to hand on instead of `payload`; None for no payload."""
        other, self._last_payload = self._last_payload, payload
        if fault is None or fault.kind not in PAYLOAD_KINDS:
            return payload
        try:
            damaged = damage_payload(fault.kind, payload, other)
        except NotApplicable as why:
            logger.warning("%s left %s as it is: %s", _SAYS, req_id, why)
            return payload
        logger.warning("%s: %s of %s", _SAYS, fault.kind, req_id)
        return damaged


def _compresses(spec: KVCacheSpec) -> bool:
    """Tell whether a layer keeps states of several tokens, or a ring."""
    compressed = isinstance(spec, AttentionSpec) and spec.tokens_per_state != 1
    return compressed or is_ring_spec(spec)
