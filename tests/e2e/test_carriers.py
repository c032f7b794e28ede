"""Test each carrier over its real library: clean, corrupt, lost payloads, every damage, many at once.

The servers are forked from one process that imported vLLM (rig only).
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from kv_checksum.rig.versions import older_than
from rig import processes, verdicts
from rig.model import tiny_qwen3
from rig.routing import mooncake_params, prefill, prefill_decode
from rig.servers import SERVED_NAME, serving

from e2e import pairs
from vllm.distributed.kv_transfer.kv_checksum.fault_drill.damage import (
    KINDS,
    PAYLOAD_KINDS,
)

pytestmark = pytest.mark.e2e

MAX_TOKENS = 6

FAULTS = {
    **pairs.every_fault(),
    **pairs.LATE_FAULT,
    "third-": {"kind": "bit_flip", "skip": 2},
}


CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"

MANY = ("--kv-cache-memory-bytes", str(192 << 20), "--max-num-seqs", "32")
"""For many requests at once, and KV that waits to be pulled."""

LEASE_S = 30
"""NIXL's kv_lease_duration, by default."""


@pytest.fixture(scope="module", params=pairs.CONNECTORS)
def carrier(request):
    return request.param


@pytest.fixture(scope="module")
def common(carrier, forks):
    return {"connector": pairs.CONNECTORS[carrier], "fork_server": forks}


@pytest.fixture(scope="module")
def p(carrier, common):
    server = pairs.producer(f"e2e-{carrier}-p", tiny_qwen3(), args=MANY, **common)
    with serving(server):
        yield server


@pytest.fixture(scope="module")
def evidence(tmp_path_factory, carrier):
    """Return the folder for the evidence of each mode's consumer."""
    folder = tmp_path_factory.mktemp(f"evidence-{carrier}")
    for mode in pairs.MODES:
        (folder / mode).mkdir()
    return {mode: folder / mode for mode in pairs.MODES}


@pytest.fixture(scope="module")
def consumers(carrier, common, p, evidence):
    """Yield a consumer that damages chosen loads, by mode."""
    servers = {
        mode: pairs.consumer(
            f"e2e-{carrier}-{mode}",
            tiny_qwen3(),
            mode,
            faults=FAULTS,
            args=("--chat-template", CHAT_TEMPLATE),
            settings={"kv_checksum_evidence_dir": str(evidence[mode])},
            **common,
        )
        for mode in pairs.MODES
    }
    with serving(*servers.values()):
        yield servers


def ask(p, d, length, seed, request_id):
    """Return D's answer, what a single instance answers, and what D counted."""
    prompts = pairs.prompts_of(length, seed)
    asked, expected = pairs.ask_anew(p, d, prompts, MAX_TOKENS, request_id)
    return asked.answer, expected, asked.counted


@pytest.mark.parametrize("mode", pairs.MODES)
def test_a_clean_load_then_a_flipped_bit_then_a_lost_payload(
    mode, carrier, consumers, p, evidence
):
    d = consumers[mode]
    answer, expected, counted = ask(p, d, 450, 31, f"clean-{mode}")
    assert counted == {"verified": 1} and pairs.text_of(answer) == expected

    request_id = f"bit_flip-{mode}"
    answer, expected, counted = ask(p, d, 450, 32, request_id)
    assert counted == {"mismatch": 1}
    if mode == "fail":
        pairs.assert_failed(answer)
    elif mode == "recompute":
        assert pairs.text_of(answer) == expected
    else:
        assert answer.status_code == 200
    (line,) = [x for x in d.log_text().splitlines() if "KV checksum mismatch" in x]
    assert request_id in line and "1 of 15 blocks differ, position 0" in line
    assert "remote engine " in line and " at " in line and "None" not in line

    (file,) = evidence[mode].iterdir()
    (entry,) = [json.loads(x) for x in file.read_text().splitlines()]
    peer = entry["peer_engine"], entry["peer_host"]
    assert request_id in entry["request_id"] and entry["groups"]["0"]["positions"] == [
        0
    ]
    assert f"remote engine {peer[0]} at " in line and peer[1] in line
    assert line.endswith(f"; {entry['action']}")
    by_peer = dict(zip(("peer_engine", "peer_host"), peer, strict=True))
    name = "vllm:kv_checksum_peer_loads_total"
    assert d.metric(name, verdict="mismatch", **by_peer) == d.metric(name) == 1

    answer, expected, counted = ask(p, d, 120, 33, f"lost_payload-{mode}")
    assert counted == {"unverified": 1}
    assert pairs.unverified(d, "no_payload") == 1
    if mode == "fail":
        pairs.assert_failed(answer, "kv_checksum_unverified", "(no_payload)")
        prompts = pairs.prompts_of(90, 35)
        streamed, _ = pairs.ask_anew(p, d, prompts, 2, "bit_flip-stream", stream=True)
        if pairs.STREAMS_TELL:
            pairs.assert_failed(streamed.answer)
    else:
        assert pairs.text_of(answer) == expected
    answer, expected, counted = ask(p, d, 200, 34, f"next-{mode}")
    assert counted == {"verified": 1} and pairs.text_of(answer) == expected

    mismatches = 2 if mode == "fail" else 1
    bad = 0 if mode == "fail-open" else mismatches + 1
    assert counters(d) == {
        "blocks_compared": 15 + 15 + 7 + (3 if mode == "fail" else 0),
        "blocks_mismatched": mismatches,
        "failed": bad if mode == "fail" else 0,
        "recomputed": bad if mode == "recompute" else 0,
    }
    name = "vllm:kv_checksum_loads_total"
    own = {"nixl_pull": "kv_transfer_params"}.get(carrier, "connector")
    assert d.metric(name, carrier=own) == d.metric(name) == 3 + mismatches
    assert p.metric("vllm:kv_checksum_payload_bytes_total") > 0


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_the_client_of_a_failed_chat_may_retry(carrier, consumers, p, stream):
    if carrier != "nixl_pull":
        pytest.skip("P and D are matched by ids, which differ by the kind of request")

    def route(p, d, prompt, max_tokens, *, request_id):
        params = prefill(p, prompt, request_id=request_id)
        return d.post(
            "/v1/chat/completions",
            headers={"X-Request-Id": request_id},
            model=SERVED_NAME,
            messages=[{"role": "user", "content": prompt}],
            max_tokens=max_tokens,
            # Triton's interpreter lacks what vLLM 0.30.0 draws tokens with.
            temperature=0,
            kv_transfer_params=params,
            stream=stream,
        )

    for damage, verdict in (
        ("none", "verified"),
        ("bit_flip", "mismatch"),
        ("lost_payload", "unverified"),
    ):
        request_id = f"{damage}-chat-{stream}"
        prompt = f"the quick brown fox {request_id} jumps over the lazy dog" * 3
        asked = pairs.ask(p, consumers["fail"], prompt, 4, request_id, route=route)
        assert asked.counted == {verdict: 1}
        if verdict == "verified":
            assert asked.answer.status_code == 200
        elif not stream or pairs.STREAMS_TELL:
            pairs.assert_failed(asked.answer, f"kv_checksum_{verdict}")


def transfers(server):
    """Return how many transfers NIXL made, as the connector's own statistics tell."""
    return server.metric("vllm:nixl_xfer_time_seconds_count")


def counters(server):
    names = ("blocks_compared", "blocks_mismatched", "failed", "recomputed")
    return {n: int(server.metric(f"vllm:kv_checksum_{n}_total")) for n in names}


def test_a_recompute_starts_at_the_first_bad_block(consumers, p):
    pairs.assert_late_fault_is_recomputed(p, consumers["recompute"], MAX_TOKENS)


def test_every_damage_is_seen_and_recomputed_right(consumers, p):
    d = consumers["recompute"]
    wrong = {}
    for seed, kind in enumerate([*KINDS, *PAYLOAD_KINDS]):
        answer, expected, counted = ask(p, d, 100, 40 + seed, f"{kind}-0")
        verdict = "unverified" if kind in pairs.UNVERIFIED else "mismatch"
        if counted != {verdict: 1} or pairs.text_of(answer) != expected:
            wrong[kind] = counted, pairs.text_of(answer), expected
        assert f"KV CHECKSUM FAULT DRILL: {kind}" in d.log_text()
    assert not wrong
    assert "KV CHECKSUM FAULT DRILL left" not in d.log_text()
    for reason in pairs.UNVERIFIED.values():
        assert pairs.unverified(d, reason) >= 1


def test_later_requests_do_not_answer_from_a_damaged_load(consumers, p):
    d = consumers["fail-open"]
    pairs.assert_followers_are_right(p, d, "bit_flip-f", 60, MAX_TOKENS)
    good = 2 * d.block_size
    pairs.assert_followers_are_right(p, d, "third-f", 61, MAX_TOKENS, good)


def test_requests_that_wait_behind_a_damaged_load_are_right(carrier, common, p):
    """Ask for more than D has room for: all requests have come before the damaged load ends."""
    shared = pairs.prompt_of(200, 62)
    asked = {"zero_block-first": shared}
    asked |= {f"behind-{n}": shared + pairs.prompt_of(10 * n, 63) for n in range(5)}
    room = ("--num-gpu-blocks-override", "10", "--max-model-len", "256")
    d = pairs.consumer(
        f"e2e-{carrier}-narrow",
        tiny_qwen3(),
        "fail-open",
        faults=FAULTS,
        args=room,
        **common,
    )
    with serving(d):
        answers = all_have_come(p, d, asked)
        counted = verdicts.settled(d)
    expected = pairs.reference_texts(p, list(asked.values()), MAX_TOKENS)
    assert counted.started == len(asked)
    # What Mooncake gave up fails, and was not judged.
    assert sum(a.status_code != 200 for a in answers) == counted.failed
    right = [
        request_id
        for request_id, answer, text in zip(asked, answers, expected, strict=True)
        if answer.status_code == 200 and pairs.text_of(answer) == text
    ]
    assert "zero_block-first" not in right
    assert len(right) == counted.of("verified") >= 1
    assert counted.of("mismatch") + counted.of("verified") + counted.failed == 6


def all_have_come(p, d, asked):
    """Ask for all, in this order; no load ends before D knows of all of them."""
    at_once = p.connector == "MooncakeConnector"
    halves = {
        request_id: mooncake_params(p)
        if at_once
        else ({}, prefill(p, prompt, request_id=request_id))
        for request_id, prompt in asked.items()
    }
    with ThreadPoolExecutor(2 * len(asked)) as clients:
        answers = []
        with processes.stopped([] if at_once else p.family()):
            for n, (request_id, prompt) in enumerate(asked.items(), 1):
                ask = (prompt, MAX_TOKENS, halves[request_id][1])
                answers.append(
                    clients.submit(d.completions, *ask, request_id=request_id)
                )
                pairs.wait(lambda n=n: waiting(d) == n, f"{n} requests on D")
            assert pairs.pending_loads(d) == 1
        if at_once:
            for request_id, prompt in asked.items():
                ask = (prompt, 1, halves[request_id][0])
                clients.submit(p.completions, *ask, request_id=request_id)
        return [answer.result() for answer in answers]


def waiting(server):
    """Return how many requests do not run yet."""
    return server.metric("vllm:num_requests_waiting")


def test_a_request_to_be_loaded_and_sent_on_is_an_ordinary_load(carrier, consumers, p):
    """Ask D for both, as a router or a client that merges parameters does."""
    if carrier == "mooncake":
        pytest.skip("vLLM's Mooncake consumer ends in an assertion of its own")
    if carrier == "nixl_push" and older_than("0.33.0"):
        pytest.skip("vLLM's NIXL push consumer ends in an assertion of its own")
    both = {"do_remote_decode": True}
    for mode, d in consumers.items():
        for request_id, counted in (
            ("both-", "verified"),
            ("bit_flip-both-", "mismatch"),
        ):
            prompts = pairs.prompts_of(150, 64 + len(request_id))
            asked, expected = pairs.ask_anew(
                p, d, prompts, 1, f"{request_id}{mode}", merged=both
            )
            assert asked.counted == {counted: 1}
            if counted == "mismatch" and mode == "fail":
                pairs.assert_failed(asked.answer)
            elif counted == "verified" or mode == "recompute":
                assert pairs.text_of(asked.answer) == expected


def other_prompts(server):
    return server.metric("vllm:kv_checksum_other_prompts_total")


@pytest.mark.parametrize("shorter", [0, 2])
def test_what_p_answered_for_another_prompt_is_a_mismatch(
    carrier, consumers, p, shorter
):
    """Hand one request's parameters to another, as a faulty router does."""
    for mode, d in consumers.items():
        prompts = pairs.prompts_of(200 - shorter, 70 + shorter)
        request_id = f"swapped-{mode}-{shorter}"
        before = other_prompts(d)
        asked, expected = pairs.ask_anew(
            p, d, prompts, 2, request_id, p_prompt=pairs.prompt_of(200, 71)
        )
        assert asked.counted == {"mismatch": 1}
        assert other_prompts(d) == before + 1
        # The tests before this one may have used up the lines of this minute.
        lines = [x for x in d.log_text().splitlines() if request_id in x]
        lines = [x for x in lines if "KV checksum mismatch" in x]
        assert all("another request's KV" in line for line in lines)
        assert len(lines) == 1 or "mismatches: more than" in d.log_text()
        if mode == "fail":
            pairs.assert_failed(asked.answer)
        elif mode == "recompute":
            assert pairs.text_of(asked.answer) == expected
        # The same prompt's own KV, after what came of the other's.
        again = [pairs.prompts_of(200 - shorter, 70 + shorter)[0]]
        asked, expected = pairs.ask_anew(p, d, again * 5, 2, f"own-{request_id}")
        assert pairs.text_of(asked.answer) == expected
        assert asked.counted.keys() <= {"verified"}


def test_one_request_of_two_prompts_shares_one_answer(carrier, consumers, p):
    if carrier != "nixl_pull":
        pytest.skip("P names one request, and D's two ask for it by two names")
    d = consumers["fail-open"]
    both = [pairs.prompt_of(100, 81), pairs.prompt_of(100, 82)]
    params = prefill(p, both, request_id="two")
    before = pairs.loads(d)
    answer = d.completions(both, 2, params, request_id="two")
    assert len(answer.raise_for_status().json()["choices"]) == 2
    counted = {k: n - before[k] for k, n in pairs.loads(d).items()}
    assert counted == {"verified": 1, "mismatch": 1, "unverified": 0}


def test_two_hundred_at_once_and_nothing_stays(carrier, common):
    """Serve in float32: texts are compared, and batches of other sizes round otherwise."""
    model, name = tiny_qwen3("float32"), f"e2e-{carrier}-many"
    same = {"dtype": "float32", "args": MANY, **common}
    kept_s = LEASE_S if carrier == "nixl_push" and pairs.PUSHES_END_BY_LEASE else 0
    p = pairs.producer(f"{name}-p", model, **same)
    d = pairs.consumer(name, model, "fail", drill=False, **same)
    draw = [1 + (n * 37) % 290 for n in range(200)]
    prompts = [pairs.prompt_of(length, 500 + n) for n, length in enumerate(draw)]
    with serving(p, d), ThreadPoolExecutor(len(prompts)) as clients:
        for n in range(3):
            assert ask(p, d, 90, 400 + n, f"warm-{n}")[2] == {"verified": 1}
        time.sleep(1 + kept_s)
        before = p.checksum_tables(), d.checksum_tables()
        for tables in before:
            assert any(name.endswith("KVChecksumScheduler._recvs") for name in tables)
            assert any(name.endswith("KVChecksumWorker._recvs") for name in tables)
        answers = list(clients.map(lambda x: prefill_decode(p, d, x, 2), prompts))
        failed = sum(a.status_code != 200 for a in answers)
        counted = verdicts.settled(d)
        if carrier != "mooncake":  # which transfers several requests at once
            assert transfers(p if carrier == "nixl_push" else d) == counted.started
        assert counted.failed == pairs.given_up(d) >= failed
        assert pairs.loads(d) == {
            "verified": counted.started - counted.failed,
            "mismatch": 0,
            "unverified": 0,
        }
        assert counted.started == 203 + counted.failed - failed
        expected = list(
            clients.map(lambda x: pairs.reference_texts(p, [x], 2)[0], prompts)
        )
        differing = [
            n
            for n, (a, text) in enumerate(zip(answers, expected, strict=True))
            if a.status_code == 200 and pairs.text_of(a) != text
        ]
        assert differing == []
        time.sleep(1 + kept_s)
        assert (p.checksum_tables(), d.checksum_tables()) == before
