# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that nothing is loaded for a minute from a server whose KV differed, over real NIXL."""

from __future__ import annotations

import time

import pytest
from rig.model import tiny_qwen3
from rig.routing import prefill_decode
from rig.servers import serving

from e2e import pairs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

MAX_TOKENS = 6
GAUGE = "vllm:kv_checksum_quarantined_peers"


@pytest.mark.parametrize("connector", ["nixl_push", "nixl_pull"])
def test_a_peer_whose_kv_differs_is_left_alone_for_a_minute(forks, connector):
    """Those of NIXL push come from P itself; over NIXL pull the operator lets them count."""
    model, settings = tiny_qwen3(), {"kv_checksum_quarantine": 2}
    if connector == "nixl_pull":
        settings["kv_checksum_quarantine_from_requests"] = True
    common = dict(connector=pairs.CONNECTORS[connector], fork_server=forks)
    p = pairs.producer(f"e2e-quarantine-{connector}-p", model, **common)
    consumers = [
        pairs.consumer(
            f"e2e-quarantine-{connector}-{mode}",
            model,
            mode,
            settings=settings,
            **common,
        )
        for mode in ("recompute", "fail")
    ]
    with serving(p, *consumers):
        seeds = iter(range(900, 1000))

        def ask(d, request_id):
            prompts = pairs.prompts_of(300, next(seeds))
            asked, text = pairs.ask_anew(p, d, prompts, MAX_TOKENS, request_id)
            return asked, asked.counted, text

        for d in consumers:
            assert ask(d, "clean")[1] == {"verified": 1}
            for n in range(2):
                assert d.metric(GAUGE) == 0
                assert ask(d, f"flip-{n}")[1] == {"mismatch": 1}
        began = time.monotonic()
        recomputing, failing = consumers

        asked, counted, text = ask(recomputing, "clean-1")
        assert counted == {"unverified": 1} and not asked.external_tokens
        assert pairs.text_of(asked.answer) == text
        assert pairs.unverified(recomputing, "quarantined") == 1

        prompt = pairs.prompt_of(300, next(seeds))
        error = pairs.error_object_of(prefill_decode(p, failing, prompt, MAX_TOKENS))
        assert error["code"] == 503 and error["reason"] == "kv_checksum_quarantined"
        assert pairs.unverified(failing, "quarantined") == 1

        for d in consumers:
            assert d.metric(GAUGE) == 1
            (line,) = [x for x in d.log_text().splitlines() if "is quarantined" in x]
            assert "remote engine" in line and "2 loads from it differed" in line
        assert time.monotonic() - began < 55, "too slow a machine to tell"
        time.sleep(61 - (time.monotonic() - began))
        for d in consumers:
            asked, counted, text = ask(d, "clean-2")
            assert counted == {"verified": 1}
            assert pairs.text_of(asked.answer) == text
            assert d.metric(GAUGE) == 0
