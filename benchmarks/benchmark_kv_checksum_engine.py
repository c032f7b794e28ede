# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure what checksums add to the engine's own work on a request, without a forward pass.

P and D are vLLM's engines, each in a process of its own, with real NIXL transfers
between them. Their model computes nothing: its forward pass returns zeros and leaves
the cache as it is. What remains of a step is the host's work: scheduling, transfers,
the model runner's preparation, and the checksums. Two pairs run side by side, without
checksums and with them, and take turns request by request.

The figures are the CPU time of the engine's thread in the steps of one request, in
microseconds: medians over the requests, and the difference of on and off. Only the
difference means something: without a GPU, vLLM's own small Triton kernels run in the
interpreter, which takes most of a step. The sums of the blocks are made on the same
thread and are part of the difference. D polls for the end of a transfer, so that the
number of its steps differs from request to request: that is noise, alike in both.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import statistics
import sys
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from rig.model import VOCABULARY, tiny_qwen3  # noqa: E402
from rig.servers import ENVIRONMENT, HOST, NIXL, free_port  # noqa: E402

ARMS: dict[str, dict[str, Any]] = {"off": {}, "on": {"enable_kv_checksum": True}}
REMOTE = ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    **dict.fromkeys(REMOTE),
}
MAX_TOKENS = 16384


def serve_engine(
    pipe: Connection, role: str, transfer: dict[str, Any], model: str, port: int
) -> None:
    """Run one engine: answer each (prompt, parameters) with what came of the request."""
    os.environ.update(ENVIRONMENT, VLLM_ENABLE_V1_MULTIPROCESSING="0")
    os.environ.update(VLLM_NIXL_SIDE_CHANNEL_PORT=str(port), VLLM_LOGGING_LEVEL="ERROR")
    import torch

    from vllm import SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.models.qwen3 import Qwen3ForCausalLM
    from vllm.model_executor.models.registry import ModelRegistry
    from vllm.v1.engine.llm_engine import LLMEngine

    class NoForwardPass(Qwen3ForCausalLM):
        """Computes nothing, and has the layers so that their caches are there."""

        def forward(self, input_ids: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
            width = self.config.hidden_size
            return torch.zeros(len(input_ids), width, dtype=torch.bfloat16)

    ModelRegistry.register_model(NoForwardPass.__name__, NoForwardPass)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            hf_overrides={
                "architectures": [NoForwardPass.__name__],
                "max_position_embeddings": MAX_TOKENS,
            },
            kv_transfer_config=KVTransferConfig(
                kv_connector="NixlConnector", kv_role=role, **NIXL, **transfer
            ),
            enforce_eager=True,
            max_model_len=MAX_TOKENS,
            max_num_seqs=8,
            max_num_batched_tokens=MAX_TOKENS,
            kv_cache_memory_bytes=256 << 20,
            block_size=32,
            enable_prefix_caching=False,
        )
    )
    pipe.send(None)  # ready
    number = 0
    while True:
        # An idle engine goes on stepping: P hears so that its blocks were read.
        while not pipe.poll(0.001):
            engine.step()
        asked = pipe.recv()
        if asked is None:
            return
        prompt, params, tokens = asked
        number += 1
        sampling = SamplingParams(
            temperature=0,
            max_tokens=tokens,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params},
        )
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        spent, answer = 0.0, None
        while answer is None:
            began = time.thread_time()
            outputs = engine.step()
            spent += time.thread_time() - began
            answer = next((o for o in outputs if o.finished), None)
        pipe.send((1e6 * spent, answer.kv_transfer_params))


class Engine:
    """One engine in a process of its own."""

    def __init__(self, role: str, transfer: dict[str, Any], model: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=serve_engine,
            args=(theirs, role, transfer, model, free_port()),
            daemon=True,
        )
        self._process.start()
        theirs.close()

    def wait_ready(self) -> None:
        """Wait until the engine is up; EOFError if it died."""
        self._pipe.recv()

    def ask(
        self, prompt: list[int], params: dict[str, Any], tokens: int
    ) -> tuple[float, dict[str, Any]]:
        """Return the microseconds of the engine's thread, and the transfer parameters."""
        self._pipe.send((prompt, params, tokens))
        spent, answer = self._pipe.recv()
        return float(spent), answer or {}

    def stop(self) -> None:
        self._pipe.send(None)
        self._process.join(20)
        self._process.kill()


def turns(
    pairs: dict[str, tuple[Engine, Engine]], length: int, requests: int
) -> Iterator[tuple[str, float, float]]:
    """Yield (arm, P's microseconds, D's) of one request after the other."""
    draw = random.Random(length)
    order = list(pairs)
    for _ in range(requests):
        order.append(order.pop(0))
        prompt = [draw.randrange(2, VOCABULARY) for _ in range(length)]
        for arm in order:
            p, d = pairs[arm]
            on_p, params = p.ask(prompt, PREFILL, 1)
            on_d, _ = d.ask(prompt, params, 2)
            yield arm, on_p, on_d


def measure(
    pairs: dict[str, tuple[Engine, Engine]], length: int, requests: int
) -> list[dict[str, Any]]:
    """Return one row per side."""
    found: dict[str, list[tuple[float, float]]] = {arm: [] for arm in pairs}
    for arm, *spent in turns(pairs, length, requests + 3):
        found[arm].append((spent[0], spent[1]))
    rows = []
    for side, name in enumerate("PD"):
        # The first requests warm up.
        took = {arm: [both[side] for both in all_[3:]] for arm, all_ in found.items()}
        off, on = (statistics.median(took[arm]) for arm in ("off", "on"))
        gaps = [x - y for x, y in zip(took["on"], took["off"], strict=True)]
        quarters = statistics.quantiles(gaps, n=4)
        rows.append(
            {
                "tokens": length,
                "side": name,
                "off": off,
                "on": on,
                "difference": statistics.median(gaps),
                "middle half": [quarters[0], quarters[2]],
            }
        )
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """Return the results as a table of Markdown."""
    lines = [
        "| prompt tokens | side | off, us | on, us | difference, us (middle half) |",
        "|---|---|---|---|---|",
    ]
    for r in rows:
        low, high = r["middle half"]
        lines.append(
            f"| {r['tokens']:,} | {r['side']} | {r['off']:.0f} | {r['on']:.0f} "
            f"| {r['difference']:.0f} ({low:.0f} to {high:.0f}) |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[100, 1000, 8000],
        metavar="N",
        help=f"prompt lengths, up to {MAX_TOKENS - 2} (default: 100 1000 8000)",
    )
    parser.add_argument(
        "--requests",
        type=int,
        default=100,
        metavar="N",
        help="requests per length and arm (default: 100)",
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="write the results there, too"
    )
    args = parser.parse_args()
    if max(args.tokens) > MAX_TOKENS - 2:
        parser.error(f"--tokens: at most {MAX_TOKENS - 2}")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    os.environ.update(ENVIRONMENT, VLLM_HOST_IP=HOST)
    model = str(tiny_qwen3())
    pairs = {
        arm: (Engine("kv_producer", on, model), Engine("kv_consumer", on, model))
        for arm, on in ARMS.items()
    }
    engines = [engine for pair in pairs.values() for engine in pair]
    for engine in engines:
        engine.wait_ready()
    print("all engines are up", flush=True)
    rows = []
    for length in args.tokens:
        rows += measure(pairs, length, args.requests)
        print(table(rows[-2:]), flush=True)
    for engine in engines:
        engine.stop()
    print(table(rows))
    if args.json:
        args.json.write_text(json.dumps({"engine": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
