"""Test NIXL pull: prompts of every length, aborts, unequal TP sizes, and what vLLM itself corrupts.

The servers are forked from one process that imported vLLM (rig only).
"""

from __future__ import annotations

import contextlib

import httpx
import pytest
from rig import processes, verdicts
from rig.model import tiny_qwen3
from rig.routing import prefill, prefill_decode
from rig.servers import serving

from e2e import pairs

pytestmark = pytest.mark.e2e

MAX_TOKENS = 8


@pytest.fixture(scope="module")
def p(forks):
    server = pairs.producer("e2e-p", tiny_qwen3(), fork_server=forks)
    with serving(server):
        yield server


def test_clean_loads_are_verified_and_answers_equal_a_single_instance(forks, p):
    d = pairs.consumer("e2e-d", tiny_qwen3(), "fail", drill=False, fork_server=forks)
    prompts = [pairs.prompt_of(n) for n in pairs.LENGTHS]
    prompts += [pairs.shared_prefix(n) for n in (352, 400, 640)]
    expected = pairs.reference_texts(p, prompts, MAX_TOKENS)
    with serving(d):
        answers = [prefill_decode(p, d, prompt, MAX_TOKENS) for prompt in prompts]
        assert [pairs.text_of(a) for a in answers] == expected
        assert pairs.loads(d) == {
            "verified": len(prompts),
            "mismatch": 0,
            "unverified": 0,
        }
        hits = d.metric("vllm:prefix_cache_hits_total")
        assert hits >= 640, "the shared prefix gave no local hits"
        compared = d.metric("vllm:kv_checksum_blocks_compared_total")
        transferred = sum(-(-len(x) // 32) for x in prompts) - hits // 32
        assert compared == transferred
        abort_some(p, d)
        leave_while_it_loads(p, d)
        assert pairs.loads(d)["mismatch"] == pairs.loads(d)["unverified"] == 0
        prompt = pairs.prompt_of(333, 5)
        answer = prefill_decode(p, d, prompt, MAX_TOKENS)
        assert [pairs.text_of(answer)] == pairs.reference_texts(p, [prompt], MAX_TOKENS)
    assert "KV checksums are on" in d.log_text()
    assert "KV checksum mismatch" not in d.log_text()


def abort_some(p, d):
    """Let clients leave while their KV is loaded."""
    for i, patience in enumerate((0.01, 0.02, 0.05, 0.1, 0.2, 0.3)):
        prompt = pairs.prompt_of(1400, 100 + i)
        params = prefill(p, prompt, request_id=f"abort-{i}")
        body = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": 50,
            # Triton's interpreter lacks what vLLM 0.30.0 draws tokens with.
            "temperature": 0,
            "kv_transfer_params": params,
        }
        with contextlib.suppress(httpx.TransportError):
            httpx.post(
                f"http://127.0.0.1:{d.port}/v1/completions",
                json=body,
                timeout=patience,
                trust_env=False,
            )


def leave_while_it_loads(p, d):
    """Stop P, so that the load is under way when the client leaves.

    A load may end all the same, if P had done its part: then another is tried.
    """
    before = verdicts.settled(d).aborted
    for i in range(3):
        prompt = pairs.prompt_of(100, 97 + i)
        asked = {"request_id": f"leaves-{i}", "patience_s": 3, "stream": True}
        params = prefill(p, prompt, request_id=asked["request_id"])
        with processes.stopped(p.family()):
            with (
                contextlib.suppress(httpx.TimeoutException),
                d.streamed(prompt, 5, params, **asked) as answer,
            ):
                answer.read()
            # D must know that the client left before the load can end.
            if verdicts.settled(d).aborted > before:
                return
    raise AssertionError("no client left while its KV was loaded")


@pytest.mark.parametrize(("p_tp", "d_tp"), [(2, 1), (1, 2)])
def test_unequal_tp(forks, p_tp, d_tp):
    model = tiny_qwen3("float32")
    name = f"e2e-tp{p_tp}{d_tp}"
    common = {"dtype": "float32", "fork_server": forks}
    left = pairs.producer(f"{name}-p", model, tp=p_tp, **common)
    right = pairs.consumer(f"{name}-d", model, "recompute", tp=d_tp, **common)
    prompts = [pairs.prompt_of(n, 9) for n in (1, 64, 300)]
    with serving(left, right):
        expected = pairs.reference_texts(left, prompts, MAX_TOKENS)
        answers = [prefill_decode(left, right, x, MAX_TOKENS) for x in prompts]
        assert [pairs.text_of(a) for a in answers] == expected
        assert pairs.loads(right) == {"verified": 3, "mismatch": 0, "unverified": 0}
        prompt = pairs.prompt_of(300, 10)
        answer = prefill_decode(left, right, prompt, MAX_TOKENS, request_id="flip-tp")
        reference = pairs.reference_texts(left, [prompt], MAX_TOKENS)
        assert [pairs.text_of(answer)] == reference
        assert pairs.loads(right) == {"verified": 3, "mismatch": 1, "unverified": 0}


def test_a_recompute_with_async_scheduling(forks, p):
    d = pairs.consumer(
        "e2e-async",
        tiny_qwen3(),
        "recompute",
        faults=pairs.LATE_FAULT,
        args=("--async-scheduling",),
        env={
            "KV_CHECKSUM_RIG_ASYNC_SCHEDULING": "1",
            "VLLM_LOGGING_LEVEL": "DEBUG",
        },
        fork_server=forks,
    )
    with serving(d):
        pairs.assert_late_fault_is_recomputed(p, d, MAX_TOKENS)
    assert "Batch queue is enabled with size 2" in d.log_text()


@pytest.mark.parametrize("mode", ["fail-open", "recompute"])
def test_vllms_own_corruption_from_block_size_32_to_64(forks, p, mode):
    """Nothing is injected: stock vLLM on CPU answers 200 with wrong tokens here."""
    name = f"e2e-64-{mode}"
    d = pairs.consumer(
        name, tiny_qwen3(), mode, drill=False, block_size=64, fork_server=forks
    )
    prompt = pairs.prompt_of(500, 11)
    expected = pairs.reference_texts(p, [prompt], MAX_TOKENS)
    with serving(d):
        answer = prefill_decode(p, d, prompt, MAX_TOKENS)
        assert pairs.loads(d)["mismatch"] == 1
        assert ([pairs.text_of(answer)] == expected) == (mode == "recompute")
