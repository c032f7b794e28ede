"""Test hybrids of states and attention between sides of unequal TP sizes.

Each pair of servers takes both sides in turn: what is prefilled on two ranks is decoded on
one, and the reverse. Over NIXL, by pull and by push.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from kv_checksum.rig.versions import needs
from rig.families import tiny
from rig.servers import Server, serving

from e2e import pairs

pytestmark = [pytest.mark.e2e, pairs.needs_conv_states]

MAX_TOKENS = 8
LENGTHS = (33, 300)

CARRIERS = ["nixl_pull", "nixl_push"]
DIRECTIONS = [(2, 1), (1, 2)]


@dataclass(frozen=True)
class Hybrid:
    """A hybrid's settings, and what each of its KV cache groups holds.

    Attributes:
        states: the groups of state layers.
        attention: the group of attention layers.
        same_text: whether decode gives what prefill gives at another TP size.

    """

    states: tuple[int, ...]
    attention: int
    dtype: str = "float32"
    args: tuple[str, ...] = ("--no-enable-prefix-caching",)
    same_text: bool = True

    @property
    def faults(self) -> dict[str, dict[str, object]]:
        """Return faults of one bit, by the beginning of the request id."""
        return {
            "state-": {"kind": "bit_flip", "group": self.states[0]},
            "attention-": {"kind": "bit_flip", "group": self.attention},
        }


ROUNDS: dict[str, Any] = {"dtype": "bfloat16", "same_text": False}
"""What a hybrid has of which vLLM's CPU kernels take bf16 alone: its rounding changes the text."""

OF_MAMBA: dict[str, Any] = {} if pairs.MAMBA_IN_FLOAT32 else ROUNDS

HYBRIDS = {
    "granite4_h": Hybrid((0, 1), 2, **OF_MAMBA),
    "granite4_h_8_groups": Hybrid((0, 1), 2, **OF_MAMBA),
    "qwen3_next": Hybrid((0, 1, 2), 3, args=(), **ROUNDS),
}


@dataclass
class Sides:
    """Two servers of one model, by their TP size."""

    hybrid: Hybrid
    carrier: str
    of: dict[int, Server]


def server(forks, name, carrier, tp, mode, role="kv_both"):
    hybrid = HYBRIDS[name]
    return pairs.consumer(
        f"hybrid-{name}-{carrier}-tp{tp}-{mode}",
        tiny(name, hybrid.dtype),
        mode,
        faults=hybrid.faults,
        role=role,
        connector=pairs.CONNECTORS[carrier],
        tp=tp,
        dtype=hybrid.dtype,
        args=hybrid.args,
        # vLLM sets it for NIXL by name, not for the drill.
        env={"VLLM_SSM_CONV_STATE_LAYOUT": "DS"},
        fork_server=forks,
    )


def sides(forks, name, carrier, mode):
    both = {tp: server(forks, name, carrier, tp, mode) for tp in (1, 2)}
    with serving(*both.values()):
        yield Sides(HYBRIDS[name], carrier, both)


@pytest.fixture(scope="module", params=CARRIERS)
def one_group(request, forks):
    yield from sides(forks, "granite4_h", request.param, "recompute")


@pytest.fixture(
    scope="module",
    params=[(n, c) for n in ("granite4_h_8_groups", "qwen3_next") for c in CARRIERS],
    ids="-".join,
)
def split(request, forks):
    yield from sides(forks, *request.param, "fail")


def mismatch_of(d, request_id):
    """Return the one line of D's log that tells of this request's mismatch."""
    (line,) = [
        x
        for x in d.log_text().splitlines()
        if "KV checksum mismatch" in x and request_id in x
    ]
    return line


def assert_the_states_alone_differ(d, request_id, states):
    line = mismatch_of(d, request_id)
    for group in states:
        assert f" group {group}: 1 of 1 blocks differ" in line
    assert line.count("blocks differ") == len(states)


@pytest.mark.parametrize(("p_tp", "d_tp"), DIRECTIONS)
def test_states_that_are_split_over_ranks_are_verified(split, p_tp, d_tp):
    p, d = split.of[p_tp], split.of[d_tp]
    for seed, length in enumerate(LENGTHS):
        prompt = pairs.prompt_of(length, 40 + 10 * p_tp + seed)
        asked = pairs.ask(p, d, prompt, MAX_TOKENS)
        assert asked.counted == {"verified": 1}
        assert asked.external_tokens >= length - 1
        if split.hybrid.same_text:
            expected = pairs.reference_texts(p, [prompt], MAX_TOKENS)
            assert [pairs.text_of(asked.answer)] == expected
    for prefix, fault in split.hybrid.faults.items():
        prompt, request_id = pairs.prompt_of(150, 50 + p_tp), f"{prefix}{p_tp}{d_tp}"
        asked = pairs.ask(p, d, prompt, MAX_TOKENS, request_id)
        assert asked.answer.status_code == pairs.FAILED_STATUS
        assert asked.counted == {"mismatch": 1}
        assert f", group {fault['group']}: 1 of " in mismatch_of(d, request_id)


@pytest.mark.parametrize(("p_tp", "d_tp"), DIRECTIONS)
def test_vllms_own_corruption_of_replicated_b_and_c_is_a_mismatch(
    one_group, p_tp, d_tp
):
    """Nothing is injected: NIXL splits B and C of a single Mamba2 group over TP ranks,
    though every rank holds them whole, and the consumer's states are wrong."""
    p, d = one_group.of[p_tp], one_group.of[d_tp]
    for length in LENGTHS:
        prompt, request_id = pairs.prompt_of(length, 60 + p_tp), f"whole-{p_tp}{length}"
        expected = pairs.reference_texts(p, [prompt], MAX_TOKENS)
        asked = pairs.ask(p, d, prompt, MAX_TOKENS, request_id)
        assert asked.counted == {"mismatch": 1}
        assert_the_states_alone_differ(d, request_id, one_group.hybrid.states)
        if one_group.hybrid.same_text:
            assert [pairs.text_of(asked.answer)] == expected


@needs("0.32.0", "Mamba2 in float32 on CPUs")
def test_served_as_loaded_that_corruption_changes_the_text(forks, one_group):
    """Show what the mismatches are for: fail-open, or without checksums, answers are wrong."""
    p = one_group.of[2]
    name = "granite4_h"
    d = server(forks, name, one_group.carrier, 1, "fail-open", "kv_consumer")
    with serving(d):
        prompts = [pairs.prompt_of(length, 70) for length in LENGTHS]
        asked = [pairs.ask(p, d, prompt, MAX_TOKENS) for prompt in prompts]
        assert [x.counted for x in asked] == [{"mismatch": 1}] * len(prompts)
        expected = pairs.reference_texts(p, prompts, MAX_TOKENS)
        assert [pairs.text_of(x.answer) for x in asked] != expected
