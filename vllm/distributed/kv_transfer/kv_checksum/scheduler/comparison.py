# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make payloads from workers' records, and verdicts from a load's records.

Nothing here counts or logs, or changes a request, a send or a load.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.checksum import replica_checks
from vllm.distributed.kv_transfer.kv_checksum.payload import (
    GroupChecksums,
    KVChecksumPayload,
    OtherCopies,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.binding import (
    inputs_digest,
    is_bound,
    is_other_prompt,
    prompt_digests,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import (
    blocks_given_up,
    gives_up_blocks,
    holds_states,
    units_of_group,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.group_comparison import (
    LocalGroup,
    judge,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import (
    NotComparable,
    PendingLoad,
    PendingSend,
)
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    LeftOut,
    LoadVerdict,
    Unverified,
)

if TYPE_CHECKING:
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass(frozen=True)
class Comparison:
    """Makes an instance's payloads, and compares its loads with the payloads of others.

    Attributes:
        kv_cache_config: the instance's KV cache groups.
        tp_size: the instance's TP size.
        num_workers: number of workers that must report.

    """

    kv_cache_config: KVCacheConfig
    tp_size: int
    num_workers: int

    def make_payload(
        self,
        request: Request,
        send: PendingSend | None,
        rows: Callable[[], Sequence[Sequence[int]]],
    ) -> KVChecksumPayload:
        """Add up the workers' sums of a send to a payload.

        Args:
            request: the request, whose prompt the payload is bound to.
            send: the send, or None if nothing of it was summed.
            rows: returns the request's present block ids, per group.

        Raises:
            NotComparable: the workers' records do not add up.

        """
        if send is None:
            raise NotComparable(Unverified.WORKERS_MISSING, "nothing was summed")
        send.check_reports(self.num_workers)
        skipped = send.skipped()
        given_up = blocks_given_up(self.kv_cache_config, rows, send.blocks)
        groups, num_tokens = {}, send.blocks.num_tokens
        for group_id, (start, _) in send.blocks.groups.items():
            if group_id in skipped:
                continue
            units = units_of_group(self.kv_cache_config, group_id)
            parts = send.parts(group_id, units.per_block)
            try:
                checks = replica_checks(parts)
            except ValueError as error:
                raise NotComparable(Unverified.REPLICA_MISSING, str(error)) from None
            gone = given_up.get(group_id, 0) * units.per_block
            start = start * units.per_block + gone
            # Only the units of the last block that hold tokens are sent.
            held = -(-num_tokens // units.size) - start
            values, *others = (c[gone:][:held] for c in checks)
            groups[group_id] = GroupChecksums(
                send.fingerprint(group_id),
                units.size,
                start,
                values,
                _other_copies(values, others),
            )
        return KVChecksumPayload(
            num_tokens,
            self.tp_size,
            groups,
            prompt_digests(request, num_tokens),
            inputs_digest(request, num_tokens),
        )

    def judge(self, request: Request, load: PendingLoad) -> LoadVerdict:
        """Compare a load of `request` with its payload, which may be malformed."""
        try:
            payload = load.payload()
        except wire.PayloadVersionError as error:
            return LoadVerdict(unverified=Unverified.PAYLOAD_VERSION, detail=str(error))
        except ValueError as error:
            return LoadVerdict(unverified=Unverified.BAD_PAYLOAD, detail=str(error))
        if payload is None:
            return LoadVerdict(unverified=Unverified.NO_PAYLOAD)
        tokens, bound = payload.num_tokens, is_bound(request)
        if bound != bool(payload.prompt.whole):
            where = "sent" if bound else "loaded"
            detail = f"the prompt of what was {where} is given as embeddings"
            return LoadVerdict(unverified=Unverified.INPUTS, detail=detail)
        if bound and is_other_prompt(request, tokens, payload.prompt):
            return LoadVerdict(other_prompt=True)
        if payload.inputs != (inputs := inputs_digest(request, tokens)):
            detail = f"digest {payload.inputs:016x} sent, {inputs:016x} here"
            return LoadVerdict(unverified=Unverified.INPUTS, detail=detail)
        verdict = self._compare(load, payload)
        verdict.unbound = not bound
        return verdict

    def _compare(self, load: PendingLoad, payload: KVChecksumPayload) -> LoadVerdict:
        """Compare a load with a payload that is known to be of its prompt.

        Groups that are left out are removed from the payload.
        """
        try:
            load.check_reports(self.num_workers)
        except NotComparable as error:
            return LoadVerdict(unverified=error.reason, detail=error.detail)
        skipped, left_out = load.skipped(), {}
        if payload.tp_size != self.tp_size:
            for group_id in load.equal_tp_groups() - skipped:
                left_out[group_id] = LeftOut.TP_SIZES
                payload.groups.pop(group_id, None)
                skipped.add(group_id)
        local: dict[int, LocalGroup | NotComparable | None] = {
            group_id: self._local_group(load, group_id)
            for group_id in load.blocks.groups
            if group_id not in skipped
        }
        local.update(dict.fromkeys(load.empty - skipped))
        verdict = judge(payload, local, load.blocks.num_tokens)
        verdict.left_out = left_out
        for group_id, group in verdict.groups.items():
            ours = local.get(group_id)
            if group.positions and isinstance(ours, LocalGroup):
                group.ranks = load.ranks_of_checks(
                    group_id, group.bad_checks, len(ours.checks)
                )
            if group.partial and gives_up_blocks(self.kv_cache_config, group_id):
                verdict.left_out[group_id] = LeftOut.PARTIAL_BLOCKS
        return verdict

    def _local_group(
        self, load: PendingLoad, group_id: int
    ) -> LocalGroup | NotComparable:
        config = self.kv_cache_config
        units = units_of_group(config, group_id)
        try:
            checks = replica_checks(load.parts(group_id, units.per_block))
        except NotComparable as error:
            return error
        except ValueError as error:
            return NotComparable(Unverified.REPLICA_MISSING, str(error))
        return LocalGroup(
            load.fingerprint(group_id),
            units,
            load.blocks.groups[group_id][0],
            checks,
            is_state=holds_states(config, group_id),
            is_window=gives_up_blocks(config, group_id),
        )


def _other_copies(
    first: np.ndarray, others: Sequence[np.ndarray]
) -> OtherCopies | None:
    """Return the units of a group's other copies that differ from the first.

    Return None if all copies are equal.

    Args:
        first: uint64 ``(units,)``.
        others: the other copies, of the same shape.

    """
    if not others:
        return None
    differ = np.stack(others) != first
    copy, at = np.nonzero(differ)
    return OtherCopies(copy, at, np.stack(others)[differ]) if len(at) else None
