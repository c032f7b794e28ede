# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test which engines are quarantined, for how long, and what becomes of requests."""

from collections import Counter

import pytest

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_checksum import (
    KVChecksumBlocks,
    KVChecksumCarrier,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler import (
    quarantine as quarantines,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.peers import (
    Peer,
    peer_of_params,
)
from vllm.distributed.kv_transfer.kv_checksum.scheduler.pending import PendingLoad
from vllm.distributed.kv_transfer.kv_checksum.scheduler.quarantine import Quarantine
from vllm.distributed.kv_transfer.kv_checksum.verdict import (
    GroupVerdict,
    LoadVerdict,
    Unverified,
)

from .rig import instances as rig
from .rig.instances import flip_bit, load, pair, prefill, tokens

GAUGE = "quarantined_peers"
CONNECTOR, PARAMS = (
    KVChecksumCarrier.CONNECTOR,
    KVChecksumCarrier.KV_TRANSFER_PARAMS,
)
DIFFERS = LoadVerdict({0: GroupVerdict(0, 9, [3])})
PEER = Peer("e", "h")


class Watched(Quarantine):
    """A quarantine on a clock that the test sets."""

    def __init__(self, threshold=3, from_requests=False):
        self.now = 1000.0
        self.stats = Counter()
        super().__init__(threshold, from_requests, self.stats, lambda: self.now)
        self.requests = iter(range(10**9))

    def fall(self, verdict=DIFFERS, carrier=CONNECTOR, request=None, engine="e"):
        """Let a load from a peer be judged."""
        request = next(self.requests) if request is None else request
        params = dict(remote_engine_id=engine, remote_host="h")
        params["remote_request_id"] = request
        blocks = KVChecksumBlocks(1, {})
        self.note(PendingLoad("r", blocks, carrier=carrier, params=params), verdict)

    def cross(self, engine="e"):
        for _ in range(self._threshold):
            self.fall(engine=engine)
        return self.holds(Peer(engine, "h"))


def test_a_peer_that_crosses_the_threshold_is_quarantined_and_let_go(log):
    quarantine = Watched()
    assert quarantine.stats[GAUGE] == 0
    for _ in range(2):
        quarantine.fall()
        assert not quarantine.holds(PEER)
    quarantine.fall()
    assert quarantine.holds(PEER) and quarantine.stats[GAUGE] == 1
    assert not quarantine.holds(Peer("e", "other"))
    (line,) = [x for x in log if "quarantined" in x]
    assert line.startswith("ERROR KV checksums: remote engine e at h is quarantined: 3")
    quarantine.now += 59
    quarantine.tick()
    assert quarantine.holds(PEER) and quarantine.stats[GAUGE] == 1
    quarantine.now += 1
    assert not quarantine.holds(PEER)
    quarantine.tick()
    assert quarantine.stats[GAUGE] == 0
    (line,) = [x for x in log if "has ended" in x]
    assert line.startswith("WARNING ") and "engine e at h" in line


def test_only_mismatches_within_a_minute_count_together():
    quarantine = Watched()
    for _ in range(100):
        quarantine.fall()
        quarantine.now += 30
        assert not quarantine.holds(PEER)
    quarantine.now -= 10
    quarantine.fall()
    assert quarantine.holds(PEER)


def test_one_remote_request_counts_once():
    quarantine = Watched()
    for _ in range(50):
        quarantine.fall(request="same")
    quarantine.fall(request="other")
    assert not quarantine.holds(PEER)
    for request in ([], {}, 0.5):
        quarantine.fall(request=request)  # none of them names a request
    assert quarantine.holds(PEER), "all of these are one more"


def test_each_quarantine_lasts_twice_as_long_up_to_an_hour():
    quarantine, lengths = Watched(), []
    for _ in range(9):
        assert quarantine.cross()
        began = quarantine.now
        while quarantine.holds(PEER):
            quarantine.now += 1
            quarantine.tick()
        lengths.append(quarantine.now - began)
        quarantine.now += 3599
    assert lengths == [60, 120, 240, 480, 960, 1920, 3600, 3600, 3600]
    quarantine.now += 1
    assert quarantine.cross()
    quarantine.now += 60
    assert not quarantine.holds(PEER), "an hour later all is forgotten"


def test_the_next_quarantine_needs_as_many_mismatches_as_the_first(monkeypatch):
    """Let it end while the window still holds the mismatches that it began with."""
    monkeypatch.setattr(quarantines, "FIRST_S", 20.0)
    quarantine = Watched()
    assert quarantine.cross()
    quarantine.now += 10
    for _ in range(10):
        quarantine.fall()  # had started before
    quarantine.now += 10
    for _ in range(2):
        quarantine.fall()
        assert not quarantine.holds(PEER)
    quarantine.fall()
    assert quarantine.holds(PEER)


OTHER_PROMPT = LoadVerdict({0: GroupVerdict(0, 9, [3])}, other_prompt=True)
UNBOUND = LoadVerdict({0: GroupVerdict(0, 9, [3])}, unbound=True)


@pytest.mark.parametrize("from_requests", [False, True])
@pytest.mark.parametrize("carrier", [*KVChecksumCarrier, None])
def test_only_kv_of_the_right_prompt_that_differs_counts(carrier, from_requests):
    quarantine = Watched(from_requests=from_requests)
    verified = LoadVerdict({0: GroupVerdict(0, 9)})
    unverified = [LoadVerdict(unverified=reason) for reason in Unverified]
    for verdict in (OTHER_PROMPT, UNBOUND, verified, *unverified):
        for _ in range(10):
            quarantine.fall(verdict, carrier)
    assert len(quarantine) == 0
    for _ in range(3):
        quarantine.fall(DIFFERS, carrier)
    by_peer = carrier is CONNECTOR or (carrier is PARAMS and from_requests)
    assert quarantine.holds(PEER) == by_peer


def test_ten_thousand_peers_take_room_for_sixty_four():
    quarantine = Watched()
    assert quarantine.cross()
    for n in range(10_000):
        quarantine.fall(engine=f"invented-{n}")
        assert len(quarantine) <= 64
    assert quarantine.holds(PEER), "those that only count make room first"
    for n in range(100):
        assert quarantine.cross(f"bad-{n}")
        assert len(quarantine) <= 64
    assert quarantine.stats[GAUGE] == 64 and not quarantine.holds(PEER)
    quarantine.now += 60
    quarantine.tick()
    assert quarantine.stats[GAUGE] == 0


# ---- with schedulers


def quarantining(mode, **settings):
    return dict(rig.MODES[mode], kv_checksum_quarantine=2) | settings


def quarantined_pair(model, transport, mode, **settings):
    """Return P, and D that has just quarantined it, with a clock that D goes by."""
    settings["kv_checksum_quarantine_from_requests"] = True
    settings = quarantining(mode, **settings)
    p, d = pair(model, d=settings, transport=transport)
    quarantine, now = d.scheduler.kv_checksum._quarantine, [5000.0]
    quarantine._clock = lambda: now[0]
    d.damage = flip_bit
    for n in range(2):
        assert d.stats.get(GAUGE, 0) == 0
        load(p, d, 100, f"bad-{n}", prompt=tokens(100, n))
    assert d.stats[GAUGE] == 1 and d.loads("mismatch") == 2
    d.damage = lambda *_: None
    d.stats.clear()
    return p, d, now


@pytest.mark.parametrize("mode", ["open", "recompute"])
def test_requests_of_a_quarantined_peer_are_computed_here(model, transport, mode):
    """Fail-open goes by the policy for failed loads, too."""
    p, d, now = quarantined_pair(model, transport, mode, policy="recompute")
    prompt = tokens(100, 7)
    request = d.add("r", prompt, prefill(p, "p-r", prompt), max_tokens=2)
    d.step(p)
    assert request.status == rig.RequestStatus.RUNNING, "computes at once"
    assert d.answer_kv_is_right(request)
    d.run(request, p)
    assert d.stats["loads_started"] == d.stats["recomputed"] == 1
    assert d.stats["loads:unverified:none"] == 1
    assert d.stats["unverified:quarantined"] == 1
    assert "failed" not in d.stats and d.loads("verified") == 0
    now[0] += 60
    load(p, d, 100, "again", prompt=tokens(100, 8))
    assert d.loads("verified") == 1 and d.stats["loads_started"] == 2
    assert d.stats[GAUGE] == 0
    assert not d.scheduler.kv_checksum._admission.declined


def test_requests_of_a_quarantined_peer_end_with_an_error(model, transport):
    p, d, now = quarantined_pair(model, transport, "fail")
    prompt = tokens(100, 7)
    request = d.add("r", prompt, prefill(p, "p-r", prompt), max_tokens=2)
    output = d.run(request, p)
    assert request.status == rig.RequestStatus.FINISHED_ERROR
    assert request.num_output_tokens == 0
    if hasattr(output, "error"):  # since vLLM 0.33.0
        error = output.error.to_exception()
        assert error.reason == "kv_checksum_quarantined"
        assert type(error).__name__ == "RetryableRequestError"
    assert d.stats["loads_started"] == d.stats["failed"] == 1
    assert d.stats["unverified:quarantined"] == 1 and "recomputed" not in d.stats
    now[0] += 60
    load(p, d, 100, "again", prompt=tokens(100, 8))
    assert d.loads("verified") == 1


def test_a_request_that_is_offered_its_load_again_counts_once(model):
    """It waits for blocks, say; the end of the quarantine changes nothing for it."""
    p, d, now = quarantined_pair(model, "push", "recompute")
    prompt = tokens(100, 7)
    request = d.add("r", prompt, prefill(p, "p-r", prompt), max_tokens=2)
    for _ in range(3):
        assert d.scheduler.kv_checksum.admit(request, 0, 100, True) == (0, False)
        now[0] += 45
    d.run(request, p)
    assert d.stats["loads_started"] == d.stats["unverified:quarantined"] == 1


def test_a_pull_tells_p_that_its_blocks_are_free(model):
    """It does so in its ordinary way for a prompt that is found here as a whole."""
    p, d, _ = quarantined_pair(model, "pull", "recompute")
    prompt = tokens(100, 7)
    d.add("r", prompt, prefill(p, "p-r", prompt), max_tokens=2)
    metadata = d.schedule().kv_connector_metadata
    (told,) = metadata.reqs_to_recv.values()
    assert told.remote.request_id and not any(told.local_block_ids)


def test_what_came_in_requests_counts_only_if_the_operator_says_so(
    model, transport, log
):
    p, d = pair(model, d=quarantining("recompute"), transport=transport)
    by_request = d.transport.carrier is PARAMS
    said = [x for x in log if "kv_checksum_quarantine has no effect" in x]
    assert len(said) == by_request
    assert all("kv_checksum_quarantine_from_requests" in x for x in said)
    d.damage = flip_bit
    for n in range(2):
        load(p, d, 100, f"bad-{n}", prompt=tokens(100, n))
    params = prefill(p, "asked", tokens(40, 9))
    held = d.scheduler.kv_checksum._quarantine.holds(peer_of_params(params))
    assert held == (not by_request)
    assert d.loads("mismatch") == 2


def test_it_is_off_by_default(model):
    p, d = pair(model)
    d.damage = flip_bit
    for n in range(12):
        load(p, d, 100, f"bad-{n}", prompt=tokens(100, n))
    assert d.loads("mismatch") == 12 and d.scheduler.kv_checksum._quarantine is None
    assert GAUGE not in d.stats


def test_settings_that_cannot_work_are_refused():
    common = dict(kv_connector="NixlConnector", kv_role="kv_consumer")
    with pytest.raises(ValueError, match="kv_checksum_quarantine needs enable_kv"):
        KVTransferConfig(kv_checksum_quarantine=1, **common)
    common["enable_kv_checksum"] = True
    needs = "from_requests needs kv_checksum_quarantine: set that"
    with pytest.raises(ValueError, match=needs):
        KVTransferConfig(kv_checksum_quarantine_from_requests=True, **common)
    for number in (-1, 10_001):
        with pytest.raises(ValueError, match="kv_checksum_quarantine\n"):
            KVTransferConfig(kv_checksum_quarantine=number, **common)
    assert KVTransferConfig(**common).kv_checksum_quarantine == 0
