"""Test that loads which nobody can check are counted as such, beside the verified ones.

The servers are forked from one process that imported vLLM (rig only). Blocks are
offloaded by copies on the CPU, the connectors outside vLLM's tree are the rig's own.
"""

from __future__ import annotations

import pytest
from kv_checksum.rig.versions import needs
from rig import verdicts
from rig.servers import NIXL, Server, serving

from e2e import pairs

pytestmark = pytest.mark.e2e

MAX_TOKENS = 4

NO_LEDGER = {"kv_checksum_ledger_blocks": 0}

DEV = {"VLLM_SERVER_DEV_MODE": "1"}
"""Lets a server forget its prefix cache."""


@pytest.fixture(scope="module")
def p(common):
    with serving(server := pairs.producer("unchecked-p", **common)):
        yield server


def forget(server):
    """Empty the server's own prefix cache; blocks that are being stored hold it for a moment."""
    pairs.wait(
        lambda: server.post("/reset_prefix_cache").json()["success"], "an empty cache"
    )


def grown(server, before):
    """Return the loads that were counted since, by verdict and carrier."""
    after = verdicts.settled(server)
    judged = {k: n - before.judged.get(k, 0) for k, n in after.judged.items()}
    assert after.started - before.started == sum(judged.values())
    return {k: n for k, n in judged.items() if n}


def offloading_beside_nixl(name, common, **options):
    """Return a decode instance that also offloads to host memory."""
    spec = {
        "spec_name": "HostOffloading",
        "spec_module_path": "kv_checksum_rig.offloading",
        "cpu_bytes_to_use": 32 << 20,
        **options,
    }
    children = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_consumer", **NIXL},
        {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": spec,
        },
    ]
    return Server(
        name,
        "kv_both",
        connector="MultiConnector",
        transfer={
            "enable_kv_checksum": True,
            **NO_LEDGER,
            "kv_connector_extra_config": {"connectors": children},
        },
        env=DEV,
        **common,
    )


@pytest.mark.parametrize(
    ("reason", "options"),
    [
        ("no_carrier", {}),
        pytest.param(
            "sync_load",
            {"sync_load_budget_bytes": 64 << 20},
            marks=needs("0.33.0", "offloaded loads in the step"),
        ),
    ],
)
def test_offloaded_loads_beside_verified_ones(reason, options, p, common):
    d = offloading_beside_nixl(f"unchecked-{reason}", common, **options)
    with serving(d):
        log = d.log_text()
        assert "KV checksums are on" in log and "fail-open" in log
        (line,) = [x for x in log.splitlines() if "do not cover a connector" in x]
        assert "OffloadingConnector neither carries nor stores KV checksums" in line
        for seed in (1, 2):
            prompt = pairs.prompt_of(200, 900 + seed)
            (expected,) = pairs.reference_texts(p, [prompt], MAX_TOKENS)
            asked = pairs.ask(p, d, prompt, MAX_TOKENS)
            assert asked.counted == {"verified": 1}
            assert pairs.text_of(asked.answer) == expected
            forget(d)
            before, external = verdicts.settled(d), pairs.external_tokens(d)
            assert pairs.text_of(d.completions(prompt, MAX_TOKENS)) == expected
            assert pairs.external_tokens(d) - external == 192, "nothing was loaded"
            assert grown(d, before) == {("unverified", verdicts.NOT_SUMMED): 1}
            assert pairs.unverified(d, reason) == seed
        assert pairs.loads(d) == {"verified": 2, "mismatch": 0, "unverified": 2}


@pytest.mark.parametrize(
    ("connector", "mode", "text"),
    [
        ("HostStore", "fail-open", "KV checksums are off"),
        ("HostStoreWithCarrier", "fail-open", "KV checksums are on"),
        ("HostStoreWithCarrier", "recompute", "KV checksums are on"),
    ],
)
def test_a_connector_of_ones_own_that_loads_in_the_step(connector, mode, text, common):
    """Fail-closed, what cannot be checked before it is used is computed instead."""
    d = Server(
        f"unchecked-{connector}-{mode}",
        "kv_both",
        connector=connector,
        transfer={
            "enable_kv_checksum": True,
            **NO_LEDGER,
            **pairs.MODES[mode],
            "kv_connector_module_path": "kv_checksum_rig.host_store",
        },
        env=DEV,
        **common,
    )
    with serving(d):
        assert text in d.log_text()
        prompt = pairs.prompt_of(200, 910)
        expected = pairs.text_of(d.completions(prompt, MAX_TOKENS))
        forget(d)
        before = verdicts.settled(d)
        assert pairs.text_of(d.completions(prompt, MAX_TOKENS)) == expected
        loaded = 192 if mode == "fail-open" else 0
        assert pairs.external_tokens(d) == loaded
        assert grown(d, before) == {("unverified", verdicts.NOT_SUMMED): 1}
        assert pairs.unverified(d, "sync_load") == 1
        recomputed = d.metric("vllm:kv_checksum_recomputed_total")
        assert recomputed == (mode == "recompute")
    assert d.log_text().count("KV checksums not verified: sync_load") == 1
