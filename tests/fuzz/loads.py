# SPDX-License-Identifier: Apache-2.0
"""Try payloads on loads, and tell the verdict that each must have.

A real `KVChecksumScheduler` takes the load from its start to its verdict. What is fake:
the workers' records (made here of known sums), the KV cache manager (fixed block ids)
and the connector (the carrier's own function and nothing else).
"""

from dataclasses import dataclass, replace
from functools import cache
from hashlib import blake2b
from itertools import accumulate, count
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from kv_checksum.rig import caches as u
from kv_checksum.rig import reference

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumGroup,
    KVChecksumRecord,
    KVChecksumScheduled,
    KVChecksumScheduler,
)
from vllm.distributed.kv_transfer.kv_checksum import payload as wire
from vllm.distributed.kv_transfer.kv_checksum.scheduler.binding import PromptDigests
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingLoad
from vllm.distributed.kv_transfer.kv_checksum.scheduler.report import Reporter
from vllm.distributed.kv_transfer.kv_checksum.verdict import LoadVerdict, Unverified
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

TOKENS, LONG = 100, 131_072
WINDOW_TOKENS = 40
FULL, WINDOW, STATE = HYBRID = 0, 1, 2
FINGERPRINTS = {FULL: 2**64 - 5, WINDOW: 77, STATE: 2**63}
MASK = 2**64 - 1
REQUEST = "r\n" + "x" * 5000  # clients can choose ids
PROMPT: list[int] = np.random.default_rng(9).integers(0, 2**18, LONG).tolist()


@cache
def values_of_tokens(group_id: int, copy: int) -> np.ndarray:
    """Return each token's share of its unit's sum; the copies of some layers differ here."""
    draw = np.random.default_rng(group_id)
    found = draw.integers(0, 2**64, LONG, dtype=np.uint64)
    if copy:
        found[7::40] += np.uint64(1)
        found[19::40] += np.uint64(2)
    return found


def unit_sums(group_id: int, size: int, num_tokens: int, copy: int = 0) -> np.ndarray:
    """Return sums of the request's units; a state is one unit, of all tokens before it."""
    found = values_of_tokens(group_id, copy)[:num_tokens]
    if group_id == STATE:
        return found[-1:]
    return np.add.reduceat(found, np.arange(0, num_tokens, size))


SUMS = list(
    accumulate(
        (reference.prompt_term(j, *PROMPT[j : j + 2]) for j in range(0, LONG, 2)),
        initial=0,
    )
)
"""Terms of the prompt's first tokens added up, by how many pairs they are."""


def prompt_digest(num_tokens: int) -> int:
    """Return the digest of the first tokens of `PROMPT`."""
    total = num_tokens + SUMS[num_tokens // 2]
    if num_tokens % 2:
        total += reference.prompt_term(num_tokens - 1, PROMPT[num_tokens - 1])
    return total & MASK or 1


def inputs_digest(num_tokens: int) -> int:
    """Return the digest of an adapter, and of an image at the tokens from 40 on."""
    image = b"\x91\x93\xa5image\x28\x08" if num_tokens > 40 else b"\x90"
    named = blake2b(b"\x92\xa7adapter" + image, digest_size=8)
    return int.from_bytes(named.digest(), "little")


@dataclass(frozen=True)
class Case:
    """A load of a consumer: its cache, where the load starts, what failures do.

    Attributes:
        copies: its workers hold other bits of the layers that both of them have.
        longer: tokens of its prompt behind those that are loaded.
        embeds: its prompt is given as embeddings.
        inputs: it has other inputs than its prompt.

    """

    block_size: int = 16
    first_token: int = 0
    num_tokens: int = TOKENS
    groups: tuple[int, ...] = (FULL,)
    tp_size: int = 1
    fail_closed: bool = True
    policy: str = "recompute"
    copies: bool = False
    longer: int = 0
    embeds: bool = False
    inputs: bool = False

    @property
    def unit_size(self) -> int:
        return reference.unit_size(self.block_size)

    @property
    def num_prompt_tokens(self) -> int:
        return self.num_tokens + self.longer

    def prompt_digest(self, num_tokens: int) -> int:
        """Return the digest of the prompt's first tokens."""
        if self.embeds:
            return 0
        return prompt_digest(min(num_tokens, self.num_prompt_tokens))

    def prompt_digests(self, num_tokens: int) -> PromptDigests:
        """Return a producer's digests of the prompt: of all, and of the tokens that fill units."""
        filled = num_tokens // 16 * 16
        return PromptDigests(self.prompt_digest(num_tokens), self.prompt_digest(filled))

    def is_of(self, num_tokens: int, whole: int, beginning: int) -> bool:
        """Return whether what was sent is of this prompt, or of one that it begins."""
        if num_tokens <= self.num_prompt_tokens:
            return whole == self.prompt_digest(num_tokens)
        filled = num_tokens // 16 * 16
        if filled > self.num_prompt_tokens:
            return False
        return beginning == self.prompt_digest(filled)

    def inputs_digest(self, num_tokens: int) -> int:
        return inputs_digest(num_tokens) if self.inputs else 0

    @property
    def computes_last(self) -> bool:
        """Return whether the load's last token need not be what was loaded for it."""
        return not self.longer and STATE not in self.groups


CASES = (
    Case(),
    Case(first_token=32, tp_size=2, policy="fail"),
    Case(block_size=32, groups=(FULL, WINDOW), fail_closed=False),
    Case(block_size=8, first_token=16),
    Case(groups=HYBRID),
    Case(groups=HYBRID, tp_size=2, copies=True),
    Case(block_size=48, first_token=48, groups=(FULL, WINDOW), longer=1),
    Case(embeds=True),
    Case(inputs=True),
)
LONG_CASE = Case(num_tokens=LONG, tp_size=2)


def right_payload(case: Case, num_tokens: int | None = None) -> wire.KVChecksumPayload:
    """Return the payload that a producer with blocks of 16 tokens sends."""
    num_tokens = num_tokens or case.num_tokens
    found = {}
    for group_id in case.groups:
        size = 1 if group_id == STATE else 16
        sums = unit_sums(group_id, size, num_tokens)
        start = len(sums) - 4 if group_id == WINDOW else 0
        others, copies = unit_sums(group_id, size, num_tokens, 1), None
        if case.copies:
            (at,) = np.nonzero((others != sums)[start:])
            copies = wire.OtherCopies(at * 0, at, others[start:][at])
        found[group_id] = wire.GroupChecksums(
            FINGERPRINTS[group_id], size, start, sums[start:], copies
        )
    digests = case.prompt_digests(num_tokens), case.inputs_digest(num_tokens)
    tp_size = case.tp_size if case.copies else 1
    return wire.KVChecksumPayload(num_tokens, tp_size, found, *digests)


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
        self._count = self._judging.count
        self._judging.count = self._keep_verdict  # type: ignore[method-assign]

    def _keep_verdict(self, verdict: LoadVerdict, load: PendingLoad) -> None:
        self.verdict = verdict
        self._count(verdict, load)


class Load:
    """A consumer that goes through the same load again and again."""

    kept = 0

    def __init__(self, case: Case, by_params: bool, **settings: Any) -> None:
        self.case, self.by_params = case, by_params
        size, window = (
            case.block_size,
            SlidingWindowSpec(
                block_size=case.block_size,
                num_kv_heads=2,
                head_size=8,
                dtype=torch.bfloat16,
                sliding_window=WINDOW_TOKENS,
            ),
        )
        state = MambaSpec(block_size=size, shapes=((4,),), dtypes=(torch.float32,))
        specs = {FULL: u.full_spec(block_size=size), WINDOW: window, STATE: state}
        self.config = u.config(2**20, *((u.names(g), specs[g]) for g in case.groups))
        self.num_blocks = -(-case.num_tokens // size)
        self.scheduler = WatchedScheduler(
            SimpleNamespace(
                kv_transfer_config=SimpleNamespace(
                    kv_checksum_fail_closed=case.fail_closed,
                    kv_checksum_evidence_dir=None,
                    kv_load_failure_policy=case.policy,
                    **{
                        "kv_checksum_quarantine": 0,
                        "kv_checksum_quarantine_from_requests": False,
                        **settings,
                    },
                ),
                parallel_config=SimpleNamespace(
                    tensor_parallel_size=case.tp_size,
                    pipeline_parallel_size=1,
                    decode_context_parallel_size=1,
                ),
                observability_config=SimpleNamespace(otlp_traces_endpoint=None),
            ),
            PullConnector() if by_params else PushConnector(),
            self._cache_manager(),
            self.config,
        )
        self.starts = self._starts()
        self.prompt = None if case.embeds else PROMPT[: case.num_prompt_tokens]
        self.image = SimpleNamespace(
            identifier="image", mm_position=SimpleNamespace(offset=40, length=8)
        )
        self._records: dict[int, list[KVChecksumRecord]] = {}
        for fewer in (0, 1):
            self.records(case.num_tokens - fewer)

    def _cache_manager(self) -> SimpleNamespace:
        """Return a request's blocks as vLLM holds them; those that are local have a hash."""
        groups = []
        local = self.case.first_token // self.case.block_size
        for group_id in self.case.groups:
            if group_id == STATE:
                groups.append([KVCacheBlock(9)])
                continue
            blocks = [KVCacheBlock(i) for i in range(1, self.num_blocks + 1)]
            for block in blocks[:local]:
                block.set_block_hash(BlockHashWithGroupId(b"local"))
            groups.append(blocks)
        held = KVCacheBlocks(tuple(groups))
        return SimpleNamespace(
            get_blocks=lambda req_id: held,
            block_pool=SimpleNamespace(hash_block_size=self.case.block_size),
        )

    def tokens(self, sent: int) -> int:
        """Return how many tokens of a load count, if its payload is of `sent`."""
        last = self.by_params and self.case.computes_last
        return (
            sent if last and sent + 1 == self.case.num_tokens else self.case.num_tokens
        )

    def units(self, group_id: int) -> tuple[int, int]:
        """Return the tokens per unit of a group, and the units per block."""
        if group_id == STATE:
            return 1, 1
        return self.case.unit_size, self.case.block_size // self.case.unit_size

    def _starts(self) -> dict[int, int]:
        """Return the first unit of every group that the connector loads."""
        size = self.case.block_size
        local = self.case.first_token // size
        window = self.num_blocks - (-(-WINDOW_TOKENS // size) + 1)
        starts = {FULL: local, WINDOW: max(local, window), STATE: 0}
        return {g: starts[g] * self.units(g)[1] for g in self.case.groups}

    def sums(self, group_id: int, num_tokens: int) -> list[np.ndarray]:
        """Return the sums of the loaded units that have tokens, per replica check."""
        size, start = self.units(group_id)[0], self.starts[group_id]
        copies = [0, int(self.case.copies)][: self.case.tp_size]
        return [unit_sums(group_id, size, num_tokens, c)[start:] for c in copies]

    def records(self, num_tokens: int) -> list[KVChecksumRecord]:
        if num_tokens not in self._records:
            ranks = range(self.case.tp_size)
            self._records[num_tokens] = [self._record(r, num_tokens) for r in ranks]
        return self._records[num_tokens]

    def _record(self, rank: int, num_tokens: int) -> KVChecksumRecord:
        """Return one worker's part; of two, each also holds a copy of some layers."""
        groups = {}
        for group_id, start in self.starts.items():
            blocks = 1 if group_id == STATE else self.num_blocks
            number = blocks * self.units(group_id)[1] - start
            sums = [
                np.pad(held, (0, number - len(held)))
                for held in self.sums(group_id, num_tokens)
            ]
            keys, columns = ((1, 0),), sums
            if self.case.tp_size == 2:
                copied = sums[0] // np.uint64(3)
                own = sums[0] - copied - np.uint64(5)
                own = own if rank else np.full_like(own, 5)
                keys = ((1, 0), (2, rank))
                columns = [own, copied + sums[rank] - sums[0]]
            groups[group_id] = KVChecksumGroup(start, keys, np.stack(columns, axis=1))
        return KVChecksumRecord(
            0,
            rank,
            {REQUEST: groups},
            equal_tp_groups=frozenset({STATE}) & set(self.case.groups),
            fingerprints={g: FINGERPRINTS[g] for g in self.case.groups},
            num_tokens={REQUEST: num_tokens},
        )

    def run(self, params: Any, received: bytes | None = None) -> LoadVerdict | None:
        """Return the load's verdict; `kept` tells how many tokens need no recompute."""
        scheduler = self.scheduler
        request = u.Request(
            request_id=REQUEST,
            # The payload is taken out of it.
            kv_transfer_params=dict(params) if isinstance(params, dict) else params,
            status=RequestStatus.WAITING_FOR_REMOTE_KVS,
            num_tokens=self.case.num_prompt_tokens,
            num_computed_tokens=self.case.num_tokens,
            prompt_token_ids=self.prompt,
            prompt_embeds=object() if self.case.embeds else None,
            mm_features=[self.image] if self.case.inputs else [],
            lora_request=SimpleNamespace(lora_name="adapter")
            if self.case.inputs
            else None,
            _block_hasher=None,
        )
        scheduler.add_recv(request, self.case.first_token, self.case.num_tokens)
        asked = scheduler.build_checksum_meta() or KVChecksumScheduled()
        seqs = {r: blocks.seq for r, blocks in asked.reqs_to_recv.items()}
        num_tokens = [blocks.num_tokens for blocks in asked.reqs_to_recv.values()]
        records = self.records(*(num_tokens or [self.case.num_tokens]))
        records = [replace(record, seqs=seqs) for record in records]
        if received is not None:
            records = [replace(records[0], received={REQUEST: received}), *records[1:]]
        output = KVConnectorOutput(finished_recving={REQUEST})
        output.kv_checksums = SimpleNamespace(finalize=lambda: records)
        scheduler.collect(output)
        bad = scheduler.verify(output, {REQUEST: request})
        scheduler.keep_verified(bad, {REQUEST: request})
        self.kept = bad.get(REQUEST, 0)
        verdict, scheduler.verdict = scheduler.verdict, None
        self._check_state(bad, verdict)
        return verdict

    def _check_state(self, bad: dict[str, int], verdict: LoadVerdict | None) -> None:
        scheduler = self.scheduler
        scheduler.attach_errors([[SimpleNamespace(request_id=REQUEST, error=None)]])
        assert not (scheduler._recvs or scheduler._scheduled)
        assert not scheduler._sends.pending
        assert not scheduler._consequences.client_errors._errors
        stats = scheduler.take_stats() or {}
        loads = {k: v for k, v in stats.items() if k.startswith("loads:")}
        if verdict is None:
            assert not bad and not loads
            return
        carrier = "kv_transfer_params" if self.by_params else "connector"
        if f"unverified:{Unverified.FROM_DECODE.value}" in stats:
            carrier = "none"
        assert loads == {f"loads:{verdict.outcome}:{carrier}": 1}
        assert stats["loads_started"] == 1
        assert stats["blocks_mismatched"] <= stats["blocks_compared"]
        assert stats.get("other_prompts", 0) == verdict.other_prompt
        assert stats.get("prompts_not_bound", 0) == verdict.unbound
        fails = self.case.fail_closed and verdict.outcome != "verified"
        assert set(bad) == ({REQUEST} if fails else set())
