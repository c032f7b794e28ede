# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run one vLLM instance of one rank in this process, and watch its connector.

Real are the scheduler, both sides of the connector, `ActiveKVConnector` with its
checksum worker, and what moves between them. The forward pass is a stand-in.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_checksum.testing import forward
from vllm.distributed.kv_transfer.kv_checksum.testing.configuration import (
    HEAD_SIZE,
    HEADS,
    LAYERS,
    vllm_config,
)
from vllm.distributed.kv_transfer.kv_checksum.testing.process import (
    shut_down,
    start_groups,
)
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
)
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.gpu import kv_connector as runner

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_checksum.testing.factory import (
        ConnectorFactory,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorTransferResults,
    )
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

NUM_BLOCKS = 48


class Seen:
    """What was seen of an instance's loads.

    Attributes:
        loaded: tokens that were not computed here, by request.
        reported: per request, the steps that named it in ``finished_recving``.
        failed: requests whose load was reported as failed, or that had invalid blocks.
        received: checksums that came out of the worker side: step, request, bytes.
        wrong_at_report: per request, positions of blocks that were not right then.
        wrong_at_use: per request, positions of blocks that were not right when a
            forward pass was about to read them.
        written: per request, blocks outside of its own that its load changed.
        over_limit: what ``limit_matched_tokens`` offered, and the limit.

    """

    def __init__(self) -> None:
        self.loaded: dict[str, int] = {}
        self.reported: dict[str, list[int]] = {}
        self.failed: set[str] = set()
        self.received: list[tuple[int, str, bytes]] = []
        self.wrong_at_report: dict[str, list[int]] = {}
        self.wrong_at_use: dict[str, list[int]] = {}
        self.written: dict[str, list[int]] = {}
        self.over_limit: list[tuple[int, int]] = []


class Instance:
    """One instance; `stack` ends it.

    Attributes:
        scheduler: vLLM's scheduler, whose ``connector`` is the scheduler side.
        worker: the worker side of the connector.
        stats: what the checksums counted, by key of `metrics`.
        seen: what was seen of its loads.
        sent: the checksums that its connector was given to send, by request.
        damage: whether a bit of each load is changed when it is reported.

    """

    def __init__(
        self,
        factory: ConnectorFactory,
        model: str,
        role: str,
        stack: ExitStack,
        **settings: Any,
    ) -> None:
        self.block_size = factory.block_size
        self.stats: Counter[str] = Counter()
        self.sent: dict[str, bytes] = {}
        self.answers: dict[str, dict[str, Any] | None] = {}
        self.damage = False
        self.steps = 0
        self.seen = Seen()
        self._before: list[torch.Tensor] | None = None
        with factory.starting(role):
            self.config = vllm_config(
                model,
                role,
                block_size=factory.block_size,
                num_blocks=NUM_BLOCKS,
                **{**factory.settings(role), **settings},
            )
            self._make_caches()
            init_none_hash(sha256)
            with set_current_vllm_config(self.config):
                start_groups()
                self._make_scheduler()
                stack.callback(factory.close, self.scheduler.connector)
                self._make_worker()
                stack.callback(shut_down, self.worker)
        self.hasher = get_request_block_hasher(self.block_size, sha256)
        self.aggregator = KVOutputAggregator(1)
        self._watch()
        factory.started(self)

    def _make_caches(self) -> None:
        """Make the cache of every layer, filled with what previous owners left."""
        spec = FullAttentionSpec(
            block_size=self.block_size,
            num_kv_heads=HEADS,
            head_size=HEAD_SIZE,
            dtype=torch.bfloat16,
        )
        self.layer_names = [f"model.layers.{n}.self_attn.attn" for n in range(LAYERS)]
        page, size = spec.page_size_bytes, spec.page_size_bytes * NUM_BLOCKS
        self.kv_config = KVCacheConfig(
            num_blocks=NUM_BLOCKS,
            kv_cache_tensors=[
                KVCacheTensor(size, [name], layer_stride=size, block_stride=page)
                for name in self.layer_names
            ],
            kv_cache_groups=[KVCacheGroupSpec(self.layer_names, spec)],
        )
        shape = (NUM_BLOCKS, HEADS, self.block_size, 2 * HEAD_SIZE)
        # Some connectors register whole pages.
        self.kv = [torch.randn(shape).to(torch.bfloat16) for _ in self.layer_names]
        layer = SimpleNamespace(get_attn_backend=lambda: FlashAttentionBackend)
        layers = self.config.compilation_config.static_forward_context
        layers.update(dict.fromkeys(self.layer_names, layer))

    def _make_scheduler(self) -> None:
        kv_config = generate_scheduler_kv_cache_config([self.kv_config])
        self.scheduler = self.config.scheduler_config.get_scheduler_cls()(
            vllm_config=self.config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=self.block_size,
            hash_block_size=self.block_size,
            log_stats=True,
        )

    def _make_worker(self) -> None:
        self.worker = KVConnectorFactory.create_connector(
            self.config, KVConnectorRole.WORKER, self.kv_config
        )
        caches = dict(zip(self.layer_names, self.kv, strict=True))
        with patch.object(runner, "get_kv_transfer_group", lambda: self.worker):
            self.active = runner.ActiveKVConnector(self.config, caches)
        if handshake := self.worker.get_handshake_metadata():
            self.scheduler.connector.set_xfer_handshake_metadata_pp_aware(
                {(0, 0): handshake}
            )

    # ---- watching the connector

    def _watch(self) -> None:
        """Look at what the connector is given and at what it returns."""
        connector = self.scheduler.connector
        self._send = connector.send_kv_checksums
        self._limit = connector.limit_matched_tokens
        self._update = connector.update_state_after_alloc
        self._take_results = self.worker.get_transfer_results
        connector.send_kv_checksums = self._watched_send
        connector.limit_matched_tokens = self._watched_limit
        connector.update_state_after_alloc = self._watched_update
        self.worker.get_transfer_results = self._watched_results

    def _watched_send(self, request: Request, checksums: bytes) -> None:
        self.sent[request.request_id] = checksums
        self._send(request, checksums)

    def _watched_limit(
        self, request: Request, num_computed_tokens: int, max_num_new_tokens: int
    ) -> tuple[int | None, bool]:
        offer = self._limit(request, num_computed_tokens, max_num_new_tokens)
        if (offer[0] or 0) > max_num_new_tokens:
            self.seen.over_limit.append((offer[0] or 0, max_num_new_tokens))
        return offer

    def _watched_update(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        if num_external_tokens:
            self.seen.loaded[request.request_id] = num_external_tokens
        self._update(request, blocks, num_external_tokens)

    def _watched_results(self, finished: set[str]) -> KVConnectorTransferResults:
        results = self._take_results(finished)
        seen = self.seen
        seen.failed |= results.failed_recving
        for req_id in results.finished_recving - results.failed_recving:
            seen.reported.setdefault(req_id, []).append(self.steps)
            request = self.scheduler.requests.get(req_id)
            if request is not None and not request.is_finished():
                number = request.num_computed_tokens
                seen.wrong_at_report[req_id] = self.wrong_positions(request, number)
                self._note_written(request)
                if self.damage:
                    self.flip_bit(self.blocks_of(request)[-1])
        for req_id, data in results.kv_checksums.items():
            seen.received.append((self.steps, req_id, data))
        return results

    def watch_other_blocks(self) -> None:
        """Remember all blocks: the next load must change its own alone."""
        self._before = [cache.clone() for cache in self.kv]

    def _note_written(self, request: Request) -> None:
        before, self._before = self._before, None
        if before is None:
            return
        changed = torch.zeros(NUM_BLOCKS, dtype=torch.bool)
        for cache, old in zip(self.kv, before, strict=True):
            changed |= (_bytes(cache) != _bytes(old)).flatten(1).any(1)
        changed[0] = False  # the null block
        ids = set(changed.nonzero().flatten().tolist())
        found = sorted(ids - set(self.blocks_of(request)))
        self.seen.written[request.request_id] = found

    # ---- KV

    def blocks_of(self, request: Request) -> list[int]:
        """Return the ids of a request's blocks."""
        (row,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        return list(row)

    def flip_bit(self, block_id: int, layer: int = 1) -> None:
        """Change one bit of the first token in a block; a second time undoes it."""
        _bytes(self.kv[layer])[block_id, 1, 0, 3] ^= 4

    def wrong_positions(self, request: Request, number: int) -> list[int]:
        """Return positions of blocks with other KV than the first tokens' own."""
        at = torch.arange(number)
        blocks = torch.tensor(self.blocks_of(request))[at // self.block_size]
        ids = torch.tensor(list(request.all_token_ids))[at]
        wrong = torch.zeros(number, dtype=torch.bool)
        for layer, cache in enumerate(self.kv):
            held = cache[blocks, :, at % self.block_size]
            right = forward.token_kv(layer, at, ids)
            wrong |= (_bytes(held) != _bytes(right)).flatten(1).any(1)
        positions: list[int] = (at[wrong] // self.block_size).unique().tolist()
        return positions

    def _write(self, request: Request, first: int, last: int) -> None:
        """Stand in for the forward: write the KV of tokens ``[first, last)``."""
        at = torch.arange(first, last)
        blocks = torch.tensor(self.blocks_of(request))[at // self.block_size]
        ids = torch.tensor(list(request.all_token_ids))[at]
        for layer, cache in enumerate(self.kv):
            cells = forward.token_kv(layer, at, ids)
            cache[blocks, :, at % self.block_size] = cells

    # ---- steps

    def add(
        self,
        req_id: str,
        prompt: list[int],
        params: dict[str, Any] | None,
        max_tokens: int = 1,
    ) -> Request:
        """Add a request."""
        request = forward.make_request(req_id, prompt, params, max_tokens, self.hasher)
        self.scheduler.add_request(request)
        return request

    def step(self) -> None:
        """Schedule and run one step."""
        self.steps += 1
        output = self.scheduler.schedule()
        self.active.pre_forward(output)
        self._look_before_forward(output)
        for req_id, (first, last) in forward.spans(output).items():
            self._write(self.scheduler.requests[req_id], first, last)
        self.active.finish_forward()
        report = self.active.post_forward(output.finished_req_ids)
        self.seen.failed |= self._holders(report.invalid_block_ids)
        result = forward.runner_output(self.scheduler, output, report)
        ended = self.scheduler.update_from_output(
            output, self.aggregator.aggregate([result])
        )
        for client in ended.values():
            for out in client.outputs:
                self.answers[out.request_id] = out.kv_transfer_params
            stats = client.scheduler_stats and client.scheduler_stats.kv_checksum_stats
            self.stats.update(stats or {})

    def _look_before_forward(self, output: SchedulerOutput) -> None:
        """Note what is not right of the KV that requests begin with.

        A synchronous load has arrived by now; it is damaged here.
        """
        for new in output.scheduled_new_reqs:
            request = self.scheduler.requests[new.req_id]
            asynchronous = new.req_id in self.seen.reported
            if self.damage and new.req_id in self.seen.loaded and not asynchronous:
                self.flip_bit(self.blocks_of(request)[0])
            number = new.num_computed_tokens
            self.seen.wrong_at_use[new.req_id] = self.wrong_positions(request, number)

    def _holders(self, block_ids: set[int]) -> set[str]:
        """Return the requests that hold some of these blocks."""
        return {
            req_id
            for req_id, request in self.scheduler.requests.items()
            if block_ids and block_ids & set(self.blocks_of(request))
        }


def _bytes(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.uint8)
