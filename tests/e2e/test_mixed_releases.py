"""Test two releases of vLLM beside each other, checksums on: they verify each other, also while one replaces the other.

NIXL's handshake refuses peers of another release unless ``enforce_handshake_compat`` is
false on the side that begins it.
"""

from __future__ import annotations

import itertools

import pytest
from rig import older, verdicts
from rig.model import CACHE, tiny_qwen3
from rig.routing import prefill_decode
from rig.servers import Server, fork_server, serving

from e2e import pairs
from e2e.fleet import MAX_TOKENS, PLACES, replaced_under_load

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

OLDER = "0.32.0"
BEGUN = {"enforce_handshake_compat": False}


@pytest.fixture(scope="module")
def origins(forks):
    """Yield how to start a server of each release."""
    env = {"PYTHONPATH": str(older.build(OLDER))}
    with fork_server(CACHE / "logs" / OLDER, env) as older_forks:
        yield {
            "older": {"fork_server": older_forks, "env": env},
            "newer": {"fork_server": forks},
        }


def instance(side, release, origins, carrier="nixl_pull", extra=None, number=""):
    """Return P or D of one release, checksums on and fail-closed on D."""
    transfer = {"enable_kv_checksum": True}
    if extra is not None:
        transfer["kv_connector_extra_config"] = extra
    if side == "d":
        transfer |= pairs.MODES["fail"]
    return Server(
        f"releases-{carrier}-{side}-{release}{number}",
        {"p": "kv_producer", "d": "kv_consumer"}[side],
        model=tiny_qwen3(),
        connector=pairs.CONNECTORS[carrier],
        transfer=transfer,
        **origins[release],
    )


@pytest.mark.parametrize("carrier", pairs.CONNECTORS)
def test_releases_verify_each_other(carrier, origins):
    ps, ds = (
        {x: instance(side, x, origins, carrier, BEGUN) for x in origins}
        for side in "pd"
    )
    with serving(*ps.values(), *ds.values()):
        for seed, (left, right) in enumerate(itertools.product(ps, ds)):
            p, d = ps[left], ds[right]
            prompts = [pairs.prompt_of(150, 8500 + seed)] * 5
            asked, expected = pairs.ask_anew(p, d, prompts, MAX_TOKENS)
            assert pairs.text_of(asked.answer) == expected, (left, right)
            assert asked.counted == {"verified": 1}, (left, right)


@pytest.mark.parametrize(("left", "right"), [("older", "newer"), ("newer", "older")])
def test_the_handshake_refuses_another_release(left, right, origins):
    """Nothing is transferred then, and the load is one that its connector reports as failed."""
    p, d = (
        instance(side, x, origins, number="-strict")
        for side, x in (("p", left), ("d", right))
    )
    with serving(p, d):
        answer = prefill_decode(p, d, pairs.prompt_of(150, 8600), MAX_TOKENS)
        assert answer.status_code == 500
        found = verdicts.settled(d)
        assert (found.started, found.failed) == (1, 1)
    assert "NIXL compatibility hash mismatch" in d.log_text()


def test_an_upgrade_under_load(origins):
    """One server after the other becomes one of the newer release; no request notices, and every load is verified."""
    before, after = (
        {
            (side, n): instance(side, x, origins, extra=BEGUN, number=f"-{n}")
            for side, n in PLACES
        }
        for x in ("older", "newer")
    )
    with replaced_under_load(before, after) as fleet:
        for n in range(2):
            fleet.note_verdicts(after["d", n])
        assert +fleet.judged == {"verified": len(fleet.texts)}
