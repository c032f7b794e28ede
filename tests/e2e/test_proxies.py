"""Test proxies between P and D: one that forwards everything, one that drops unknown keys, and vllm-router."""

from __future__ import annotations

import pytest
from rig.model import tiny_qwen3
from rig.router import vllm_router
from rig.routing import prefill
from rig.servers import SERVED_NAME, serving

from e2e import pairs

pytestmark = pytest.mark.e2e

MAX_TOKENS = 4

KNOWN_TO_OLD_PROXIES = {
    "do_remote_prefill",
    "do_remote_decode",
    "remote_block_ids",
    "remote_engine_id",
    "remote_request_id",
    "remote_host",
    "remote_port",
    "remote_num_tokens",
    "tp_size",
}


@pytest.fixture(scope="module")
def pair(forks):
    model = tiny_qwen3()
    p = pairs.producer("proxy-p", model, fork_server=forks)
    d = pairs.consumer("proxy-d", model, "fail-open", drill=False, fork_server=forks)
    with serving(p, d):
        yield p, d


def test_vllm_router_forwards_the_payload(pair):
    p, d = pair
    with vllm_router(p, d) as router:
        for n in (40, 400):
            prompt = pairs.prompt_of(n, 700)
            expected = pairs.reference_texts(p, [prompt], MAX_TOKENS)
            before = pairs.loads(d), pairs.external_tokens(d)
            answer = router.post(
                "/v1/completions",
                json={
                    "model": SERVED_NAME,
                    "prompt": prompt,
                    "max_tokens": MAX_TOKENS,
                    "temperature": 0,
                },
            )
            assert [pairs.text_of(answer)] == expected
            after = pairs.loads(d), pairs.external_tokens(d)
            assert after[1] == before[1] + n, "nothing was transferred"
            assert after[0] == {**before[0], "verified": before[0]["verified"] + 1}


def test_a_proxy_that_drops_unknown_keys_is_diagnosed(pair):
    p, d = pair
    before = pairs.loads(d)
    assert "KV checksums not verified" not in d.log_text()
    for seed in (1, 2):
        prompt = pairs.prompt_of(150, 710 + seed)
        expected = pairs.reference_texts(p, [prompt], MAX_TOKENS)
        params = prefill(p, prompt, request_id=f"dropping-{seed}")
        kept = {k: v for k, v in params.items() if k in KNOWN_TO_OLD_PROXIES}
        assert set(params) - set(kept) >= {"kv_checksums"}
        answer = d.completions(prompt, MAX_TOKENS, kept)
        assert [pairs.text_of(answer)] == expected
    after = pairs.loads(d)
    assert after == {**before, "unverified": before["unverified"] + 2}
    line = "KV checksums not verified: no_payload"
    assert d.log_text().count(line) == 1, "the reason is said once"
