# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Handle the consequences of loads that are not verified.

Fail-closed they fail: the request ends with an error, or computes the KV itself.
Fail-open they are used, and kept out of prefix caches and stores from the first bad
block on. What is bad is not loaded again.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from vllm.distributed.kv_transfer.kv_checksum import metrics
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import (
    holds_states,
    units_of_group,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.client_errors import (
    ClientErrors,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.ledger_loads import LedgerLoads
from vllm.distributed.kv_transfer.kv_checksum.scheduler.local_hits import LocalHits
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingLoad
from vllm.distributed.kv_transfer.kv_checksum.scheduler.prefix_cache import disown
from vllm.distributed.kv_transfer.kv_checksum.scheduler.report import (
    Reporter,
    remote_engine,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.stored_loads import StoredLoads
from vllm.distributed.kv_transfer.kv_checksum.scheduler.users import users_of
from vllm.distributed.kv_transfer.kv_checksum.support import why_whole_blocks_differ
from vllm.distributed.kv_transfer.kv_checksum.verdict import LeftOut, LoadVerdict
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass
class Consequences:
    """Lets bad loads fail, or keeps what they brought from spreading.

    Attributes:
        kv_cache_config: the KV cache groups.
        kv_cache_manager: the manager that knows a request's blocks.
        fail_closed: whether loads that are not verified fail.
        recompute: whether a request whose load fails computes the KV itself.
        stored: drops stored blocks.
        ledger: denies blocks that were bad; None if there is none.
        reporter: logs.
        stats: counts by key of `metrics`.
        seqs: the numbers of sends and loads.
        computes: requests that ask no cache tier again, as a load of theirs was bad.

    """

    kv_cache_config: KVCacheConfig
    kv_cache_manager: KVCacheManager
    fail_closed: bool
    recompute: bool
    stored: StoredLoads
    ledger: LedgerLoads | None
    reporter: Reporter
    stats: Counter[str]
    seqs: Iterator[int]
    computes: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        groups = self.kv_cache_config.kv_cache_groups
        self._several_groups = len(groups) > 1
        self._keeps_prefix = (
            self.recompute
            and not self._several_groups
            and why_whole_blocks_differ(groups) is None
        )
        self._pool = self.kv_cache_manager.block_pool
        self._hash_block_size: int = self._pool.hash_block_size
        self.client_errors = ClientErrors()
        # Running requests that must not go on with the KV that they have, and those
        # of them that end with an error.
        self._stopped: set[str] = set()
        self._failed: set[str] = set()

    def see_to(
        self,
        request: Request,
        load: PendingLoad,
        verdict: LoadVerdict,
        bad: dict[str, int],
    ) -> str:
        """Log a load that is not verified, drop its stored blocks, and let it fail.

        It fails only with fail-closed: then it is added to `bad`. Return what happens
        to it, in words.
        """
        req_id = load.req_id
        kept = self._kept_tokens(load, verdict)
        action = self.action(load, kept)
        self.reporter.load(req_id, verdict, self._source(load), action)
        if load.blocks.stored and verdict.mismatched:
            dropped = self.stored.drop_mismatched(request, verdict)
            self.stats[metrics.STORED_BLOCKS_DROPPED] += dropped
        if self.ledger is not None and load.carrier is KVChecksumCarrier.LEDGER:
            self.ledger.deny(load, verdict, next(self.seqs))
            self.ledger.note_completed(load, verdict)
            if self.fail_closed:
                self.ledger.deny_unknown(load, verdict, next(self.seqs))
            if self.fail_closed and not request.is_finished():
                self.computes.add(req_id)
        elif self.fail_closed and load.may_be_offered_again:
            self.stored.give_up(request)
        if self.fail_closed and not load.is_sync:
            bad[req_id] = kept
            if self.fails(load):
                self.client_errors.add(req_id, verdict)
            elif self.ledger is not None:
                self.ledger.set_loaded(req_id, kept)
        return action

    def fail(self, req_id: str, verdict: LoadVerdict) -> None:
        """Let a request end with an error, with the output of the next step."""
        self.client_errors.add(req_id, verdict)
        self._stopped.add(req_id)

    def fails(self, load: PendingLoad) -> bool:
        """Tell whether a request whose load fails ends with an error.

        vLLM has no way to compute a synchronous load again where blocks are of several
        groups.
        """
        return not self.recompute or (load.is_sync and self._several_groups)

    def count_failure(self, load: PendingLoad) -> None:
        """Count a request that fails, or computes the KV itself, because of a load."""
        self.stats[metrics.FAILED if self.fails(load) else metrics.RECOMPUTED] += 1

    def note_users(
        self,
        load: PendingLoad,
        verdict: LoadVerdict,
        requests: Mapping[str, Request],
        bad: dict[str, int],
    ) -> None:
        """Note every request whose KV rests on what a synchronous load brought.

        Its blocks were cached when it started, so others may have found them. Fail-open
        they are served, and kept out of the prefix cache from the first bad block on.
        """
        if not (verdict.mismatched or (self.fail_closed and verdict.reason)):
            return
        assert self.ledger is not None  # else such loads are declined
        whole = verdict.reason is not None and self.fail_closed
        blocks = self.ledger.blocks_at(load, None if whole else verdict)
        if load.request is not None:
            cached = self.ledger.cached_as(load, blocks, self._pool)
            self.kv_cache_manager.evict_blocks(cached)
        seq = next(self.seqs)
        users = users_of(
            blocks, requests.values(), self.kv_cache_manager, self.kv_cache_config
        )
        for user in list(users):
            request, req_id = user.request, user.request.request_id
            # What was computed from it; the loaded blocks were judged one by one.
            behind = user.first_token
            if load.carrier is not KVChecksumCarrier.LOCAL:
                behind = max(behind, load.num_tokens)
            self.ledger.deny_from(request, behind, seq)
            self.kv_cache_manager.evict_blocks(user.block_ids)
            if not self.fail_closed:
                disown(request, user.first_token, self._hash_block_size)
                continue
            self.ledger.forget(req_id)
            if self.fails(load):
                self.client_errors.add(req_id, verdict)
            if request.status == RequestStatus.RUNNING:
                self._stopped.add(req_id)
            else:
                bad[req_id] = 0
            if req_id not in (load.req_id, LocalHits.request_of(load)):
                self.count_failure(load)

    def stop_users(self, scheduler: Scheduler) -> set[str]:
        """Stop the running requests whose KV is bad, so that no token of theirs leaves.

        They are preempted, and what is in flight of them is dropped; or they end with
        an error, which `take_failed` names.

        Args:
            scheduler: vLLM's scheduler.

        Returns:
            Ids of the requests whose output of this step does not count.

        """
        stopped, self._stopped = self._stopped, set()
        if not self.recompute or self._several_groups:
            self._failed |= stopped
            return stopped
        timestamp = time.monotonic()
        for request in [r for r in scheduler.running if r.request_id in stopped][::-1]:
            scheduler.running.remove(request)
            scheduler._preempt_request(request, timestamp, drop_stale_output=True)
            # It may resume in the next step, as if it had not been in this one.
            scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        return set()

    def take_failed(self) -> set[str]:
        """Return the running requests that must end with an error."""
        failed, self._failed = self._failed, set()
        return failed

    def keep_away(
        self, request: Request, load: PendingLoad, verdict: LoadVerdict
    ) -> None:
        """Keep later requests from finding the bad or incomplete blocks of a used load.

        In a window's first block, the part that the producer did not send holds stale
        bytes; this request does not need it, but another may.
        """
        first_token = partial(self._first_token, load)
        first = [
            first_token(group_id, start)
            for group_id, (start, _) in load.blocks.groups.items()
            if verdict.other_prompt
            or verdict.left_out.get(group_id) is LeftOut.PARTIAL_BLOCKS
        ]
        if (bad := verdict.first_bad_token(first_token)) is not None:
            first.append(bad)
        if first:
            disown(request, min(first), self._hash_block_size)

    def _first_token(self, load: PendingLoad, group_id: int, position: int) -> int:
        """Return the first token of a block; for a state, the load's last token."""
        if holds_states(self.kv_cache_config, group_id):
            return load.blocks.num_tokens - 1
        return position * self._block_size(group_id)

    @staticmethod
    def _source(load: PendingLoad) -> str:
        """Describe the store, connector or engine that a load came from."""
        if load.blocks.stored:
            return f"store of {load.connector}"
        return remote_engine(load.params) if load.is_from_peer else load.connector

    def _kept_tokens(self, load: PendingLoad, verdict: LoadVerdict) -> int:
        """Return the number of tokens before the first bad block that may be kept."""
        if not self._keeps_prefix or verdict.reason is not None:
            return 0
        return verdict.good_blocks(0) * self._block_size(0)

    def action(self, load: PendingLoad, kept: int) -> str:
        if not self.fail_closed:
            return "served as loaded"
        return (
            "request failed" if self.fails(load) else f"recomputing from token {kept}"
        )

    def _block_size(self, group_id: int) -> int:
        return units_of_group(self.kv_cache_config, group_id).block_size
