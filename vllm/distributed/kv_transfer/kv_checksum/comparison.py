# SPDX-License-Identifier: Apache-2.0
"""From workers' records to a payload, and from a load's to its verdict.

Nothing here changes what it is given, counts or logs.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from . import payload as wire
from .blocks import (
    blocks_given_up,
    gives_up_blocks,
    holds_states,
    summed_block_size,
)
from .checksum import replica_checks
from .payload import GroupChecksums, KVChecksumPayload
from .pending import NotComparable, Pending, PendingLoad
from .verdict import LeftOut, LoadVerdict, LocalGroup, Unverified, judge


@dataclass(frozen=True)
class Comparison:
    """What an instance needs to know to make payloads and to compare with them.

    Attributes:
        kv_cache_config: its KV cache groups.
        tp_size: its TP size.
        num_workers: workers that must report (TP times PP).
    """

    kv_cache_config: Any
    tp_size: int
    num_workers: int

    def make_payload(
        self, send: Pending | None, rows: Callable[[], Sequence[Sequence[int]]]
    ) -> KVChecksumPayload:
        """Add up what the workers summed of a send.

        Args:
            send: the send, or None if nothing of it was summed.
            rows: gives the request's block ids now, per group.

        Raises:
            NotComparable: the workers' records do not add up.
        """
        if send is None:
            raise NotComparable(Unverified.WORKERS_MISSING)
        send.check_reports(self.num_workers)
        skipped = send.skipped()
        given_up = blocks_given_up(self.kv_cache_config, rows, send.blocks)
        groups = {}
        for group_id, (start, _) in send.blocks.groups.items():
            if group_id in skipped:
                continue
            parts = send.parts(group_id)
            try:
                # Check 0 adds copy 0 of every layer.
                values = replica_checks(parts)[0]
            except ValueError:
                raise NotComparable(Unverified.REPLICA_MISSING) from None
            gone = given_up.get(group_id, 0)
            groups[group_id] = GroupChecksums(
                send.fingerprint(group_id),
                summed_block_size(self.kv_cache_config, group_id),
                start + gone,
                values[gone:],
            )
        return KVChecksumPayload(send.blocks.num_tokens, self.tp_size, groups)

    def judge(self, load: PendingLoad) -> LoadVerdict:
        """Compare a load with its payload, which may be of any form."""
        try:
            payload = load.payload()
        except wire.PayloadVersionError as error:
            return LoadVerdict(unverified=Unverified.PAYLOAD_VERSION, detail=str(error))
        except ValueError as error:
            return LoadVerdict(unverified=Unverified.BAD_PAYLOAD, detail=str(error))
        if payload is None:
            return LoadVerdict(unverified=Unverified.NO_PAYLOAD)
        try:
            load.check_reports(self.num_workers)
        except NotComparable as error:
            return LoadVerdict(unverified=error.reason)
        skipped, left_out = load.skipped(), {}
        if payload.tp_size != self.tp_size:
            for group_id in load.equal_tp_groups() - skipped:
                left_out[group_id] = LeftOut.TP_SIZES
                payload.groups.pop(group_id, None)
                skipped.add(group_id)
        local: dict[int, LocalGroup | Unverified | None] = {
            group_id: self._local_group(load, group_id)
            for group_id in load.blocks.groups
            if group_id not in skipped
        }
        local.update(dict.fromkeys(load.empty - skipped))
        verdict = judge(payload, local, load.blocks.num_tokens)
        verdict.left_out = left_out
        for group_id, group in verdict.groups.items():
            if 0 < group.compared < len(load.blocks.groups[group_id][1]):
                verdict.left_out[group_id] = LeftOut.PARTIAL_BLOCKS
        return verdict

    def _local_group(self, load: PendingLoad, group_id: int) -> LocalGroup | Unverified:
        try:
            checks = replica_checks(load.parts(group_id))
        except NotComparable as error:
            return error.reason
        except ValueError:
            return Unverified.REPLICA_MISSING
        config = self.kv_cache_config
        return LocalGroup(
            load.fingerprint(group_id),
            summed_block_size(config, group_id),
            load.blocks.groups[group_id][0],
            checks,
            is_state=holds_states(config, group_id),
            is_window=gives_up_blocks(config, group_id),
        )
