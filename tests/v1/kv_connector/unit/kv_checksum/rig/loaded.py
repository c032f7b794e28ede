# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compare what is summed of a load with what its connector was told to load.

The truth is the connector's own metadata of the step: the block ids that NIXL (pull and
push), Mooncake, the Mooncake store, SimpleCPUOffloadConnector, OffloadingConnector,
LMCache and ExampleConnector hand to their workers. Nothing of the feature is asked what
was loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any


@dataclass
class Loads:
    """The blocks that one step's metadata tells connectors to load.

    ``by_request`` holds block ids per request id and KV cache group id. Some connectors
    name no request: ``together`` holds the blocks of all of theirs, ``unnamed`` each
    load's.
    """

    by_request: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    together: list[int] = field(default_factory=list)
    requests_together: list[str] = field(default_factory=list)
    unnamed: list[list[int]] = field(default_factory=list)

    def add(self, req_id: str, groups: dict[int, list[int]]) -> None:
        """Note a request that loads any block."""
        if any(groups.values()):
            self.by_request[req_id] = groups


def loads_of(metadata: Any, kv_cache_config: Any, output: Any = None) -> Loads:
    """Read what a step's connector metadata tells workers to load.

    ExampleConnector's names no request: it is looked up in the step's scheduler output.
    """
    found = Loads()
    _read(metadata, kv_cache_config, found)
    for blocks in found.unnamed:
        req_id = _whose(blocks, output)
        if req_id is not None:
            found.add(req_id, {0: blocks})
    return found


def _whose(blocks: list[int], output: Any) -> str | None:
    """Name the request of a step that begins with these blocks."""
    for new in output.scheduled_new_reqs if output is not None else ():
        if list(new.block_ids[0][: len(blocks)]) == blocks:
            return str(new.req_id)
    return None


def _read(metadata: Any, config: Any, found: Loads) -> None:
    kind = type(metadata).__name__
    transferred = list(config.transfer_group_ids)
    if kind == "MultiKVConnectorMetadata":
        for child in metadata.metadata:
            _read(child, config, found)
    elif kind == "NixlConnectorMetadata":
        for req_id, meta in metadata.reqs_to_recv.items():
            ids = meta.local_block_ids
            found.add(req_id, dict(zip(transferred, map(list, ids), strict=False)))
    elif kind == "MooncakeConnectorMetadata":
        for pulls in metadata.reqs_to_recv.values():
            for req_id, pull in pulls.items():
                ids = map(list, pull.local_block_ids)
                found.add(req_id, dict(zip(transferred, ids, strict=False)))
    elif hasattr(metadata, "loads_by_request"):  # a test's own connector
        found.by_request.update(metadata.loads_by_request())
    elif kind == "MooncakeStoreConnectorMetadata":
        _read_store(metadata, config, found)
    elif kind == "OffloadingConnectorMetadata":
        _read_offloading(metadata, config, found)
    elif kind == "LMCacheConnectorMetadata":
        _read_lmcache(metadata, config, found)
    elif kind == "ExampleConnectorMetadata":
        size = config.kv_cache_groups[0].kv_cache_spec.block_size
        found.unnamed += [
            _blocks_of_slots(request.slot_mapping.tolist(), size)
            for request in metadata.requests
            if not request.is_store
        ]
    elif kind == "SimpleCPUOffloadMetadata":
        found.together += metadata.load_gpu_blocks
        # It tells those of earlier steps, too, as long as their loads are under way.
        started = metadata.load_event_to_reqs.get(metadata.load_event, ())
        found.requests_together += started


def _read_store(metadata: Any, config: Any, found: Loads) -> None:
    groups = list(config.prefix_cacheable_group_ids)
    for request in metadata.requests:
        load = request.load_spec
        if load is None or not load.can_load:
            continue
        blocks = {}
        for index, group_id in enumerate(groups):
            size = config.kv_cache_groups[group_id].kv_cache_spec.block_size
            start = load.vllm_cached_tokens // size
            stop = load.kvpool_cached_tokens // size
            blocks[group_id] = list(request.block_ids[index][start:stop])
        found.add(request.req_id, blocks)


def _read_offloading(metadata: Any, config: Any, found: Loads) -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.config import (
        get_offloading_group_ids,
    )

    groups = get_offloading_group_ids(config)
    for job in metadata.load_jobs.values():
        ids = iter([int(block) for block in job.dst_spec.block_ids])
        sizes = zip(groups, job.dst_spec.group_sizes, strict=True)
        found.add(job.req_id, {group: list(islice(ids, n)) for group, n in sizes})


def _read_lmcache(metadata: Any, config: Any, found: Loads) -> None:
    """Read what LMCache promised to bring.

    It copies whole chunks, and writes those blocks anew that were found locally and lie
    in the first one.
    """
    size = config.kv_cache_groups[0].kv_cache_spec.block_size
    for request in metadata.requests:
        load = request.load_spec
        if load is None or not load.can_load:
            continue
        promised = slice(load.vllm_cached_tokens, load.lmcache_cached_tokens)
        slots = request.slot_mapping[promised].tolist()
        found.add(request.req_id, {0: _blocks_of_slots(slots, size)})


def _blocks_of_slots(slots: Sequence[int], size: int) -> list[int]:
    """Return the blocks that token slots lie in, in order."""
    return list(dict.fromkeys(slot // size for slot in slots))


def without_scratch(ids: list[int], spec: Any) -> list[int]:
    """Leave the running state of a group's loaded blocks, other groups as they are.

    Mooncake transfers a state's scratch blocks for speculative tokens too, which hold
    nothing of the request.
    """
    scratch = getattr(spec, "num_speculative_blocks", None)
    if scratch is None or not ids:
        return ids
    return ids[: max(1, len(ids) - scratch)][-1:]


def differences(output: Any, kv_cache_config: Any) -> list[str]:
    """Compare, group by group, what a step loads with what it asks workers to sum.

    Loads that nobody checks (another connector, or from a decode instance) are asked of
    no worker; who knows that there are none looks at ``unsummed``.
    """
    loads = loads_of(output.kv_connector_metadata, kv_cache_config, output)
    summed = summed_blocks(output)
    found = []
    for req_id, groups in loads.by_request.items():
        if req_id not in summed:
            continue
        for group_id, (start, ids) in summed[req_id].items():
            spec = kv_cache_config.kv_cache_groups[group_id].kv_cache_spec
            expected = without_scratch(groups.get(group_id, []), spec)
            if expected != ids:
                found.append(
                    f"{req_id} group {group_id}: loaded {expected}, summed {ids} from "
                    f"position {start}"
                )
        for group_id in groups.keys() - summed[req_id].keys():
            if groups[group_id]:
                found.append(
                    f"{req_id} group {group_id}: loaded {groups[group_id]}, summed none"
                )
    known = {*loads.by_request, *loads.requests_together}
    found += [f"{r}: summed and not loaded" for r in summed.keys() - known]
    together = [
        block
        for req_id in loads.requests_together
        for _, ids in summed.get(req_id, {}).values()
        for block in ids
    ]
    if loads.together and together and sorted(loads.together) != sorted(together):
        found.append(
            f"{loads.requests_together}: loaded {loads.together}, summed {together}"
        )
    return found


def unsummed(output: Any, kv_cache_config: Any) -> list[str]:
    """Name the requests that load what a step asks no worker to sum."""
    loads = loads_of(output.kv_connector_metadata, kv_cache_config, output)
    return sorted(
        {*loads.by_request, *loads.requests_together} - summed_blocks(output).keys()
    )


def summed_blocks(output: Any) -> dict[str, dict[int, tuple[int, list[int]]]]:
    scheduled = output.kv_checksum_scheduled
    if scheduled is None:
        return {}
    return {
        req_id: {
            g: (start, [int(i) for i in ids])
            for g, (start, ids) in blocks.groups.items()
        }
        for asked in (
            scheduled.reqs_to_recv,
            scheduled.reqs_to_load,
            {r: b for r, b in scheduled.sync_loads.items() if b.groups},
        )
        for req_id, blocks in asked.items()
    }
