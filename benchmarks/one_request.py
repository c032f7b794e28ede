# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Run one request through the checksums of P and of D, on schedulers and workers.

These are the feature's own; of vLLM there are the blocks and the specs. One small
layer of 32 bytes a token is summed, so that reading counts for little; what it takes
is said beside.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumScheduler,
    KVChecksumWorker,
)
from vllm.distributed.kv_transfer.kv_checksum.payload import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.worker import rows
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheGroupSpec
from vllm.v1.request import RequestStatus

SIZES = (100, 1_000, 8_000, 131_072)
"""Tokens of the request."""

_LAYER, _REQUEST = "model.layers.0.attn", "cmpl-0"


def bare_scheduler(
    connector: Any, kv_cache_manager: Any, kv_cache_config: Any
) -> KVChecksumScheduler:
    """Return the scheduler's part of an instance with one worker, fail-open."""
    vllm_config: Any = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_checksum_fail_closed=False,
            kv_checksum_evidence_dir=None,
            kv_checksum_quarantine=0,
            kv_checksum_quarantine_from_requests=False,
            kv_load_failure_policy="fail",
            kv_checksum_scrub=0,
        ),
        parallel_config=SimpleNamespace(
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            decode_context_parallel_size=1,
            prefill_context_parallel_size=1,
        ),
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
    )
    return KVChecksumScheduler(
        vllm_config, connector, kv_cache_manager, kv_cache_config
    )


class Side:
    """An instance with one worker, without the rest of vLLM.

    Attributes:
        took: seconds that each part of the last request took, by name.

    """

    def __init__(self, tokens: int, block_size: int) -> None:
        number = -(-tokens // block_size)
        spec = FullAttentionSpec(
            block_size=block_size, num_kv_heads=1, head_size=8, dtype=torch.bfloat16
        )
        config: Any = SimpleNamespace(
            transfer_group_ids=[0],
            kv_cache_groups=[
                KVCacheGroupSpec(layer_names=[_LAYER], kv_cache_spec=spec)
            ],
            num_blocks=number + 1,
            kv_checksum_skipped=None,
        )
        cache = torch.ones(number + 1, 1, block_size, 16, dtype=torch.bfloat16)
        self.worker = KVChecksumWorker(
            config, {_LAYER: cache}, tp_rank=0, tp_size=1, pp_rank=0, uniform_kv_heads=1
        )
        ids = (1 + np.random.RandomState(0).permutation(number)).tolist()
        blocks = KVCacheBlocks(([KVCacheBlock(b) for b in ids],))
        connector = SimpleNamespace(
            kv_checksum_carrier=lambda *_, **__: KVChecksumCarrier.KV_TRANSFER_PARAMS
        )
        manager = SimpleNamespace(
            block_pool=SimpleNamespace(hash_block_size=block_size),
            get_block_ids=lambda _: (ids,),
            get_blocks=lambda _: blocks,
        )
        self.scheduler = bare_scheduler(connector, manager, config)
        self.tokens = tokens
        # As a request that was received holds them: objects of their own.
        self.prompt = [int(str(token)) for token in range(1, tokens + 1)]
        self.took: dict[str, float] = {}

    def request(self, text: str | None = None) -> Any:
        params = {} if text is None else {"kv_checksums": text}
        return SimpleNamespace(
            request_id=_REQUEST,
            num_prompt_tokens=self.tokens,
            num_tokens=self.tokens,
            num_computed_tokens=self.tokens,
            prompt_token_ids=self.prompt,
            prompt_embeds=None,
            mm_features=[],
            lora_request=None,
            kv_transfer_params=params,
            block_hashes=[],
            status=RequestStatus.WAITING_FOR_REMOTE_KVS
            if text
            else RequestStatus.FINISHED_STOPPED,
        )

    def timed(self, name: str, run: Callable[..., Any], *arguments: Any) -> Any:
        began = time.perf_counter()
        found = run(*arguments)
        self.took[name] = self.took.get(name, 0) + time.perf_counter() - began
        return found

    def schedule(self, request: Any, is_new: bool) -> Any:
        """Return what the step that starts or ends the request asks workers to sum."""
        step: Any = SimpleNamespace(
            scheduled_new_reqs=[SimpleNamespace(req_id=_REQUEST)] if is_new else [],
            num_scheduled_tokens={_REQUEST: self.tokens} if is_new else {},
            preempted_req_ids=None,
        )
        self.timed(
            "after_schedule", self.scheduler.after_schedule, step, {_REQUEST: request}
        )
        return step.kv_checksum_scheduled

    def send(self) -> str:
        """Send a request as P does; return the payload."""
        self.took.clear()
        request = self.request()
        self.worker.bind(self.schedule(request, is_new=True))
        output = self.timed("worker", self.worker.post_forward, None, set(), set())
        got: Any = SimpleNamespace(kv_checksums=output)
        self.timed("collect", self.scheduler.collect, got)
        finished = self.scheduler.request_finished
        params = self.timed("request_finished", finished, request, {})
        return params["kv_checksums"]

    def load(self, text: str) -> None:
        """Load a request as D does.

        Raises:
            SystemExit: it does not verify.

        """
        self.took.clear()
        request = self.request(text)
        self.timed("add_recv", self.scheduler.add_recv, request, 0, self.tokens)
        self.worker.bind(self.schedule(request, is_new=False))
        self.worker.post_forward(None, set(), set())
        self.worker.bind(None)
        done = {_REQUEST}
        output = self.timed("worker", self.worker.post_forward, done, set(), set())
        got: Any = SimpleNamespace(
            kv_checksums=output, finished_recving=done, failed_recving=set()
        )
        self.timed("collect", self.scheduler.collect, got)
        self.timed("verify", self.scheduler.verify, got, {_REQUEST: request})
        if not (self.scheduler.take_stats() or {}).get(
            "loads:verified:kv_transfer_params"
        ):
            raise SystemExit("a load did not verify")

    def reading(self, repeats: int) -> float:
        """Return the microseconds that the summing of the bytes takes."""
        found = self.scheduler
        found.add_send(self.request())
        work = found.build_checksum_meta()
        assert work is not None
        table = torch.from_numpy(
            rows.build_rows(self.worker.groups, work.reqs_to_send)[0]
        )
        sums = torch.zeros(table.shape[1], dtype=torch.int64)
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            self.worker._sums[0][0][1](table, sums)
            times.append(time.perf_counter() - began)
        return float(np.median(times)) * 1e6


def print_requests(block_size: int, repeats: int) -> list[dict[str, Any]]:
    """Print and return the microseconds of one request on P and D, by its tokens."""
    results = []
    for tokens in SIZES:
        p, d = Side(tokens, block_size), Side(tokens, block_size)
        took: dict[str, dict[str, list[float]]] = {"P": {}, "D": {}}
        for turn in range(repeats + 3):
            text = p.send()
            d.load(text)
            for side, found in (("P", p.took), ("D", d.took)):
                for name, seconds in found.items() if turn > 2 else ():
                    took[side].setdefault(name, []).append(seconds * 1e6)
        reading = p.reading(repeats)
        print(f"\none request of {tokens} tokens, blocks of {block_size}")
        for side, parts in took.items():
            medians = {name: float(np.median(us)) for name, us in parts.items()}
            medians["total"] = sum(medians.values())
            medians["without reading"] = medians["total"] - reading
            shown = ", ".join(f"{name} {us:.0f}" for name, us in medians.items())
            print(f"{side}, us: {shown}")
            results.append({"tokens": tokens, "side": side, "us": medians})
    return results
