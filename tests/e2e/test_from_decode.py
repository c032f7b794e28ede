"""Test two turns of a chat between real servers: P loads what D decoded, and verifies it.

NIXL pull's bidirectional transfer. The servers are forked from one process that imported vLLM (rig only). P's connector
damages the loads that the fault drill is told to, so what is flipped on the way back must be found.
"""

from __future__ import annotations

import pytest
from rig import verdicts
from rig.routing import prefill
from rig.servers import Server, serving

from e2e import pairs

pytestmark = pytest.mark.e2e

MAX_TOKENS = 4

LENGTH, DECODED = 150, 20

BOTH = {"bidirectional_kv_xfer": True, "kv_recompute_threshold": 0}


@pytest.fixture(scope="module")
def servers(common):
    drill = {
        "damage_kv_on_purpose": True,
        "connector": pairs.CONNECTORS["nixl_pull"],
        "faults": {"flip-": "bit_flip"},
    }
    p = Server(
        "from-decode-p",
        "kv_producer",
        transfer={
            "enable_kv_checksum": True,
            **pairs.MODES["recompute"],
            "kv_connector": "KVChecksumFaultDrill",
            "kv_connector_module_path": pairs.DRILL,
            "kv_connector_extra_config": {**BOTH, "kv_checksum_fault_drill": drill},
        },
        **common,
    )
    d = Server(
        "from-decode-d",
        "kv_consumer",
        transfer={"enable_kv_checksum": True, "kv_connector_extra_config": BOTH},
        **common,
    )
    with serving(p, d):
        yield p, d


def decode(d, prompt, params=None, **options):
    """Return the tokens that D decodes, and the parameters of its answer."""
    options = {"return_token_ids": True, "ignore_eos": True, **options}
    answer = d.completions(prompt, DECODED, params, **options).json()
    return answer["choices"][0]["token_ids"], answer.get("kv_transfer_params")


@pytest.mark.parametrize(
    ("name", "verdict"),
    [("turns", "verified"), ("stopped", "verified"), ("flip-turns", "mismatch")],
)
def test_what_d_decoded_is_verified_in_the_next_turn(servers, name, verdict):
    p, d = servers
    prompt, options, number = pairs.prompt_of(LENGTH, 920 + len(name)), {}, DECODED
    if name == "stopped":
        # The tokens are the same again, from D's prefix cache in part.
        tokens, _ = decode(d, prompt)
        number = next(
            n for n in range(6, DECODED) if tokens[n - 1] not in tokens[: n - 1]
        )
        options["stop_token_ids"] = [tokens[number - 1]]
    first_id = f"first-{name}-turn"
    params = prefill(p, prompt, request_id=first_id)
    decoded, params = decode(d, prompt, params, request_id=first_id, **options)
    assert len(decoded) == number
    second = [*prompt, *decoded, *pairs.prompt_of(60, 921)]
    assert params["remote_num_tokens"] - LENGTH - number in (-1, 0)
    before, was = verdicts.settled(p), pairs.loads(d)["verified"]
    external = pairs.external_tokens(p)
    turn = p.completions(second, 1, params, request_id=f"{name}-turn").json()
    after = verdicts.settled(p)
    assert after.started - before.started == 1
    grown = {k: n - before.judged.get(k, 0) for k, n in after.judged.items()}
    assert {k: n for k, n in grown.items() if n} == {(verdict, "kv_transfer_params"): 1}
    assert pairs.external_tokens(p) > external, "P loaded nothing of D"
    asked = {"request_id": f"last-{name}-turn"}
    answer = d.completions(second, MAX_TOKENS, turn["kv_transfer_params"], **asked)
    assert [pairs.text_of(answer)] == pairs.reference_texts(p, [second], MAX_TOKENS)
    assert pairs.loads(d)["verified"] == was + 1
    lines = p.log_text().splitlines()
    said = [x for x in lines if "KV checksum mismatch" in x and f"{name}-turn" in x]
    assert len(said) == (verdict == "mismatch")
