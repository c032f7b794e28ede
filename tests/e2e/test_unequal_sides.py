"""Test P and D of unequal TP and PP, and a D that holds a prefix, over push and Mooncake (pull: test_nixl_pull).

In float32, as bfloat16 rounding alone changes texts between TP sizes. Block sizes: vLLM itself refuses every unequal
pair on CPU but NIXL pull from 32 to 64, which test_nixl_pull has; the real-scheduler tests cover the others.
"""

from __future__ import annotations

import pytest
from rig.model import tiny_qwen3
from rig.servers import serving

from e2e import pairs

pytestmark = pytest.mark.e2e

MAX_TOKENS = 5

SHAPES = {
    "tp2-tp1": ({"tp": 2}, {}),
    "tp1-tp2": ({}, {"tp": 2}),
    "pp2-tp1": ({"pp": 2}, {}),
    "tp1-pp2": ({}, {"pp": 2}),
}

CASES = [("nixl_push", shape) for shape in SHAPES if shape != "tp1-pp2"]
"""In push mode vLLM refuses decode instances of several pipeline stages."""
CASES += [("mooncake", shape) for shape in SHAPES]


@pytest.mark.parametrize(("carrier", "shape"), CASES)
def test_unequal_sides_verify_and_damage_is_recomputed(carrier, shape, forks):
    model, name = tiny_qwen3("float32"), f"unequal-{carrier}-{shape}"
    left, right = SHAPES[shape]
    common = {
        "dtype": "float32",
        "fork_server": forks,
        "connector": pairs.CONNECTORS[carrier],
    }
    p = pairs.producer(f"{name}-p", model, **left, **common)
    # Damage on one rank only: every rank's part must count.
    faults = {"flip-": {"kind": "bit_flip", "tp_rank": right.get("tp", 1) - 1}}
    d = pairs.consumer(
        f"{name}-d", model, "recompute", faults=faults, **right, **common
    )
    prompts = [pairs.prompt_of(n, 800) for n in (5, 64, 300)]
    prompts += [pairs.shared_prefix(n) for n in (352, 400)]
    with serving(p, d):
        expected = pairs.reference_texts(p, prompts, MAX_TOKENS)
        hits = gave_up = 0
        for prompt, text in zip(prompts, expected, strict=True):
            asked = pairs.ask(p, d, prompt, MAX_TOKENS)
            assert pairs.text_of(asked.answer) == text
            hits += asked.local_tokens
            if asked.gave_up:
                gave_up += 1
                continue
            assert asked.counted == {"verified": 1}
            assert asked.external_tokens == len(prompt) - asked.local_tokens
        assert gave_up < len(prompts), "no load was judged"
        assert hits >= 320, "the shared prefix gave no local hits"

        asked, text = pairs.ask_anew(
            p, d, pairs.prompts_of(300, 810), MAX_TOKENS, "flip-0"
        )
        assert pairs.text_of(asked.answer) == text
        assert asked.counted == {"mismatch": 1}
        assert "KV CHECKSUM FAULT DRILL: bit_flip" in d.log_text()
        assert pairs.loads(d) == {
            "verified": 5 - gave_up,
            "mismatch": 1,
            "unverified": 0,
        }
