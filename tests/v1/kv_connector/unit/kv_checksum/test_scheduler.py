# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test real schedulers of P and D with real checksum workers, over every P/D path.

What moves between them is faked (see `transports`).
"""

import base64

import msgspec
import pytest

from vllm.v1.engine import FinishReason

from .rig import instances as rig
from .rig.instances import (
    MODES,
    change_payload,
    fewer_tokens,
    flip_bit,
    load,
    pair,
    tokens,
)
from .rig.versions import without

SPLITS = [
    ((1, 1), (1, 1)),
    ((2, 1), (1, 1)),
    ((1, 1), (2, 1)),
    ((1, 1), (4, 1)),
    ((1, 2), (1, 1)),
    ((1, 1), (2, 2)),
]


@pytest.mark.parametrize(("p_split", "d_split"), SPLITS)
@pytest.mark.parametrize("window", [None, 40])
def test_correct_loads_verify(model, transport, p_split, d_split, window):
    p, d = pair(
        model,
        dict(tp=p_split[0], pp=p_split[1]),
        dict(tp=d_split[0], pp=d_split[1], kv_checksum_fail_closed=True),
        transport=transport,
        window=window,
    )
    for number in (1, 15, 16, 17, 64, 300):
        _, out = load(p, d, number, f"r{number}", prompt=tokens(number, number))
        assert out.finish_reason == FinishReason.LENGTH
    assert d.loads("verified") == 6
    assert sum(k.startswith(("loads:", "unverified")) for k in d.stats) == 1
    assert d.stats["blocks_compared"] >= 6 and d.stats["blocks_mismatched"] == 0
    p.step()
    d.step(p)
    assert not any({**p.tables(), **d.tables()}.values())


ACTIONS = {
    "open": "served as loaded",
    "fail": "request failed",
    "recompute": "recomputing from token 48",
}
"""What is said of a load whose fourth block differs."""


def error_of(out):
    """Return what the client of a failed request is told."""
    if not hasattr(out, "error"):
        pytest.skip(without("place for a failed request's reason"))
    return out.error.message


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("d_split", [(1, 1), (2, 1), (2, 2)])
def test_a_flipped_bit_is_seen(model, transport, mode, d_split, log):
    p, d = pair(
        model,
        None,
        dict(tp=d_split[0], pp=d_split[1], **MODES[mode]),
        transport=transport,
    )
    d.damage = flip_bit
    request, out = load(p, d, 100)
    assert (d.loads("mismatch"), d.stats["blocks_mismatched"]) == (1, 1)
    (line,) = [x for x in log if x.startswith("ERROR KV checksum mismatch")]
    assert "request r," in line and "group 0: 1 of 7 blocks differ, position 3" in line
    assert f"remote engine {p.scheduler.connector.engine_id} at " in line
    assert "None" not in line
    if mode == "fail":
        assert out.finish_reason == FinishReason.ERROR
        assert request.num_computed_tokens == 100
        assert d.stats["failed"] == 1
        assert error_of(out).startswith("KV checksum mismatch")
    else:
        assert out.finish_reason == FinishReason.LENGTH
    recomputed = sum(n for _, n in d.scheduled)
    assert recomputed == {"open": 2, "fail": 0, "recompute": 53}[mode]
    assert line.endswith(f"; {ACTIONS[mode]}")
    d.step(p)
    assert not any(d.tables().values())


def test_the_reason_of_a_failed_request_is_not_the_next_one_s(model, transport):
    """A client may use its id again."""
    p, d = pair(model, None, MODES["fail"], transport=transport)
    d.damage = flip_bit
    assert error_of(load(p, d, 100)[1]).startswith("KV checksum mismatch")
    d.damage = lambda d, req_id, ids: None
    d.scheduler.reset_prefix_cache()
    params = rig.prefill(p, "p-again", tokens(100))
    out = d.run(d.add("r", tokens(100), params, max_tokens=2), p)
    assert out.finish_reason == FinishReason.LENGTH and out.error is None
    assert not d.scheduler.kv_checksum._consequences.client_errors._errors


def test_recompute_leaves_right_kv(model, transport):
    p, d = pair(model, None, MODES["recompute"], transport=transport)
    d.damage = flip_bit
    prompt = tokens(100)
    request = d.add("r", prompt, rig.prefill(p, "p", prompt), max_tokens=5)
    for _ in range(3):
        d.step(p)
    assert d.loads("mismatch") == 1 and d.answer_kv_is_right(request)


def other_fingerprint(payload):
    payload.groups[0].fingerprint ^= 1


def other_block_size(payload):
    payload.groups[0].unit_size = 24
    payload.groups[0].values = payload.groups[0].values[:4]


def no_groups(payload):
    payload.groups.clear()


def no_values(payload):
    payload.groups[0].values = payload.groups[0].values[:0]


BAD_PAYLOADS = {
    "missing": (lambda data: None, "no_payload"),
    "empty": (lambda data: b"", "bad_payload"),
    "truncated": (lambda data: data[:-8], "bad_payload"),
    "8 MB": (lambda data: bytes(2**23), "bad_payload"),
    "deeply nested": (lambda data: b"\x91" * 90_000, "bad_payload"),
    "another version": (lambda data: msgspec.msgpack.encode((9, 9)), "payload_version"),
    "fewer tokens": (change_payload(fewer_tokens), "num_tokens"),
    "another model": (change_payload(other_fingerprint), "fingerprint"),
    "odd block size": (change_payload(other_block_size), "block_sizes"),
    "no groups": (change_payload(no_groups), "one_side_only"),
    "no values": (change_payload(no_values), "nothing_in_common"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", BAD_PAYLOADS)
def test_bad_payloads_leave_the_load_unverified(
    model, transport, bad, mode, log, caplog
):
    change, reason = BAD_PAYLOADS[bad]
    caplog.set_level("DEBUG", "vllm.distributed.kv_transfer.kv_checksum")
    p, d = pair(model, None, MODES[mode], transport=transport)
    p.alter = change
    for i in range(2):
        _, out = load(p, d, 100, f"r{i}", prompt=tokens(100, i))
        expected = FinishReason.ERROR if mode == "fail" else FinishReason.LENGTH
        assert out.finish_reason == expected
        if mode == "fail":
            assert error_of(out).startswith("KV checksums not verified")
            assert error_of(out).endswith(f"({reason})")
    assert d.loads("unverified") == 2 and d.stats[f"unverified:{reason}"] == 2
    assert d.loads("verified") == 0
    counted = {"open": {}, "fail": {"failed": 2}, "recompute": {"recomputed": 2}}
    assert d.stats.items() >= counted[mode].items()
    assert not {"failed", "recomputed"} & d.stats.keys() - counted[mode].keys()
    warned = [x for x in log if x.startswith("WARNING KV checksums not verified")]
    assert len(warned) == 1 and reason in warned[0]
    # Each has a line of its own for who looks into it, with what does not fit.
    told = [x for x in log if x.startswith("DEBUG KV load of request")]
    assert len(told) == 2 and all(f"not verified: {reason} (" in x for x in told)
    assert all(len(x) < 500 for x in told)
    assert bad == "missing" or not any(x.endswith("()") for x in told)


def test_payload_bytes_are_those_that_were_sent(model, transport):
    """Of NIXL pull as text, in the producer's answer."""
    p, d = pair(model, transport=transport)
    sent = []
    p.alter = lambda data: sent.append(data) or data
    for number in (10, 100, 300):
        load(p, d, number, f"r{number}")
    sizes = [len(base64.b64encode(x) if transport == "pull" else x) for x in sent]
    assert len(sizes) == 3 and p.stats["payload_bytes"] == sum(sizes)
    assert not d.stats.get("payload_bytes")


@pytest.mark.parametrize("mode", MODES)
def test_a_payload_of_another_request_is_a_mismatch(model, transport, mode):
    p, d = pair(model, None, MODES[mode], transport=transport)
    seen = []
    p.alter = lambda data: seen.append(data) or seen[0]
    rig.prefill(p, "p-other", tokens(100, 9))
    load(p, d, 100)
    assert d.loads("mismatch") == d.stats["other_prompts"] == 1
    assert d.stats["blocks_compared"] == 0


@pytest.mark.parametrize(("p_size", "d_size"), [(16, 32), (32, 16)])
@pytest.mark.parametrize("number", [1, 31, 32, 33, 64, 100])
def test_different_block_sizes(model, transport, p_size, d_size, number):
    p, d = pair(
        model,
        dict(block_size=p_size),
        dict(block_size=d_size, kv_checksum_fail_closed=True),
        transport=transport,
    )
    load(p, d, number)
    assert d.loads("verified") == 1
    assert d.stats["blocks_compared"] == -(-number // d_size)
    d.damage = flip_bit
    _, out = load(p, d, number, "bad", prompt=tokens(number, 5))
    assert d.loads("mismatch") == 1 and out.finish_reason == FinishReason.ERROR


@pytest.mark.parametrize("local", [16, 32, 48, 64])
def test_local_prefix_hits(model, transport, local):
    p, d = pair(model, None, dict(kv_checksum_fail_closed=True), transport=transport)
    prompt = tokens(100)
    load(p, d, local, "warm", prompt=prompt[:local])
    d.stats.clear()
    load(p, d, 100, prompt=prompt)
    assert d.loads("verified") == 1 and d.stats["blocks_compared"] == 7 - local // 16


@pytest.mark.parametrize(("local", "outcome"), [(8, "unverified"), (16, "verified")])
def test_a_first_loaded_block_inside_a_producers_unit(model, transport, local, outcome):
    p, d = pair(model, dict(block_size=16), dict(block_size=8), transport=transport)
    prompt = tokens(100)
    load(p, d, local, "warm", prompt=prompt[:local])
    d.stats.clear()
    load(p, d, 100, prompt=prompt)
    assert d.loads(outcome) == 1
    assert d.stats.get("unverified:unaligned_start", 0) == (outcome == "unverified")


@pytest.mark.parametrize("sides", ["both", "p", "d"])
def test_skipped_groups(model, transport, sides):
    p, d = pair(model, window=40, transport=transport)
    for instance, name in ((p, "p"), (d, "d")):
        if sides in ("both", name):
            for worker in instance.workers:
                worker.skipped[1] = "compressed: for the test"
                del worker.groups[1]
    for req_id in ("r", "r2"):
        load(p, d, 100, req_id, prompt=tokens(100, len(req_id)))
    for instance, name in ((p, "p"), (d, "d")):
        # Told once, and only by a side that skips something.
        told = {k: v for k, v in instance.stats.items() if "skipped" in k}
        skips = sides in ("both", name)
        assert told == ({"skipped_groups:compressed": 1} if skips else {})
    if sides == "both":
        assert d.loads("verified") == 2 and d.stats["blocks_compared"] == 14
    else:
        assert d.loads("unverified") == 2
        assert d.stats["unverified:one_side_only"] == 2


@pytest.mark.parametrize("sides", ["both", "p", "d"])
def test_a_group_that_one_worker_skips_is_skipped_by_the_instance(
    model, transport, sides
):
    """Skip it on one TP rank of one PP stage: the others' sums are not used."""
    p, d = pair(model, tp=2, pp=2, window=40, transport=transport)
    for instance, name in ((p, "p"), (d, "d")):
        if sides in ("both", name):
            worker = instance.workers[-1]
            worker.skipped[1] = "compressed: for the test"
            del worker.groups[1]
    load(p, d, 100)
    if sides == "both":
        assert d.loads("verified") == 1 and d.stats["blocks_compared"] == 7
    else:
        assert d.loads("unverified") == d.stats["unverified:one_side_only"] == 1


@pytest.mark.parametrize("kept", [0, 1])
def test_a_group_that_no_connector_transfers_is_left_alone(model, transport, kept):
    """Nothing of it is summed, sent or told, on workers that could sum it."""
    p, d = pair(model, window=40, kept=(kept,), transport=transport)
    load(p, d, 100)
    assert d.loads("verified") == 1
    assert d.stats["blocks_compared"] == (4 if kept == 0 else 7)
    told = {**p.stats, **d.stats}
    assert not [k for k in told if k.startswith(("left_out", "unsent", "skipped"))]
    for worker in p.workers + d.workers:
        assert [*worker.groups] == [1 - kept] and not worker.skipped


def test_the_gauge_counts_the_groups_that_any_pp_stage_skips(model):
    p, d = pair(model, pp=2, window=40)
    for group_id, worker in enumerate(d.workers):
        worker.skipped[group_id] = "compressed: for the test"
        del worker.groups[group_id]
    load(p, d, 100)
    assert d.stats["skipped_groups:compressed"] == 2
