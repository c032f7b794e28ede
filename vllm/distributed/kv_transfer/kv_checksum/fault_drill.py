# SPDX-License-Identifier: Apache-2.0
"""A NIXL pull connector that damages chosen loads, to try alarms before they count.

Never for production. Loaded with ``"kv_connector": "KVChecksumFaultDrill"`` and
``"kv_connector_module_path":
"vllm.distributed.kv_transfer.kv_checksum.fault_drill"``; starts only with an
opt-in in ``kv_connector_extra_config``::

    {"kv_checksum_fault_drill": {"damage_kv_on_purpose": true,
                                 "faults": {"drill-flip": "bit_flip",
                                            "drill-lost": "lost_payload"}}}

`faults` maps a prefix of the client's request id (``X-Request-Id``) to a fault:
``bit_flip`` turns over one bit of one loaded block after its transfer,
``lost_payload`` drops the checksums that came with the request.
"""

from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlPullConnector,
)
from vllm.logger import init_logger

from .scheduler import KV_TRANSFER_PARAMS_KEY

logger = init_logger(__name__)

FAULTS = ("bit_flip", "lost_payload")

_OPTION = "kv_checksum_fault_drill"


def drill_faults(extra_config: dict[str, Any]) -> dict[str, str]:
    """The configured faults by request id prefix.

    Raises:
        ValueError: no opt-in, or faults that do not exist.
    """
    options = extra_config.get(_OPTION)
    if not isinstance(options, dict) or options.get("damage_kv_on_purpose") is not True:
        raise ValueError(
            "the KV checksum fault drill damages KV on purpose: set "
            f'kv_connector_extra_config["{_OPTION}"]["damage_kv_on_purpose"] to true, '
            "or use another kv_connector"
        )
    faults = options.get("faults") or {}
    unknown = sorted(set(faults.values()) - set(FAULTS))
    if unknown:
        raise ValueError(f"unknown faults {unknown} in {_OPTION}; known: {FAULTS}")
    return dict(faults)


class KVChecksumFaultDrill(NixlPullConnector):
    """See the module's docstring."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any):
        self._faults = drill_faults(
            vllm_config.kv_transfer_config.kv_connector_extra_config
        )
        super().__init__(vllm_config, role, kv_cache_config)
        self._caches: dict[str, torch.Tensor] = {}
        self._loading: dict[str, int] = {}
        logger.warning("KV CHECKSUM FAULT DRILL is on: %s", self._faults)

    def _fault(self, req_id: str) -> str | None:
        client_id = req_id.removeprefix("chatcmpl-").removeprefix("cmpl-")
        for prefix, fault in self._faults.items():
            if client_id.startswith(prefix):
                return fault
        return None

    def update_state_after_alloc(
        self, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        params = request.kv_transfer_params or {}
        if self._fault(request.request_id) == "lost_payload" and params.pop(
            KV_TRANSFER_PARAMS_KEY, None
        ):
            logger.warning(
                "KV CHECKSUM FAULT DRILL dropped the payload of %s", request.request_id
            )

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        self._caches = kv_caches
        super().register_kv_caches(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for req_id, meta in self._connector_metadata.reqs_to_recv.items():
            ids = [block for group in meta.local_block_ids for block in group]
            if self._fault(req_id) == "bit_flip" and ids:
                self._loading[req_id] = ids[0]
        super().start_load_kv(forward_context, **kwargs)

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        for req_id in results.finished_recving:
            block = self._loading.pop(req_id, None)
            if block is None or req_id in results.failed_recving:
                continue
            name, cache = next(iter(self._caches.items()))
            ratio = cache.shape[0] // self._kv_cache_config.num_blocks
            cell = cache[block * ratio].view(torch.uint8)
            # The top bits of a float: a damage that shows in the answer.
            cell[0, 0, cache.element_size() - 1] ^= 0x40
            logger.warning(
                "KV CHECKSUM FAULT DRILL flipped one bit of block %d in %s of %s",
                block,
                name,
                req_id,
            )
        return results
