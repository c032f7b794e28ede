# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Collect and add up the workers' sums of a send or a load in progress.

A record that is missing, or that covers other blocks than were asked for, makes the
whole send or load not comparable; it never counts as a difference.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.checksum import (
    MASK64,
    KVChecksumBlocks,
    KVChecksumGroup,
    KVChecksumRecord,
    ReplicaKey,
    add_records,
)
from vllm.distributed.kv_transfer.kv_checksum.payload import (
    KVChecksumCarrier,
    KVChecksumPayload,
)
from vllm.distributed.kv_transfer.kv_checksum.verdict import Unverified

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import BlockHash
    from vllm.v1.request import Request

_FROM_TIERS = (None, KVChecksumCarrier.STORED, KVChecksumCarrier.LEDGER)
"""Carriers of loads whose connector offers them to every request of the prefix."""


FROM_PEERS = (KVChecksumCarrier.KV_TRANSFER_PARAMS, KVChecksumCarrier.CONNECTOR)
"""Carriers of loads that another engine sends."""


class NotComparable(Exception):
    """Raised if the workers' records do not add up to what was asked for.

    `reason` is from the fixed set; `detail` gives the numbers that do not fit.
    """

    def __init__(self, reason: Unverified, detail: str = "") -> None:
        super().__init__(reason.value)
        self.reason, self.detail = reason, detail


@dataclass
class PendingSend:
    """A send in progress: collects the workers' records.

    Attributes:
        req_id: the request.
        blocks: the blocks that workers were asked to sum.
        records: the records so far, by PP rank and TP rank.

    """

    req_id: str
    blocks: KVChecksumBlocks
    records: dict[tuple[int, int], KVChecksumRecord] = field(default_factory=dict)

    def take(self, record: KVChecksumRecord) -> None:
        """Keep a worker's record if it belongs to this send or load.

        Records of a step that was rolled back, or of an earlier request of the
        same id, have other numbers.
        """
        if record.seqs.get(self.req_id) == self.blocks.seq:
            self.records[record.pp_rank, record.tp_rank] = record

    def check_reports(self, num_workers: int) -> None:
        """Check that every worker summed the blocks that it was asked to.

        Raises:
            NotComparable: a worker is missing, or summed another number of tokens.

        """
        if len(self.records) != num_workers:
            raise NotComparable(
                Unverified.WORKERS_MISSING,
                f"{len(self.records)} of {num_workers} workers reported",
            )
        tokens = {r.num_tokens.get(self.req_id) for r in self.records.values()}
        if tokens != {self.blocks.num_tokens}:
            raise NotComparable(
                Unverified.OTHER_BLOCKS,
                f"{self.blocks.num_tokens} tokens asked for, {len(tokens)} counts "
                "reported",
            )

    def skipped(self) -> set[int]:
        """Return the groups that some worker does not sum."""
        return {g for r in self.records.values() for g in r.skipped_groups}

    def equal_tp_groups(self) -> set[int]:
        """Return the groups whose sums compare only with those of an equal TP size."""
        return {g for r in self.records.values() for g in r.equal_tp_groups}

    def fingerprint(self, group_id: int) -> int:
        """Add a group's fingerprints over PP stages, mod 2**64.

        The TP ranks of a stage hold the same layers, so one of them counts.
        """
        by_stage = {
            r.pp_rank: r.fingerprints.get(group_id, 0) for r in self.records.values()
        }
        return sum(by_stage.values()) & MASK64

    def ranks_of_checks(
        self, group_id: int, checks: frozenset[int], number: int
    ) -> tuple[tuple[int, int], ...]:
        """Return the PP and TP ranks whose copies alone are in some checks.

        Return none if that excludes no worker. Where ranks hold the same KV, each check
        adds another of its copies, so what differs in some checks alone is theirs.

        Args:
            group_id: the KV cache group.
            checks: the checks, as `replica_checks` numbers them.
            number: how many checks there are.

        """
        held = {
            rank: record.checksums[self.req_id][group_id].replica_keys
            for rank, record in sorted(self.records.items())
            if group_id in record.checksums[self.req_id]
        }
        ranks = tuple(
            rank
            for rank, keys in held.items()
            if any(checks.issuperset(range(i, number, n)) for n, i in keys)
        )
        return ranks if len(ranks) < len(held) else ()

    def parts(
        self, group_id: int, units_per_block: int
    ) -> dict[ReplicaKey, KVChecksumGroup]:
        """Add up the workers' sums of one group's units, per replica key.

        Raises:
            NotComparable: the sums are of other blocks, or a worker that holds layers
                of the group reports none.

        """
        start, ids = self.blocks.groups[group_id]
        records = self.records.values()
        try:
            parts = add_records(records, self.req_id, group_id)
        except ValueError as error:
            raise NotComparable(Unverified.OTHER_BLOCKS, str(error)) from None
        if any(
            (group_id in r.fingerprints) != (group_id in r.checksums[self.req_id])
            for r in records
        ) or any(
            p.start != start * units_per_block
            or len(p.values) != len(ids) * units_per_block
            for p in parts.values()
        ):
            raise NotComparable(
                Unverified.OTHER_BLOCKS,
                f"{len(ids)} blocks from position {start} on asked for",
            )
        return parts


@dataclass
class PendingLoad(PendingSend):
    """A load in progress.

    Attributes:
        carrier: the carrier of its payload, or None if nobody checks the load.
        params: the request's ``kv_transfer_params`` when the load started.
        connector: the name of the connector that loads it.
        unverified: why it will not be compared in any case, or None.
        is_sync: whether it ends in the step in which it starts.
        num_tokens: tokens of the request that are local or loaded.
        request: the request, if it is synchronous: it is judged even if that has ended.
        block_hashes: the request's hashes when it started, where there is a ledger.
            It may get others, as it found bad blocks in the prefix cache.
        empty: groups of which it brings nothing.
        computes_last: whether its last token is computed here all the same.
        sent: the payload that `params` held, or why it does not decode.
        received: the payload that its connector brought, the first intact copy.

    """

    carrier: KVChecksumCarrier | None = None
    params: dict[str, Any] = field(default_factory=dict)
    connector: str = ""
    unverified: Unverified | None = None
    is_sync: bool = False
    num_tokens: int = 0
    request: Request | None = None
    block_hashes: Sequence[BlockHash] = ()
    empty: set[int] = field(default_factory=set)
    computes_last: bool = False
    sent: KVChecksumPayload | ValueError | None = None
    received: bytes | None = None

    @property
    def is_from_peer(self) -> bool:
        """Tell whether another engine sent it, which its parameters name."""
        return self.carrier in FROM_PEERS or self.unverified is Unverified.FROM_DECODE

    @property
    def may_be_offered_again(self) -> bool:
        """Tell whether the connector would load the same again for this request.

        Loads of a prefill instance's KV are offered once. But where the request also
        asks to be sent on (NIXL pull), they are offered as those of a decode instance.
        """
        return self.carrier in _FROM_TIERS or bool(self.params.get("do_remote_decode"))

    def payload(self) -> KVChecksumPayload | None:
        """Decode the producer's payload; return None if there is none.

        Raises:
            ValueError: in the cases of `payload.decode`.

        """
        if self.carrier is KVChecksumCarrier.CONNECTOR:
            return None if self.received is None else wire.decode(self.received)
        if isinstance(self.sent, ValueError):
            raise self.sent
        return self.sent

    def take_sent(self) -> None:
        """Take the payload out of `params`, where nobody else needs it.

        A router may append a token to the prompt. The consumer loads a slot for it, and
        computes it all the same: then only the tokens that the producer summed count.
        """
        text = self.params.pop(wire.KV_TRANSFER_PARAMS_KEY, None)
        if text is None or self.carrier is not KVChecksumCarrier.KV_TRANSFER_PARAMS:
            return
        try:
            self.sent = wire.decode_text(text)
        except ValueError as error:
            self.sent = error
            return
        if self.computes_last and self.sent.num_tokens == self.blocks.num_tokens - 1:
            self.blocks.num_tokens -= 1
