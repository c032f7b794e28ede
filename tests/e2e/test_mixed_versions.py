"""Test a rollout: every pair of {stock vLLM, patched off, patched on} keeps transferring, and only on/on verifies.

Then one server after the other is replaced under load.

Stock is the same vLLM with the series reverted (`rig.stock`), definition 1 the patched one with two lines as they were.
"""

from __future__ import annotations

import itertools

import pytest
from rig.model import CACHE, tiny_qwen3
from rig.servers import HOST, Server, fork_server, serving
from rig.stock import link_patched_vllm, stock_fork_server

from e2e import pairs
from e2e.fleet import MAX_TOKENS, PLACES, replaced_under_load
from vllm_kv_checksum.doctor import PROBLEM, diagnose
from vllm_kv_checksum.series import PATCHES

pytestmark = pytest.mark.e2e

KINDS = ("stock", "off", "on")


@pytest.fixture(scope="module")
def stock():
    forks, env = stock_fork_server()
    with forks:
        yield {"fork_server": forks, "env": env}


DEFINITION_1 = {
    "payload.py": ("PAYLOAD_VERSION = 2\n", "PAYLOAD_VERSION = 1\n"),
    "worker/kernels/numba_kernel.py": (
        "return y ^ ((folded ^ (folded >> _32)) & _LOW32)",
        "return y ^ (y >> _32)",
    ),
}
"""What sums and payloads were with definition 1, by module of the feature."""


@pytest.fixture(scope="module")
def definition_1(tmp_path_factory):
    """Yield how to start a server whose terms end with the first definition's fold."""
    site = tmp_path_factory.mktemp("definition-1")
    link_patched_vllm(site, len(PATCHES))
    for name, (now, then) in DEFINITION_1.items():
        file = site / "vllm/distributed/kv_transfer/kv_checksum" / name
        text = file.read_text()
        assert text.count(now) == 1
        file.unlink()
        file.write_text(text.replace(now, then))
    env = {"PYTHONPATH": str(site)}
    with fork_server(CACHE / "logs" / "definition-1", env) as forks:
        yield {"fork_server": forks, "env": env}


@pytest.mark.slow
@pytest.mark.parametrize("carrier", pairs.CONNECTORS)
def test_another_definition_is_unverified_in_both_directions(
    carrier, forks, definition_1
):
    """Equal definitions verify; of unequal ones no sum is compared, and every load is served."""
    kinds = ("definition_1", "on")
    producers, consumers = (
        {kind: instance(side, kind, carrier, forks, definition_1) for kind in kinds}
        for side in "pd"
    )
    with serving(*producers.values(), *consumers.values()):
        for seed, (left, right) in enumerate(itertools.product(kinds, kinds)):
            p, d = producers[left], consumers[right]
            before = pairs.unverified(d, "payload_version")
            prompt = pairs.prompt_of(150, 700 + seed)
            asked, expected = pairs.ask_anew(p, d, [prompt] * 5, MAX_TOKENS)
            assert pairs.text_of(asked.answer) == expected
            verdict = "verified" if left == right else "unverified"
            assert asked.counted == {verdict: 1}, (left, right)
            differ = pairs.unverified(d, "payload_version") - before
            assert differ == (left != right)


def instance(side: str, kind: str, carrier: str, forks, other, number="") -> Server:
    """Return P or D of one kind; on: fail-open, so that unverified loads are served.

    What is neither on nor off is started as `other` says.
    """
    origin = {"fork_server": forks} if kind in ("on", "off") else other
    return Server(
        f"mixed-{carrier}-{side}-{kind}{number}",
        {"p": "kv_producer", "d": "kv_consumer"}[side],
        model=tiny_qwen3(),
        connector=pairs.CONNECTORS[carrier],
        transfer={"enable_kv_checksum": True} if kind in ("on", "definition_1") else {},
        **origin,
    )


@pytest.mark.parametrize("carrier", pairs.CONNECTORS)
def test_every_pair_transfers_and_only_on_on_verifies(carrier, forks, stock):
    producers, consumers = (
        {kind: instance(side, kind, carrier, forks, stock) for kind in KINDS}
        for side in "pd"
    )
    with serving(*producers.values(), *consumers.values()):
        for seed, (left, right) in enumerate(itertools.product(KINDS, KINDS)):
            p, d = producers[left], consumers[right]
            for length in (40, 150):
                prompt = pairs.prompt_of(length, 600 + seed)
                asked, expected = pairs.ask_anew(p, d, [prompt] * 5, MAX_TOKENS)
                assert pairs.text_of(asked.answer) == expected, (left, right)
                assert asked.external_tokens == length, (left, right)
                verdict = "verified" if left == "on" else "unverified"
                counted = {verdict: 1} if right == "on" else {}
                assert asked.counted == counted, (left, right)
        assert_the_doctor_knows(producers, consumers)
    assert "KV checksums not verified: no_payload" in consumers["on"].log_text()
    for server in (producers["stock"], consumers["stock"]):
        assert "vllm-kv-checksum is installed but not applied" in server.log_text()
        assert "KV checksum" not in server.log_text()


def assert_the_doctor_knows(producers, consumers):
    """Ask the command which of the pairs verify."""
    sides = {
        f"{HOST}:{server.port}": (side, kind)
        for side, servers in (("p", producers), ("d", consumers))
        for kind, server in servers.items()
    }
    told = diagnose(list(sides), timeout=20)
    assert told.status == 1 and len(told.instances) == 6
    (pair,) = told.pairs
    assert sides[pair.producer] == ("p", "on") and sides[pair.consumer] == ("d", "on")
    assert pair.why_not == ()
    found = {sides[f.where]: f for f in told.findings if f.kind == PROBLEM}
    assert found.keys() == {*sides.values()} - {("p", "on")}
    for (_, kind), finding in found.items():
        said = "no_payload" if kind == "on" else "KV checksums are off there"
        assert said in finding.what


@pytest.mark.parametrize(
    ("old", "reason"),
    [
        ("stock", "no_payload"),
        pytest.param("definition_1", "payload_version", marks=pytest.mark.slow),
    ],
)
def test_a_rollout_under_load(old, reason, forks, request):
    """One server after the other is replaced; no request notices, and in the end all is verified."""
    origin = request.getfixturevalue(old)

    def new(place, kind):
        side, number = place
        return instance(side, kind, "nixl_pull", forks, origin, f"-{number}")

    before = {place: new(place, old) for place in PLACES}
    after = {place: new(place, "on") for place in PLACES}
    with replaced_under_load(before, after) as fleet:
        ds = [after["d", 0], after["d", 1]]
        met = [pairs.loads(d) for d in ds]
        assert met[0]["unverified"] > 0, "nothing came from a P of before"
        assert met[0]["unverified"] == pairs.unverified(ds[0], reason)
        assert met[1]["unverified"] == 0, "both Ps were replaced by then"
        last = range(100_000, 100_024)
        for number in last:
            fleet.ask(number)
        now = [pairs.loads(d) for d in ds]
        for was, end in zip(met, now, strict=True):
            assert end == {**was, "verified": was["verified"] + len(last) // 2}
            assert end["mismatch"] == 0
