"""Test MultiConnector over NIXL push: its settings reach the sub-connector, whose carrier brings the payload."""

from __future__ import annotations

import pytest
from rig.model import tiny_qwen3
from rig.servers import serving

from e2e import pairs

pytestmark = pytest.mark.e2e

MAX_TOKENS = 4


def inside_multi(server):
    """Make the server's connector the one sub-connector of a MultiConnector."""
    config = server.transfer_config()
    settings = {k: config.pop(k) for k in list(config) if "checksum" in k}
    settings["kv_load_failure_policy"] = config.pop("kv_load_failure_policy", "fail")
    server.connector = "MultiConnector"
    server.transfer = {
        **settings,
        "kv_connector_extra_config": {"connectors": [config]},
    }
    return server


def test_loads_through_a_sub_connector_are_verified(forks):
    common = {"connector": pairs.CONNECTORS["nixl_push"], "fork_server": forks}
    model = tiny_qwen3()
    p = inside_multi(pairs.producer("multi-p", model, **common))
    d = inside_multi(pairs.consumer("multi-d", model, "recompute", **common))
    with serving(p, d):
        for request_id, verdict in (("clean-0", "verified"), ("flip-0", "mismatch")):
            prompt = pairs.prompt_of(200, len(request_id))
            expected = pairs.reference_texts(p, [prompt], MAX_TOKENS)
            asked = pairs.ask(p, d, prompt, MAX_TOKENS, request_id)
            assert [pairs.text_of(asked.answer)] == expected
            assert asked.counted == {verdict: 1}
    assert d.log_text().count("KV checksum mismatch") == 1
