# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Store block checksums in the Mooncake store: eight more bytes of every value.

No key, round trip or copy is added: the block checksums of `KVChecksumWorker` are one
more registered region, so a value ends with the block checksum of its block. Such
values have a key namespace of their own, so that instances with and without checksums
never read each other's. Both sides of a connector decide alike, from the
configuration, whether checksums are stored.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import msgspec

from vllm.distributed.kv_transfer.kv_checksum.checksum import DEFINITION
from vllm.distributed.kv_transfer.kv_checksum.naming import blocks_named, request_name
from vllm.distributed.kv_transfer.kv_checksum.payload import decode_map
from vllm.distributed.kv_transfer.kv_checksum.stored import (
    BlockRun,
    hash_of_block,
    hashes_of_blocks,
    why_not_summed,
)
from vllm.distributed.kv_transfer.kv_checksum.support import (
    transfer_config,
    why_groups_not_stored,
    why_not_on,
)
from vllm.logger import init_logger

if TYPE_CHECKING:
    from zmq.sugar.socket import Socket

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_checksum.worker.worker import KVChecksumWorker
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.scheduler import (
        MooncakeStoreScheduler,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
        MooncakeStoreWorker,
    )
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = init_logger(__name__)

NAMESPACE = f"@kv_checksums{DEFINITION}"
"""Part of the keys. It names the version of the checksum's definition, so that values
of another version are not found."""

REMOVE_MSG = b"remove_kv_checksum_failures"
"""Tag, on the lookup channel, of a request to remove blocks on every rank."""

_OK, _ERROR = b"\x01", b"\x00"
_OBJECT_NOT_FOUND, _LEASE_EXPIRED, _RPC_FAILED = -704, -707, -900

# Failures that say nothing about a value's size. Others may: -600 is a value that is
# too long, -800 one that is too short or a transfer that failed.
_NO_QUESTION_OF_SIZE = (_OBJECT_NOT_FOUND, _LEASE_EXPIRED, _RPC_FAILED)

_encoder = msgspec.msgpack.Encoder()
_Index = Annotated[int, msgspec.Meta(ge=0)]
_decoder = msgspec.msgpack.Decoder(dict[_Index, list[bytes]])


def why_not_stored(
    vllm_config: VllmConfig, kv_cache_config: KVCacheConfig | None
) -> str | None:
    """Return why this instance stores no checksums, or None if it does.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: the KV cache groups, or None if they are not planned yet.

    """
    if (reason := why_not_on(vllm_config)) is not None:
        return reason
    options = transfer_config(vllm_config).kv_connector_extra_config
    if options.get("enable_store_tp_lcm") or options.get("store_tp_size") is not None:
        return "values are shared between TP sizes (store_tp_size), not one rank's own"
    if options.get("custom_mem_pool"):
        return "the KV cache lies in a custom memory pool"
    if kv_cache_config is None:
        return None
    if kv_cache_config.hisparse_host_num_blocks is not None:
        return "the KV cache is host-resident in part"
    return why_groups_not_stored(kv_cache_config)


class MooncakeStoreChecksums:
    """Stores block checksums with a Mooncake store worker's values.

    Args:
        store_worker: the connector's worker, before its caches are registered.
        checksums: this rank's `KVChecksumWorker`.

    """

    def __init__(
        self, store_worker: MooncakeStoreWorker, checksums: KVChecksumWorker
    ) -> None:
        self._worker, self._checksums = store_worker, checksums
        config = store_worker._kv_cache_config
        self._group_ids: Sequence[int] = config.prefix_cacheable_group_ids
        self._block_checksums = checksums.init_block_checksums(self._group_ids)
        first = store_worker.token_dbs[0].metadata
        metadata = replace(first, store_namespace=first.store_namespace + NAMESPACE)
        store_worker.token_dbs = store_worker._build_token_databases(metadata, None)
        store_worker._init_lookup_key_prefixes()

    def register(self) -> None:
        """Add the block checksums as the last region of every value.

        Raises:
            RuntimeError: the store does not take the memory.

        """
        block_checksums = self._block_checksums
        address, size = block_checksums.data_ptr(), block_checksums.element_size()
        status = self._worker.store.register_buffer(address, block_checksums.nbytes)
        if status != 0:
            raise RuntimeError(
                f"Mooncake register_buffer failed for KV checksums: {status}"
            )
        for db in self._worker.token_dbs:
            layout: Any = db.store_layout
            layout.kv_caches_base_addr.append(address)
            layout.block_len.append(size)

    def save(self, requests: Sequence[ReqMeta]) -> None:
        """Fill in the block checksums of the blocks that a step's requests store."""
        runs = []
        for request in requests:
            if not request.can_save:
                continue
            for index, db in enumerate(self._worker.token_dbs):
                ids = request.block_ids[index]
                hashes: Sequence[bytes] = request.block_hashes
                scale = db.block_size // db.hash_block_size
                start = request.token_ids_start // db.block_size
                stop = request.token_len_chunk // db.block_size
                stop = min(stop, len(ids), len(hashes) // scale)
                if start < stop:
                    hashes = hashes_of_blocks(hashes, scale, start, stop)
                    group_id = self._group_ids[index]
                    runs.append(BlockRun(group_id, start, ids[start:stop], hashes))
        if runs:
            self._checksums.save_block_checksums(runs)

    def remove(self, frames: Any) -> bytes:
        """Handle a `REMOVE_MSG`: remove blocks' keys of every rank from the store.

        The removal is forced, because the load that failed still holds a lease.

        Args:
            frames: the message's ZeroMQ frames; the second is msgpack of block hashes
                by index of the store's group.

        Returns:
            The answer to send.

        """
        try:
            wanted = decode_map(_decoder, bytes(frames[1]))
            keys = [
                f"{prefix}@{block_hash.hex()}"
                for index, hashes in wanted.items()
                for prefix in self._worker._lookup_key_prefixes[index]
                for block_hash in hashes
            ]
            failed = self._remove(keys)
        except Exception as error:
            # The channel must answer whatever went wrong, or lookups hang.
            logger.error("KV checksum failures were not removed: %s", error)
            return _ERROR
        if failed:
            logger.error(
                "Mooncake did not remove %d of %d keys that failed their KV checksums "
                "(first: %s)",
                len(failed),
                len(keys),
                failed[:3],
            )
            return _ERROR
        logger.info("Removed %d keys that failed their KV checksums", len(keys))
        return _OK

    def _remove(self, keys: Sequence[str]) -> list[tuple[str, int]]:
        """Remove keys, whoever holds a lease.

        Returns:
            The keys that are still there, with the store's status.

        """
        statuses = self._worker.store.batch_remove(keys, force=True)
        return [
            (key, status)
            for key, status in zip(keys, statuses, strict=True)
            if status not in (0, _OBJECT_NOT_FOUND)
        ]

    def drop_malformed(
        self,
        req_id: str,
        keys: Sequence[str],
        sizes: Sequence[Sequence[int]],
        statuses: Sequence[int],
    ) -> None:
        """Remove the values of a failed load that the store refuses for their size.

        Such a value can never be loaded, and keeps a good one from being stored. Every
        other failure is one of the transport, and leaves the value where it is. This
        is called on a loading thread, before the failure is reported.

        Args:
            req_id: the request whose load failed.
            keys: the keys that were to be loaded, this rank's own.
            sizes: per key, the sizes of its regions in bytes.
            statuses: per key, the store's status; negative: not loaded.

        """
        expected = {
            key: sum(regions)
            for key, regions, status in zip(keys, sizes, statuses, strict=True)
            if status < 0 and status not in _NO_QUESTION_OF_SIZE
        }
        if not expected:
            return
        began = time.perf_counter()
        try:
            malformed = _of_other_sizes(self._worker.store, expected)
            failed = self._remove(malformed) if malformed else []
        except Exception as error:
            # Values that could not be checked stay; the load fails as it would have.
            logger.warning(
                "Load of request %s: malformed values, if any, were not removed: %s",
                request_name(req_id),
                error,
            )
            return
        if not malformed:
            return
        self._worker._record_kv_connector_operation(
            operation="kv_checksum_remove_malformed",
            duration_seconds=time.perf_counter() - began,
            num_keys=len(malformed),
            status="partial_failure" if failed else "ok",
            num_failed_keys=len(failed),
        )
        key = malformed[0]
        logger.error(
            "Load of request %s: %d of %d values are of another size than a block "
            "(first: %s, %d bytes expected) and were removed, but for %d",
            request_name(req_id),
            len(malformed),
            len(keys),
            key,
            expected[key],
            len(failed),
        )


def _of_other_sizes(store: Any, expected: dict[str, int]) -> list[str]:
    """Return the keys of which all complete replicas have another size than expected.

    Args:
        store: Mooncake's store client.
        expected: bytes of a value, by key.

    """
    replicas = store.batch_get_replica_desc(list(expected))
    found = {key: set(_sizes(store, key, replicas.get(key, ()))) for key in expected}
    return [key for key, sizes in found.items() if sizes and expected[key] not in sizes]


def _sizes(store: Any, key: str, replicas: Iterable[Any]) -> Iterable[int]:
    """Yield the sizes of a value's complete replicas, where the store tells them."""
    for replica in replicas:
        if replica.status.name != "COMPLETE":
            continue
        if replica.is_memory_replica():
            yield replica.get_memory_descriptor().buffer_descriptor.size
        elif replica.is_disk_replica():
            yield replica.get_disk_descriptor().object_size
        elif (size := store.get_size(key)) >= 0:
            yield size


def create_mooncake_store_checksums(
    store_worker: MooncakeStoreWorker, checksums: KVChecksumWorker, reason: str | None
) -> MooncakeStoreChecksums | None:
    """Create the store worker's checksum handler.

    Log the reason and return None if it cannot have one; log nothing for a worker that
    only lends capacity to the store.

    Args:
        store_worker: the connector's worker side on this rank.
        checksums: this rank's `KVChecksumWorker`.
        reason: the result of `why_not_stored`.

    """
    if store_worker._capacity_only:
        return None
    group_ids = store_worker._kv_cache_config.prefix_cacheable_group_ids
    reason = reason or why_not_summed(checksums.skipped_anywhere, group_ids)
    if reason is not None:
        logger.warning("Loads from the Mooncake store are not checked: %s", reason)
        return None
    logger.info(
        "Loads from the Mooncake store are checked: every value holds its block's KV "
        "checksum, keys hold %r",
        NAMESPACE,
    )
    return MooncakeStoreChecksums(store_worker, checksums)


def remove_failures(
    store_scheduler: MooncakeStoreScheduler, request: Request, bad: dict[int, list[int]]
) -> None:
    """Ask the worker of rank 0 to remove blocks, without waiting for it.

    The lookup channel's one thread sends the message, so later lookups do not find the
    blocks any more.

    Args:
        store_scheduler: the connector's scheduler side.
        request: the request by whose hashes the blocks were loaded.
        bad: per KV cache group id, positions of blocks in the request.

    """
    wanted: dict[int, list[bytes]] = {}
    for group_id, positions in bad.items():
        index = store_scheduler._store_group_id_by_kv_cache_group_id[group_id]
        groups = store_scheduler.kv_cache_config.kv_cache_groups
        size = groups[group_id].kv_cache_spec.block_size
        scale = size // store_scheduler._hash_block_size
        hashes = request.block_hashes
        wanted[index] = [hash_of_block(hashes, scale, p) for p in positions]
    which = f"request {request_name(request.request_id)}, {blocks_named(bad)}"
    client = store_scheduler.client
    message = _encoder.encode(wanted)
    client.executor.submit(_send_remove, client.socket, message, which)


def _send_remove(socket: Socket, message: bytes, which: str) -> None:
    reason = "see rank 0's log"
    try:
        socket.send_multipart((REMOVE_MSG, message))
        if bytes(socket.recv()) == _OK:
            return
    except Exception as error:
        reason = str(error)
    logger.error("Stored KV was not removed (%s): %s", which, reason)
