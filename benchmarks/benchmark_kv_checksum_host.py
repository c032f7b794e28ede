# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Measure what checksums cost on the host, in scheduler and worker, beside the GPU's work.

Each step is printed in microseconds and as a multiple of one NumPy pass (an
addition) over the request's 8-byte values. Then what `Scheduler._update_after_schedule`
takes in a step in which every running request decodes: of stock vLLM, with checksums
off, and on, where it calls `after_schedule`. Then some sizes of prompts and blocks,
each beside a plain Python loop that does the same. Last, what one request costs on P
and on D, by its length.
"""

import argparse
import json
import pickle
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent / "kernels"))
from without_vllm import stand_in_for_vllm, vllm_is_installed  # noqa: E402

stand_in_for_vllm()

from vllm.distributed.kv_transfer.kv_checksum import payload  # noqa: E402
from vllm.distributed.kv_transfer.kv_checksum.checksum import (  # noqa: E402
    MASK64,
    KVChecksumBlocks,
    KVChecksumGroup,
    KVChecksumRecord,
    add_records,
    replica_checks,
    unit_size,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler import group_comparison  # noqa: E402
from vllm.distributed.kv_transfer.kv_checksum.scheduler.binding import (  # noqa: E402
    prompt_digests,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import Units  # noqa: E402
from vllm.distributed.kv_transfer.kv_checksum.worker import rows  # noqa: E402
from vllm.distributed.kv_transfer.kv_checksum.worker.views import GroupView  # noqa: E402

WORKERS = 8

Step = tuple[str, str, Callable[[], Any]]


def block_ids(number: int, seed: int = 0) -> list[int]:
    return (1 + np.random.RandomState(seed).permutation(number)).tolist()


def work_of(requests: int, tokens: int, size: int) -> dict[str, KVChecksumBlocks]:
    number = tokens // size
    return {
        f"request-{i}": KVChecksumBlocks(
            tokens, {0: (0, np.array(block_ids(number, i)))}
        )
        for i in range(requests)
    }


def records_of(units: int, replicas: int) -> list[KVChecksumRecord]:
    """Return what `WORKERS` workers report for one request."""
    random = np.random.RandomState(1)
    shape = (units, 1)
    return [
        KVChecksumRecord(
            0,
            rank,
            {
                "r": {
                    0: KVChecksumGroup(
                        0,
                        ((replicas, rank % replicas),),
                        random.randint(0, 2**63, shape, np.uint64),
                    )
                }
            },
        )
        for rank in range(WORKERS)
    ]


def one_group(size: int) -> Any:
    """Return the KV cache groups of a model of full attention."""
    import torch

    from vllm.v1.kv_cache_interface import FullAttentionSpec

    spec = FullAttentionSpec(
        block_size=size, num_kv_heads=1, head_size=128, dtype=torch.bfloat16
    )
    return SimpleNamespace(
        transfer_group_ids=[0], kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)]
    )


def records_of_requests(req_ids: list[str], units: int) -> list[KVChecksumRecord]:
    """Return what `WORKERS` workers, who share the heads, report for several requests."""
    random = np.random.RandomState(2)
    return [
        KVChecksumRecord(
            0,
            rank,
            {
                req_id: {
                    0: KVChecksumGroup(
                        0, ((1, 0),), random.randint(0, 2**63, (units, 1), np.uint64)
                    )
                }
                for req_id in req_ids
            },
        )
        for rank in range(WORKERS)
    ]


def steps_of_rows(requests: int, tokens: int, size: int) -> list[Step]:
    group = GroupView(0, size, [], 0, ((1, 0),))
    work = work_of(requests, tokens, size)
    steps: list[Step] = [
        ("P, D worker", "rows", lambda: rows.build_rows({0: group}, work)),
        ("P, D", "pickle what workers are asked", lambda: pickle.dumps(work, 5)),
    ]
    if vllm_is_installed():
        from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import (
            loaded_blocks,
            sent_blocks,
        )
        from vllm.v1.core.kv_cache_manager import KVCacheBlocks
        from vllm.v1.core.kv_cache_utils import KVCacheBlock

        config = one_group(size)
        ids = [[block_ids(tokens // size, i)] for i in range(requests)]
        held = [KVCacheBlocks(([KVCacheBlock(b) for b in i],)) for (i,) in ids]
        steps[:0] = [
            (
                "P scheduler",
                "blocks that are sent",
                lambda: [sent_blocks(config, i, tokens) for i in ids],
            ),
            (
                "D scheduler",
                "blocks that are loaded",
                lambda: [loaded_blocks(config, blocks, tokens) for blocks in held],
            ),
        ]
    return steps


class Running(SimpleNamespace):
    """A running request, as far as the step looks at it."""

    __hash__ = object.__hash__


RUNNING = (0, 64, 1024, 4096)


def decode_steps(running: int) -> dict[str, Callable[[], Any]]:
    """Return the code that ends a step's scheduling, by vLLM tree."""
    from originals import original_module

    from vllm.v1.core.sched import scheduler as patched

    stock = original_module(patched)
    requests = {
        f"cmpl-{i:032x}-0-{i:08x}": Running(
            num_computed_tokens=5000,
            num_in_flight_tokens=0,
            num_tokens=4001,
            num_prompt_tokens=4000,
            num_output_placeholders=0,
            use_structured_output=False,
            kv_transfer_params={"do_remote_decode": True},
        )
        for i in range(running)
    }
    output = SimpleNamespace(
        scheduled_new_reqs=[],
        num_scheduled_tokens=dict.fromkeys(requests, 1),
        has_structured_output_requests=False,
        kv_checksum_scheduled=None,
    )

    def step(module: Any, kv_checksum: Any) -> Callable[[], Any]:
        held = object.__new__(module.Scheduler)
        vars(held).update(
            requests=requests,
            defer_block_free=False,
            _inflight_prefills=set(),
            finished_req_ids=set(),
            reset_preempted_req_ids=set(),
        )
        held.kv_checksum = kv_checksum
        return lambda: module.Scheduler._update_after_schedule(held, output)

    return {
        "stock": step(stock, None),
        "off": step(patched, None),
        "on": step(patched, scheduler_part()),
    }


def scheduler_part() -> Any:
    """Return the checksums of an instance whose running requests were all sent already."""
    from one_request import bare_scheduler

    return bare_scheduler(
        None,
        SimpleNamespace(block_pool=SimpleNamespace(hash_block_size=16)),
        SimpleNamespace(kv_cache_groups=[], kv_checksum_skipped=None),
    )


def print_decode_steps(repeats: int) -> list[dict[str, Any]]:
    """Print and return the microseconds of such a step, by running requests."""
    print(
        f"\n{'running requests':<18}{'stock us':>10}{'off us':>10}{'on us':>10}", end=""
    )
    print(f"{'on - off us':>13}")
    rows = []
    for running in RUNNING:
        took = {
            name: microseconds(run, 10 * repeats)
            for name, run in decode_steps(running).items()
        }
        print(f"{running:<18}", *(f"{us:>9.2f}" for us in took.values()), end="")
        print(f"{took['on'] - took['off']:>13.2f}")
        rows.append({"running": running, **took})
    return rows


def steps_of_sums(tokens: int, size: int) -> list[Step]:
    """Return the steps of a request's end on P and of its verdict on D."""
    unit = unit_size(size)
    units = Units(unit, size // unit)
    parts, copies = (records_of(tokens // unit, n) for n in (1, WORKERS))
    values = replica_checks(add_records(parts, "r", 0))[0]
    group = payload.GroupChecksums(1, unit, 0, values)
    sent = payload.KVChecksumPayload(tokens, WORKERS, {0: group})
    text = payload.encode_text(sent)
    received = payload.decode_text(text)
    # As a request that was received holds them: objects of their own.
    prompt = [int(str(token)) for token in block_ids(tokens)]
    request = SimpleNamespace(prompt_embeds=None, prompt_token_ids=prompt)

    def judge(checks: list[np.ndarray]) -> Callable[[], Any]:
        local: Any = {0: group_comparison.LocalGroup(1, units, 0, checks)}
        return lambda: group_comparison.judge(received, local, tokens)

    add = f"add the records of {WORKERS} workers"
    return [
        (
            "P, D scheduler",
            add,
            lambda: replica_checks(add_records(parts, "r", 0)),
        ),
        (
            "P, D scheduler",
            f"{add}, each a replica",
            lambda: replica_checks(add_records(copies, "r", 0)),
        ),
        (
            "P, D scheduler",
            "digest of the prompt",
            lambda: prompt_digests(request, tokens),
        ),
        ("P scheduler", "encode the payload", lambda: payload.encode_text(sent)),
        ("D scheduler", "decode the payload", lambda: payload.decode_text(text)),
        ("D scheduler", "compare", judge([values])),
        ("D scheduler", f"compare {WORKERS} replicas", judge([values] * WORKERS)),
        ("D scheduler", "compare, every block differs", judge([values + 1])),
    ]


CASES = (
    (16, 1, 131072),
    (16, 32, 16384),
    (128, 1, 131072),
    (128, 128, 4096),
    (128, 1, 1024),
)
"""Block size, requests and tokens of each of them."""


@dataclass
class Pair:
    """One step, and the plain Python loop that does the same.

    Attributes:
        as_lists: makes the two results alike, to hold one against the other.

    """

    what: str
    run: Callable[[], Any]
    plain: Callable[[], Any]
    as_lists: Callable[[Any], Any]


def plain_sent(rows: list[list[int]], tokens: int, size: int) -> Any:
    found = []
    for row in rows:
        ids = []
        for position in range(-(-tokens // size)):
            if row[position] != 0:
                ids.append(row[position])
        found.append(ids)
    return found


def plain_loaded(held: list[Any], tokens: int, size: int) -> Any:
    found = []
    for blocks in held:
        ids = []
        for position, block in enumerate(blocks.blocks[0]):
            if position * size >= tokens:
                break
            if block.block_hash is None and not block.is_null:
                ids.append(block.block_id)
        found.append(ids)
    return found


def plain_rows(ids: list[list[int]], tokens: int, size: int) -> np.ndarray:
    unit = unit_size(size)
    units, firsts, valids = [], [], []
    for row in ids:
        for position, block in enumerate(row):
            for n in range(size // unit):
                first = position * size + n * unit
                units.append(block * (size // unit) + n)
                firsts.append(first)
                valids.append(max(0, min(tokens - first, unit)))
    return np.array([units, firsts, valids], np.int64)


def plain_add(records: list[dict[str, list[int]]], req_ids: list[str]) -> Any:
    found = []
    for req_id in req_ids:
        total: list[int] = []
        for record in records:
            for unit, value in enumerate(record[req_id]):
                if unit == len(total):
                    total.append(value)
                else:
                    total[unit] = (total[unit] + value) & MASK64
        found.append(total)
    return found


def plain_compare(sent: list[list[int]], loaded: list[list[int]], size: int) -> Any:
    found = []
    for theirs, ours in zip(sent, loaded, strict=True):
        bad: list[int] = []
        for unit, value in enumerate(theirs):
            block = unit * unit_size(size) // size
            if value != ours[unit] and (not bad or bad[-1] != block):
                bad.append(block)
        found.append(bad)
    return found


def pairs_of(size: int, requests: int, tokens: int) -> list[Pair]:
    """Return the steps of one case, with one bad block in each request."""
    from vllm.distributed.kv_transfer.kv_checksum.scheduler.blocks import (
        loaded_blocks,
        sent_blocks,
    )
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

    unit = unit_size(size)
    units = Units(unit, size // unit)
    ids = [block_ids(tokens // size, i) for i in range(requests)]
    held = [KVCacheBlocks(([KVCacheBlock(b) for b in row],)) for row in ids]
    config, group = one_group(size), GroupView(0, size, [], 0, ((1, 0),))
    work = work_of(requests, tokens, size)
    records = records_of_requests(list(work), tokens // unit)
    sums = [replica_checks(add_records(records, r, 0))[0] for r in work]
    bad = [values.copy() for values in sums]
    for values in bad:
        values[-1] ^= np.uint64(1)
    sent = [
        payload.KVChecksumPayload(
            tokens, WORKERS, {0: payload.GroupChecksums(1, unit, 0, values)}
        )
        for values in sums
    ]
    loaded: list[dict[int, Any]] = [
        {0: group_comparison.LocalGroup(1, units, 0, [values])} for values in bad
    ]

    # As a loop would have them: lists, made before its time is taken.
    lists = [
        {r: part[0].values[:, 0].tolist() for r, part in record.checksums.items()}
        for record in records
    ]
    sent_lists, loaded_lists = ([v.tolist() for v in x] for x in (sums, bad))

    def ids_of(found: Any) -> Any:
        return [f if isinstance(f, list) else f.blocks.groups[0][1] for f in found]

    return [
        Pair(
            "blocks that are sent",
            lambda: [sent_blocks(config, [row], tokens) for row in ids],
            lambda: plain_sent(ids, tokens, size),
            lambda found: [list(f) for f in ids_of(found)],
        ),
        Pair(
            "blocks that are loaded",
            lambda: [loaded_blocks(config, blocks, tokens) for blocks in held],
            lambda: plain_loaded(held, tokens, size),
            lambda found: [list(f) for f in ids_of(found)],
        ),
        Pair(
            "rows",
            lambda: rows.build_rows({0: group}, work)[0],
            lambda: plain_rows(ids, tokens, size),
            lambda table: table[:, : requests * (tokens // unit)].tolist(),
        ),
        Pair(
            f"add the records of {WORKERS} workers",
            lambda: [replica_checks(add_records(records, r, 0))[0] for r in work],
            lambda: plain_add(lists, list(work)),
            lambda found: [[int(value) for value in f] for f in found],
        ),
        Pair(
            "compare",
            lambda: [
                group_comparison.judge(theirs, ours, tokens)
                for theirs, ours in zip(sent, loaded, strict=True)
            ],
            lambda: plain_compare(sent_lists, loaded_lists, size),
            lambda found: [
                f if isinstance(f, list) else f.groups[0].positions for f in found
            ],
        ),
    ]


def print_cases(repeats: int) -> list[dict[str, Any]]:
    """Print and return the microseconds of each case, beside those of the loop.

    Raises:
        SystemExit: the two found different things.

    """
    results = []
    for size, requests, tokens in CASES:
        print(f"\n{requests} request(s) of {tokens} tokens, blocks of {size}")
        print(f"{'what':<44}{'us':>10}{'plain loop us':>16}{'times':>8}")
        for pair in pairs_of(size, requests, tokens):
            if pair.as_lists(pair.run()) != pair.as_lists(pair.plain()):
                raise SystemExit(f"{pair.what}: the plain loop found something else")
            took = microseconds(pair.run, repeats)
            plain = microseconds(pair.plain, max(3, repeats // 5))
            print(f"{pair.what:<44}{took:>10.1f}{plain:>16.1f}{plain / took:>8.1f}")
            results.append(
                {
                    "block_size": size,
                    "requests": requests,
                    "tokens": tokens,
                    "what": pair.what,
                    "us": took,
                    "plain_us": plain,
                }
            )
    return results


def microseconds(run: Callable[[], Any], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=30, metavar="N")
    parser.add_argument(
        "--block-size", type=int, default=16, metavar="TOKENS", help="of both sides"
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object at the end"
    )
    args = parser.parse_args()
    size, results = args.block_size, []
    for requests, tokens in ((1, 131072), (128, 1024)):
        number = requests * tokens // unit_size(size)
        values = np.arange(number, dtype=np.uint64)
        one_pass = microseconds(lambda v=values: v + v, args.repeats)  # type: ignore[misc]
        print(
            f"\n{requests} request(s) of {tokens} tokens, blocks of {size}, "
            f"{len(values)} sums;",
            end="",
        )
        print(f" one NumPy pass: {one_pass:.1f} us")
        print(f"{'where':<16}{'what':<44}{'us':>9}{'passes':>9}")
        steps = steps_of_rows(requests, tokens, size)
        if requests == 1:
            steps += steps_of_sums(tokens, size)
        for where, what, run in steps:
            took = microseconds(run, args.repeats)
            print(f"{where:<16}{what:<44}{took:>9.1f}{took / one_pass:>9.1f}")
            results.append(
                {
                    "requests": requests,
                    "tokens": tokens,
                    "where": where,
                    "what": what,
                    "us": took,
                    "passes": took / one_pass,
                }
            )
    decode: list[dict[str, Any]] = []
    cases: list[dict[str, Any]] = []
    whole: list[dict[str, Any]] = []
    if vllm_is_installed():
        decode = print_decode_steps(args.repeats)
        cases = print_cases(args.repeats)
        from one_request import print_requests

        whole = print_requests(size, 5 * args.repeats)
    else:
        print(
            "\nnot run, vLLM is not installed: blocks, steps that decode, plain loops"
        )
    if args.json:
        found = {"block_size": size, "results": results}
        found |= {"decode": decode, "cases": cases, "whole requests": whole}
        print(json.dumps(found))


if __name__ == "__main__":
    main()
