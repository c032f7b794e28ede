# SPDX-License-Identifier: Apache-2.0
"""Real schedulers of P and D with real checksum workers, over NIXL pull."""

from types import SimpleNamespace

import kv_checksum_instances as rig
import numpy as np
import pytest
import torch
from vllm.v1.engine import FinishReason

from vllm.distributed.kv_transfer.kv_checksum import KV_TRANSFER_PARAMS_KEY
from vllm.distributed.kv_transfer.kv_checksum import payload as wire

CARRIER = "kv_transfer_params"
VERIFIED = f"loads:verified:{CARRIER}"
MISMATCH = f"loads:mismatch:{CARRIER}"
UNVERIFIED = f"loads:unverified:{CARRIER}"
MODES = {
    "open": dict(),
    "fail": dict(kv_checksum_fail_closed=True, policy="fail"),
    "recompute": dict(kv_checksum_fail_closed=True, policy="recompute"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return rig.write_model(tmp_path_factory.mktemp("model"))


def pair(model, p=None, d=None, **both):
    return (
        rig.Instance(model, "kv_producer", **{**both, **(p or {})}),
        rig.Instance(model, "kv_consumer", **{**both, **(d or {})}),
    )


def tokens(number, seed=0):
    return np.random.default_rng(seed).integers(5, 500, number).tolist()


def load(p, d, number, req_id="r", prompt=None, change=lambda params: params):
    prompt = prompt or tokens(number)
    params = rig.prefill(p, f"p-{req_id}", prompt)
    request = d.add(req_id, prompt, change(params), max_tokens=2)
    return request, d.run(request, p)


def flip_bit(instance, req_id, block_ids):
    if block_ids:
        cell = instance.kv[1][block_ids[len(block_ids) // 2]].view(torch.uint8)
        cell[1, 0, 3] ^= 4


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
def test_correct_loads_verify(model, p_split, d_split, window):
    p, d = pair(
        model,
        dict(tp=p_split[0], pp=p_split[1]),
        dict(tp=d_split[0], pp=d_split[1], kv_checksum_fail_closed=True),
        window=window,
    )
    for number in (1, 15, 16, 17, 64, 300):
        _, out = load(p, d, number, f"r{number}", prompt=tokens(number, number))
        assert out.finish_reason == FinishReason.LENGTH
    assert d.stats[VERIFIED] == 6
    assert {k for k in d.stats if k.startswith(("loads", "unverified"))} == {VERIFIED}
    assert d.stats["blocks_compared"] >= 6 and d.stats["blocks_mismatched"] == 0
    d.step(p)
    assert not any({**p.tables(), **d.tables()}.values())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("d_split", [(1, 1), (2, 1), (2, 2)])
def test_a_flipped_bit_is_seen(model, mode, d_split, log):
    p, d = pair(model, None, dict(tp=d_split[0], pp=d_split[1], **MODES[mode]))
    d.damage = flip_bit
    request, out = load(p, d, 100)
    assert (d.stats[MISMATCH], d.stats["blocks_mismatched"]) == (1, 1)
    (line,) = [x for x in log if x.startswith("ERROR KV checksum mismatch")]
    assert "request r," in line and "group 0: 1 of 7 blocks differ, position 3" in line
    assert p.scheduler.connector.engine_id in line
    if mode == "fail":
        assert out.finish_reason == FinishReason.ERROR
        assert d.stats["failed"] == 1 and "request failed" in line
    else:
        assert out.finish_reason == FinishReason.LENGTH
    recomputed = sum(n for _, n in d.scheduled)
    assert recomputed == {"open": 2, "fail": 0, "recompute": 101}[mode]
    d.step(p)
    assert not any(d.tables().values())


def test_recompute_leaves_right_kv(model):
    p, d = pair(model, None, MODES["recompute"])
    d.damage = flip_bit
    prompt = tokens(100)
    request = d.add("r", prompt, rig.prefill(p, "p", prompt), max_tokens=5)
    for _ in range(3):
        d.step(p)
    assert d.stats[MISMATCH] == 1 and d.answer_kv_is_right(request)


def drop(params):
    return {k: v for k, v in params.items() if k != KV_TRANSFER_PARAMS_KEY}


def change_payload(change):
    def apply(params):
        payload = wire.decode_text(params[KV_TRANSFER_PARAMS_KEY])
        change(payload)
        return {**params, KV_TRANSFER_PARAMS_KEY: wire.encode_text(payload)}

    return apply


def fewer_tokens(payload):
    payload.num_tokens = 40
    payload.groups[0].values = payload.groups[0].values[:3]


def other_fingerprint(payload):
    payload.groups[0].fingerprint ^= 1


def other_block_size(payload):
    payload.groups[0].block_size = 24
    payload.groups[0].values = payload.groups[0].values[:4]


def no_groups(payload):
    payload.groups.clear()


def no_values(payload):
    payload.groups[0].values = payload.groups[0].values[:0]


def text(value):
    return lambda params: {**params, KV_TRANSFER_PARAMS_KEY: value}


BAD_PAYLOADS = {
    "missing": (drop, "no_payload"),
    "truncated": (
        lambda params: {
            **params,
            KV_TRANSFER_PARAMS_KEY: params[KV_TRANSFER_PARAMS_KEY][:-8],
        },
        "bad_payload",
    ),
    "a number": (text(5), "bad_payload"),
    "8 MB": (text("A" * 2**23), "bad_payload"),
    "deeply nested": (text("kZGR" * 30_000), "bad_payload"),
    "another version": (text("kgKQ"), "payload_version"),
    "fewer tokens": (change_payload(fewer_tokens), "num_tokens"),
    "another model": (change_payload(other_fingerprint), "fingerprint"),
    "odd block size": (change_payload(other_block_size), "block_sizes"),
    "no groups": (change_payload(no_groups), "one_side_only"),
    "no values": (change_payload(no_values), "nothing_in_common"),
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad", BAD_PAYLOADS)
def test_bad_payloads_leave_the_load_unverified(model, bad, mode, log):
    change, reason = BAD_PAYLOADS[bad]
    p, d = pair(model, None, MODES[mode])
    for i in range(2):
        _, out = load(p, d, 100, f"r{i}", prompt=tokens(100, i), change=change)
        expected = FinishReason.ERROR if mode == "fail" else FinishReason.LENGTH
        assert out.finish_reason == expected
    assert d.stats[UNVERIFIED] == 2 and d.stats[f"unverified:{reason}"] == 2
    assert VERIFIED not in d.stats
    warned = [x for x in log if x.startswith("WARNING KV checksums not verified")]
    assert len(warned) == 1 and reason in warned[0]


@pytest.mark.parametrize("mode", MODES)
def test_a_payload_of_another_request_is_a_mismatch(model, mode):
    p, d = pair(model, None, MODES[mode])
    other = rig.prefill(p, "p-other", tokens(100, 9))[KV_TRANSFER_PARAMS_KEY]
    load(p, d, 100, change=text(other))
    assert d.stats[MISMATCH] == 1 and d.stats["blocks_mismatched"] == 7


@pytest.mark.parametrize(("p_size", "d_size"), [(16, 32), (32, 16)])
@pytest.mark.parametrize("number", [1, 31, 32, 33, 64, 100])
def test_different_block_sizes(model, p_size, d_size, number):
    p, d = pair(
        model,
        dict(block_size=p_size),
        dict(block_size=d_size, kv_checksum_fail_closed=True),
    )
    load(p, d, number)
    assert d.stats[VERIFIED] == 1
    assert d.stats["blocks_compared"] == -(-number // d_size)
    d.damage = flip_bit
    _, out = load(p, d, number, "bad", prompt=tokens(number, 5))
    assert d.stats[MISMATCH] == 1 and out.finish_reason == FinishReason.ERROR


@pytest.mark.parametrize("local", [16, 32, 48, 64])
def test_local_prefix_hits(model, local):
    p, d = pair(model, None, dict(kv_checksum_fail_closed=True))
    prompt = tokens(100)
    load(p, d, local, "warm", prompt=prompt[:local])
    d.stats.clear()
    load(p, d, 100, prompt=prompt)
    assert d.stats[VERIFIED] == 1 and d.stats["blocks_compared"] == 7 - local // 16


@pytest.mark.parametrize(("local", "outcome"), [(16, UNVERIFIED), (32, VERIFIED)])
def test_a_first_loaded_block_inside_a_producers_block(model, local, outcome):
    p, d = pair(model, dict(block_size=32), dict(block_size=16))
    prompt = tokens(100)
    load(p, d, local, "warm", prompt=prompt[:local])
    d.stats.clear()
    load(p, d, 100, prompt=prompt)
    assert d.stats[outcome] == 1
    assert d.stats.get("unverified:unaligned_start", 0) == (outcome == UNVERIFIED)


@pytest.mark.parametrize("sides", ["both", "p", "d"])
def test_skipped_groups(model, sides):
    p, d = pair(model, window=40)
    for instance, name in ((p, "p"), (d, "d")):
        if sides in ("both", name):
            for worker in instance.workers:
                worker.skipped[1] = "for the test"
                del worker.groups[1]
    load(p, d, 100)
    if sides == "both":
        assert d.stats[VERIFIED] == 1 and d.stats["blocks_compared"] == 7
    else:
        assert d.stats[UNVERIFIED] == 1
        assert d.stats["unverified:one_side_only"] == 1


def test_a_group_with_a_missing_block_inside_is_left_out_and_said(model, log):
    _, d = pair(model)
    kv_checksum = d.scheduler.kv_checksum
    rows = {"r": ([0, 0, 5, 6],), "hole": ([4, 0, 6, 7],)}
    kv_checksum.kv_cache_manager = SimpleNamespace(get_block_ids=rows.get)
    blocks = kv_checksum._transferred("r", 0, 64).blocks
    assert blocks.groups == {0: (2, [5, 6])} and not any("leave out" in x for x in log)
    for _ in range(2):
        blocks = kv_checksum._transferred("hole", 0, 64).blocks
        assert blocks.groups == {}
    assert sum("leave out KV cache group 0" in x for x in log) == 1


def test_missing_workers(model, log):
    p, d = pair(model, dict(tp=2), None)
    quiet = p.workers[1].post_forward
    p.workers[1].post_forward = lambda *args: None
    params = rig.prefill(p, "p", tokens(50))
    assert KV_TRANSFER_PARAMS_KEY not in params
    assert any(x.startswith("WARNING KV checksums not sent") for x in log)
    p.workers[1].post_forward = quiet
    p2, d2 = pair(model, None, dict(tp=2))
    d2.workers[1].post_forward = lambda *args: None
    load(p2, d2, 50)
    assert d2.stats["unverified:workers_missing"] == 1


def test_a_worker_that_summed_other_blocks(model):
    p, d = pair(model)
    bind = d.workers[0].bind

    def shifted(scheduled):
        for blocks in (scheduled.reqs_to_recv if scheduled else {}).values():
            start, ids = blocks.groups[0]
            blocks = type(blocks)(blocks.num_tokens, {0: (start + 1, ids[1:])})
            scheduled.reqs_to_recv = {"r": blocks}
        bind(scheduled)

    d.workers[0].bind = shifted
    load(p, d, 50)
    assert d.stats["unverified:other_blocks"] == 1


def test_chunked_prefill_and_decode_on_the_producer(model):
    """The prompt is summed once however many chunks; decoded tokens do not count."""
    p, d = pair(model)
    prompt = tokens(700)
    params = rig.prefill(p, "p", prompt, max_tokens=20)
    assert sum(n > 1 for _, n in p.scheduled) == 3
    request = d.add("r", prompt, params, max_tokens=1)
    d.run(request, p)
    assert d.stats[VERIFIED] == 1


def test_a_preempted_producer_never_gives_a_false_match(model):
    """Sums of a step that was rolled back are dropped, not mixed."""
    p, d = pair(model)
    prompt = tokens(50)
    request = p.add("p", prompt, dict(do_remote_decode=True), max_tokens=1)
    output = p.scheduler.schedule()
    p.write(request, 0, 50)
    worker = p.workers[0]
    worker.bind(output.kv_checksum_scheduled)
    for cache in p.kv.values():
        cache.view(torch.uint8)[:, :, 0, 0] ^= 1
    stale = worker.post_forward(None, set(), set())
    for cache in p.kv.values():
        cache.view(torch.uint8)[:, :, 0, 0] ^= 1
    kv_checksum = p.scheduler.kv_checksum
    kv_checksum.add_send(request)
    kv_checksum.collect(rig.KVConnectorOutput(kv_checksums=stale))
    assert not kv_checksum._sends["p"].records
    worker.bind(kv_checksum.build_checksum_meta())
    fresh = worker.post_forward(None, set(), set())
    kv_checksum.collect(rig.KVConnectorOutput(kv_checksums=stale))
    result = rig.KVConnectorOutput(kv_checksums=fresh)
    p.finish_step(output, p.runner_output(output, result))
    params = p.results["p"][-1].kv_transfer_params
    d.run(d.add("r", prompt, params), p)
    assert d.stats[VERIFIED] == 1


@pytest.mark.parametrize("when", ["before", "loading"])
def test_aborted_requests_leave_nothing(model, when):
    p, d = pair(model)
    prompt = tokens(60)
    params = rig.prefill(p, "p", prompt)
    request = d.add("r", prompt, params)
    d.hold_loads = True
    if when == "loading":
        d.step(p)
        assert d.tables()["recvs"] == 1
    d.scheduler.finish_requests(request.request_id, rig.RequestStatus.FINISHED_ABORTED)
    d.step(p)
    assert not any(d.tables().values())
    assert not any(k.startswith("loads") for k in d.stats)


def test_an_aborted_producer_sends_nothing(model):
    p, _ = pair(model)
    p.add("p", tokens(300), dict(do_remote_decode=True))
    p.step()
    p.step()
    p.scheduler.finish_requests("p", rig.RequestStatus.FINISHED_ABORTED)
    p.step()
    assert not any(p.tables().values())


def test_loads_known_bad_are_not_compared(model):
    p, d = pair(model, None, MODES["recompute"])
    prompt = tokens(60)
    d.add("r", prompt, rig.prefill(p, "p", prompt))
    d.hold_loads = True
    d.step(p)
    output = d.scheduler.schedule()
    failed = rig.KVConnectorOutput(finished_recving={"r"}, failed_recving={"r"})
    d.finish_step(output, d.runner_output(output, failed))
    assert not any(k.startswith("loads") for k in d.stats)
    assert d.tables()["recvs"] == 0


def test_outputs_of_steps_that_scheduled_nothing(model):
    _, d = pair(model)
    output = rig.SchedulerOutput.make_empty()
    d.finish_step(output, d.runner_output(output, None))
    d.finish_step(output, d.runner_output(output, rig.KVConnectorOutput()))


def test_bidirectional_loads_are_neither_verified_nor_counted(model):
    _, d = pair(model)
    request = d.add(
        "r", tokens(20), dict(do_remote_decode=True, remote_block_ids=[[1]])
    )
    assert d.scheduler.connector.kv_checksum_carrier(request, True) is None


def test_another_connector_is_refused(model, log):
    settings = dict(
        kv_connector="ExampleConnector",
        kv_connector_extra_config={"shared_storage_path": "unused"},
    )
    d = rig.Instance(model, "kv_both", **settings)
    assert d.scheduler.kv_checksum is None
    (line,) = [x for x in log if x.startswith("WARNING KV checksums are off")]
    assert "ExampleConnector" in line and "enable_kv_checksum" in line
    with pytest.raises(
        ValueError, match="(?s)kv_checksum_fail_closed.*ExampleConnector"
    ):
        rig.Instance(model, "kv_both", **settings, kv_checksum_fail_closed=True)


def test_off_means_none(model):
    d = rig.Instance(model, "kv_consumer", enable_kv_checksum=False)
    assert d.scheduler.kv_checksum is None
    output = d.scheduler.schedule()
    assert output.kv_checksum_scheduled is None
