"""Real servers with LMCache, whose loads are synchronous and whose chunks are larger than blocks.

Rig only: forked, and LMCache, which has no copy engine for CPUs, gets the rig's. Chunks lie in its own host memory and are
damaged there.
"""

from __future__ import annotations

import pytest
from rig import lmcache, tampering
from rig.servers import serving

from e2e import pairs, reloads
from e2e.reloads import BLOCK, LOADED

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.skipif(bool(lmcache.why_missing()), reason=str(lmcache.why_missing())),
]

WHOLE = {"whole_chunk": True, "block": 2}
DAMAGE = {
    "bit_flip": {"block": 3, "layer": 1, "byte": 777, "bit": 3},
    "other_prefix": WHOLE,
    "stale": WHOLE,
    "swapped": WHOLE,
    "half_written": {"block": 5},
}
"""Damage to chunks of two blocks, and to single blocks of them."""


def server_of(mode, common):
    return reloads.instance(
        f"lmcache-{mode}",
        "LMCacheConnectorV1",
        mode=mode,
        transfer=lmcache.TRANSFER,
        env=lmcache.ENVIRONMENT,
        **common,
    )


@pytest.fixture(scope="module")
def served(common):
    """A fail-open server."""
    with serving(server := server_of("fail-open", common)):
        reloads.computed(server)
        yield server


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_chunk_is_a_mismatch(kind, served):
    known, answer, report = reloads.damaged(served, kind, DAMAGE[kind])
    assert known.differing(served, answer) == {0: report["positions"]}
    assert answer.judged == {("mismatch", "ledger"): 1}


def test_a_local_hit_that_ends_inside_a_chunk(served):
    """LMCache copies whole chunks, and writes the hit's last block anew."""
    known = reloads.computed(served)
    reloads.evict(served)
    # One whole chunk is loaded, and the third block computed.
    first = reloads.ask(served, known.prompt[: 3 * BLOCK + 1])
    assert first.external == lmcache.CHUNK
    answer = reloads.ask(served, known.prompt)
    assert (answer.local, answer.external) == (3 * BLOCK, LOADED - 3 * BLOCK)
    assert answer.text == known.text
    assert first.judged == answer.judged == {("verified", "ledger"): 1}


def test_a_prompt_that_is_loaded_whole(served):
    """The last token is computed again, and written into a block that was loaded."""
    prompt = reloads.computed(served).prompt[:LOADED]
    answers = [reloads.load_again(served, prompt) for _ in range(2)]
    assert [answer.external for answer in answers] == [LOADED - 1] * 2
    assert answers[0].text == answers[1].text
    for answer in answers:
        assert answer.judged == {("verified", "ledger"): 1}


@pytest.mark.parametrize("mode", ["fail", "recompute"])
def test_no_answer_rests_on_a_damaged_chunk(mode, common):
    with serving(server := server_of(mode, common)):
        reloads.computed(server)
        for kind in ("bit_flip", "other_prefix", "swapped"):
            known = reloads.computed(server)
            with tampering.damaged_load(server, kind, **DAMAGE[kind]):
                answer = reloads.load_again(server, known.prompt)
            assert answer.judged == {("mismatch", "ledger"): 1}
            if mode == "fail":
                pairs.assert_failed(answer.response)
            else:
                assert answer.text == known.text
            again = reloads.load_again(server, known.prompt)
            assert again.text == known.text
            assert ("mismatch", "ledger") not in again.judged
