# SPDX-License-Identifier: Apache-2.0
"""Loads that a payload is tried on, and what may be said of it.

A real `KVChecksumScheduler` takes the load from its start to its verdict. What is fake:
the workers' records (made here of known sums), the KV cache manager (fixed block ids)
and the connector (the carrier's own function and nothing else).

The oracle reads the payload with an untyped decoder and adds up itself.
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import count
from types import SimpleNamespace
from typing import Any

import kv_checksum_utils as u
import msgspec
import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.connector import (
    NixlPullConnector,
    NixlPushConnector,
)
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import BlockHashWithGroupId, KVCacheBlock
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import RequestStatus

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumGroup,
    KVChecksumRecord,
    KVChecksumScheduled,
    KVChecksumScheduler,
)
from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.report import Reporter
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    GroupVerdict,
    LoadVerdict,
    Unverified,
)

UNIT = 8  # tokens; all block sizes here are multiples
TOKENS, LONG = 100, 131_072
FULL, WINDOW, STATE = 0, 1, 2
FINGERPRINTS = {FULL: 2**64 - 5, WINDOW: 77, STATE: 2**63}
MASK = 2**64 - 1
REQUEST = "r\n" + "x" * 5000  # clients can choose ids


@cache
def units(group_id: int, num_tokens: int) -> np.ndarray:
    """What the tokens of every unit add up to, as P and D should both find."""
    number = 1 if group_id == STATE else -(-num_tokens // UNIT)
    draw = np.random.default_rng(group_id)
    return draw.integers(0, 2**64, number, dtype=np.uint64)


def block_sums(group_id: int, block_size: int, num_tokens: int) -> np.ndarray:
    """Sums of the request's blocks; a state counts as one block of one token."""
    found = units(group_id, num_tokens)
    if group_id == STATE:
        return found
    return np.add.reduceat(found, np.arange(0, len(found), block_size // UNIT))


def right_payload(num_tokens: int, groups: tuple[int, ...]) -> wire.KVChecksumPayload:
    """What a producer with blocks of 16 tokens sends."""
    found = {}
    for group_id in groups:
        size = 1 if group_id == STATE else 16
        sums = block_sums(group_id, size, num_tokens)
        start = len(sums) - 4 if group_id == WINDOW else 0
        found[group_id] = wire.GroupChecksums(
            FINGERPRINTS[group_id], size, start, sums[start:]
        )
    return wire.KVChecksumPayload(num_tokens, 1, found)


class Connector:
    """A connector's scheduler side, as far as checksums ask it."""

    get_kv_checksum_sources = KVConnectorBase_V1.get_kv_checksum_sources


class PullConnector(Connector):
    kv_checksum_carrier = NixlPullConnector.kv_checksum_carrier


class PushConnector(Connector):
    kv_checksum_carrier = NixlPushConnector.kv_checksum_carrier


class WatchedScheduler(KVChecksumScheduler):
    """Keeps the verdict that is counted, and never holds lines back."""

    verdict: LoadVerdict | None = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        seconds = count(0, 100)
        self._reporter = Reporter(lambda: float(next(seconds)))

    def _count(self, verdict: LoadVerdict, carrier: Any) -> None:
        self.verdict = verdict
        super()._count(verdict, carrier)


@dataclass(frozen=True)
class Case:
    """A load of a consumer: its cache, where the load starts, what failures do."""

    block_size: int = 16
    first_token: int = 0
    num_tokens: int = TOKENS
    groups: tuple[int, ...] = (FULL,)
    tp_size: int = 1
    fail_closed: bool = True
    policy: str = "recompute"


CASES = (
    Case(),
    Case(first_token=32, tp_size=2, policy="fail"),
    Case(block_size=32, fail_closed=False),
    Case(block_size=8, first_token=16),
    Case(groups=(FULL, WINDOW, STATE)),
    Case(groups=(FULL, WINDOW, STATE), tp_size=2),
)
LONG_CASE = Case(num_tokens=LONG, tp_size=2)


class Load:
    """A consumer that goes through the same load again and again."""

    def __init__(self, case: Case, by_params: bool) -> None:
        self.case = case
        size, window = (
            case.block_size,
            SlidingWindowSpec(
                block_size=case.block_size,
                num_kv_heads=2,
                head_size=8,
                dtype=torch.bfloat16,
                sliding_window=40,
            ),
        )
        state = MambaSpec(block_size=size, shapes=((4,),), dtypes=(torch.float32,))
        specs = {FULL: u.full_spec(block_size=size), WINDOW: window, STATE: state}
        self.config = u.config(2**20, *((u.names(g), specs[g]) for g in case.groups))
        blocks = -(-case.num_tokens // size)
        rows = [[9] if g == STATE else list(range(1, blocks + 1)) for g in case.groups]
        self.scheduler = WatchedScheduler(
            SimpleNamespace(
                kv_transfer_config=SimpleNamespace(
                    kv_checksum_fail_closed=case.fail_closed,
                    kv_load_failure_policy=case.policy,
                ),
                parallel_config=SimpleNamespace(
                    tensor_parallel_size=case.tp_size, pipeline_parallel_size=1
                ),
            ),
            PullConnector() if by_params else PushConnector(),
            self._cache_manager(rows),
            self.config,
        )
        self.sums = {
            g: block_sums(g, 1 if g == STATE else size, case.num_tokens)
            for g in case.groups
        }
        self.starts = self._starts()
        self.records = [self._record(rank) for rank in range(case.tp_size)]

    def _cache_manager(self, rows: list[list[int]]) -> SimpleNamespace:
        """A request's blocks as vLLM holds them; those that are local have a hash."""
        groups = []
        local = self.case.first_token // self.case.block_size
        for group_id, row in zip(self.case.groups, rows, strict=True):
            blocks = [KVCacheBlock(i) for i in row]
            for block in blocks[: 0 if group_id == STATE else local]:
                block.set_block_hash(BlockHashWithGroupId(b"local"))
            groups.append(blocks)
        held = KVCacheBlocks(tuple(groups))
        return SimpleNamespace(
            get_blocks=lambda req_id: held,
            block_pool=SimpleNamespace(hash_block_size=self.case.block_size),
        )

    def size(self, group_id: int) -> int:
        """Tokens that one block of a group counts for."""
        return 1 if group_id == STATE else self.case.block_size

    def _starts(self) -> dict[int, int]:
        """The first block of every group that the connector loads."""
        size = self.case.block_size
        local = self.case.first_token // size
        window = -(-self.case.num_tokens // size) - (-(-40 // size) + 1)
        starts = {FULL: local, WINDOW: max(local, window), STATE: 0}
        return {g: starts[g] for g in self.case.groups}

    def _record(self, rank: int) -> KVChecksumRecord:
        """One worker's part; of two, each also holds a copy of some layers."""
        groups = {}
        for group_id, start in self.starts.items():
            sums = self.sums[group_id][start:]
            keys, columns = ((1, 0),), [sums]
            if self.case.tp_size == 2:
                copied = sums // np.uint64(3)
                own = sums - copied - np.uint64(5) if rank else np.full_like(sums, 5)
                keys, columns = ((1, 0), (2, rank)), [own, copied]
            groups[group_id] = KVChecksumGroup(start, keys, np.stack(columns, axis=1))
        return KVChecksumRecord(
            0,
            rank,
            {REQUEST: groups},
            equal_tp_groups=frozenset({STATE}) & set(self.case.groups),
            fingerprints={g: FINGERPRINTS[g] for g in self.case.groups},
            num_tokens={REQUEST: self.case.num_tokens},
        )

    def run(self, params: Any, received: bytes | None = None) -> LoadVerdict | None:
        """Its verdict."""
        scheduler = self.scheduler
        scheduler.verdict = None
        request = u.Request(
            request_id=REQUEST,
            # The payload is taken out of it.
            kv_transfer_params=dict(params) if isinstance(params, dict) else params,
            status=RequestStatus.WAITING_FOR_REMOTE_KVS,
            num_computed_tokens=self.case.num_tokens,
            _block_hasher=None,
        )
        scheduler.add_recv(request, self.case.first_token, self.case.num_tokens)
        asked = scheduler.build_checksum_meta() or KVChecksumScheduled()
        seqs = {r: blocks.seq for r, blocks in asked.reqs_to_recv.items()}
        records = [replace(record, seqs=seqs) for record in self.records]
        if received is not None:
            records = [replace(records[0], received={REQUEST: received}), *records[1:]]
        output = KVConnectorOutput(finished_recving={REQUEST})
        output.kv_checksums = SimpleNamespace(finalize=lambda: records)
        scheduler.collect(output)
        bad = scheduler.verify(output, {REQUEST: request})
        scheduler.keep_verified(bad, {REQUEST: request})
        self._check_state(request, bad)
        return scheduler.verdict

    def _check_state(self, request: Any, bad: dict[str, int]) -> None:
        scheduler, verdict = self.scheduler, self.scheduler.verdict
        scheduler.name_errors([[SimpleNamespace(request_id=REQUEST, error=None)]])
        assert not (scheduler._recvs or scheduler._sends or scheduler._scheduled)
        assert not scheduler._errors
        stats = scheduler.take_stats() or {}
        loads = {k: v for k, v in stats.items() if k.startswith("loads:")}
        if verdict is None:
            assert not bad and not loads
            return
        carrier = "kv_transfer_params"
        if isinstance(scheduler.connector, PushConnector):
            carrier = "connector"
        if f"unverified:{Unverified.FROM_DECODE.value}" in stats:
            carrier = "none"
        assert loads == {f"loads:{verdict.outcome}:{carrier}": 1}
        assert stats["loads_started"] == 1
        fails = self.case.fail_closed and verdict.outcome != "verified"
        assert set(bad) == ({REQUEST} if fails else set())


def assert_right(load: Load, verdict: LoadVerdict, data: bytes) -> None:
    """What a verdict claims about a payload is true."""
    case, starts = load.case, load.starts
    if not verdict.num_compared:
        assert verdict.outcome == "unverified"
        return
    version, (num_tokens, tp_size, groups) = msgspec.msgpack.decode(data)
    assert version == 1
    for group_id, group in verdict.groups.items():
        assert group.compared or not group.positions
        if group.compared:
            assert groups[group_id][0] == FINGERPRINTS[group_id]
            assert starts[group_id] <= group.first
            _assert_compared(load, group_id, groups[group_id], num_tokens, group)
    kept = load.scheduler._kept_tokens(_pending(load), verdict)
    if kept:
        (bad,) = verdict.groups.values()
        assert bad.first <= starts[FULL] and kept == bad.positions[0] * case.block_size
    if verdict.outcome == "verified":
        assert num_tokens >= case.num_tokens, "a token without a checksum"
        left_out = {STATE} if tp_size != case.tp_size else set()
        assert set(verdict.groups) == set(case.groups) - left_out
        for group_id, group in verdict.groups.items():
            number = len(load.sums[group_id]) - starts[group_id]
            assert group.compared == number or (group_id == WINDOW and group.compared)
            # Otherwise the load's first blocks were left out without a word.
            large = max(load.size(group_id), groups[group_id][1])
            assert starts[group_id] * load.size(group_id) % large == 0


def _pending(load: Load) -> Any:
    blocks = {g: (start, []) for g, start in load.starts.items()}
    return SimpleNamespace(blocks=SimpleNamespace(groups=blocks))


def _assert_compared(
    load: Load, group_id: int, theirs: Any, their_tokens: int, group: GroupVerdict
) -> None:
    """Every block was compared with P's values for its tokens, and rightly judged."""
    _, their_size, their_start, data = theirs
    values, size = np.frombuffer(data, "<u8"), load.size(group_id)
    tokens = 1 if group_id == STATE else load.case.num_tokens
    large, bad = max(size, their_size), set(group.positions)
    assert not (large % size or large % their_size or group.first * size % large)
    stop = group.first + group.compared
    assert stop <= len(load.sums[group_id])
    for begin in range(group.first * size, stop * size, large):
        end = min(begin + large, tokens)
        if end < begin + large:
            assert their_tokens == tokens, "tokens of the last block differ"
        low = begin // their_size - their_start
        high = -(-end // their_size) - their_start
        assert 0 <= low < high <= len(values), "a block without a value was compared"
        first, last = begin // size, -(-end // size)
        ours = load.sums[group_id][first:last]
        equal = not (sum(values[low:high].tolist()) - sum(ours.tolist())) & MASK
        told = bad.intersection(range(first, last))
        assert len(told) == (0 if equal else last - first)
        bad -= told
    assert not bad
