"""Test model families beyond plain attention, between real servers over NIXL pull.

Each is loaded clean under fail-closed, then with damage in its attention KV and, for
hybrids, in its state. Hybrids at unequal TP: test_hybrids_at_unequal_tp.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from rig.families import tiny
from rig.routing import prefill_decode
from rig.servers import serving

from e2e import pairs

pytestmark = pytest.mark.e2e

MAX_TOKENS = 8
LENGTHS = (2, 33, 100, 300, 700)

DS_CONV = {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"}
"""NIXL's layout of conv states; vLLM sets it for NIXL by name, not for the drill."""


@dataclass
class Family:
    """A family's settings, and what each of its KV cache groups holds.

    Attributes:
        attention: a group of attention layers.
        state: a group of state layers, or None.
        same_text: whether decode gives what prefill gives on this CPU backend.
        amx: vLLM may use the CPU's matrix unit, which other tests hide from it.

    """

    attention: int
    groups: int
    state: int | None = None
    dtype: str = "bfloat16"
    block_size: int = 32
    args: tuple[str, ...] = ()
    same_text: bool = True
    amx: bool = False

    @property
    def options(self) -> dict[str, Any]:
        env = dict(DS_CONV) if self.state is not None else {}
        if self.amx:
            env["KV_CHECKSUM_RIG_AMX"] = "1"
        return {
            "dtype": self.dtype,
            "block_size": self.block_size,
            "args": self.args,
            "env": env,
        }

    @property
    def faults(self) -> dict[str, dict[str, Any]]:
        """Return faults by request id prefix: one bit each, and a state that never arrived."""
        faults = {"attention-": {"kind": "bit_flip", "group": self.attention}}
        if self.state is not None:
            faults["state-"] = {"kind": "bit_flip", "group": self.state}
            faults["lost-state-"] = {"kind": "zero_block", "group": self.state}
        return faults


NO_PREFIX_CACHE = ("--no-enable-prefix-caching",)

FAMILIES = {
    "gemma3": Family(attention=0, groups=3),
    "granite4_h": Family(
        2,
        3,
        state=1,
        dtype="float32" if pairs.MAMBA_IN_FLOAT32 else "bfloat16",
        args=NO_PREFIX_CACHE,
        same_text=pairs.MAMBA_IN_FLOAT32,
    ),
    # vLLM's CPU kernel takes bf16 alone, whose rounding changes the text.
    "qwen3_next": Family(3, 4, state=0, same_text=False),
    "deepseek_v2": Family(0, 1, block_size=16, args=NO_PREFIX_CACHE, same_text=False),
}

ON_AMX = {
    "gemma3": replace(FAMILIES["gemma3"], amx=True, same_text=False),
    "deepseek_v2": replace(FAMILIES["deepseek_v2"], amx=True, block_size=32),
}
"""Keys and values in tiles of bf16, and AMX's own backend of latents."""


def pair(forks, name, mode="fail", family=None, faults=None):
    """Return a producer and a drilled consumer."""
    family = family or FAMILIES[name]
    folder = tiny(name, family.dtype)
    label = f"e2e-{name}-{mode}"
    common = {"fork_server": forks, **family.options}
    p = pairs.producer(f"{label}-p", folder, **common)
    d = pairs.consumer(
        f"{label}-d", folder, mode, faults=faults or family.faults, **common
    )
    return p, d


def check_clean_loads(p, d, family, lengths):
    prompts = [pairs.prompt_of(n, 21) for n in lengths]
    answers = [prefill_decode(p, d, x, MAX_TOKENS) for x in prompts]
    texts = [pairs.text_of(a) for a in answers]
    if family.same_text:
        assert texts == pairs.reference_texts(p, prompts, MAX_TOKENS)
    assert pairs.loads(d) == {
        "verified": len(prompts),
        "mismatch": 0,
        "unverified": 0,
    }
    compared = d.metric("vllm:kv_checksum_blocks_compared_total")
    assert compared >= len(prompts) * family.groups


def check_damage_is_seen(p, d, family):
    for i, (prefix, fault) in enumerate(family.faults.items()):
        prompt = pairs.prompt_of(150, 30 + i)
        request_id = f"{prefix}{i}"
        answer = prefill_decode(p, d, prompt, MAX_TOKENS, request_id=request_id)
        assert answer.status_code == pairs.FAILED_STATUS
        assert pairs.loads(d)["mismatch"] == i + 1
        (line,) = [
            x
            for x in d.log_text().splitlines()
            if "KV checksum mismatch" in x and request_id in x
        ]
        assert f", group {fault['group']}: 1 of " in line
        assert line.count(" blocks differ") == 1
    before = pairs.loads(d)["verified"]
    pairs.text_of(prefill_decode(p, d, pairs.prompt_of(150, 29), MAX_TOKENS))
    assert pairs.loads(d)["verified"] == before + 1


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(n, marks=pairs.needs_conv_states if f.state is not None else ())
        for n, f in FAMILIES.items()
    ],
)
def test_a_family(forks, name):
    check_family(FAMILIES[name], *pair(forks, name))


@pytest.mark.skipif(
    not torch.cpu.get_capabilities().get("amx_tile"), reason="the CPU has no AMX"
)
@pytest.mark.parametrize("name", ON_AMX)
def test_a_family_on_a_cpu_with_amx(forks, name):
    family = ON_AMX[name]
    check_family(family, *pair(forks, name, mode="fail", family=family))


def check_family(family, p, d):
    with serving(p, d):
        check_clean_loads(p, d, family, LENGTHS)
        check_damage_is_seen(p, d, family)
        (covered,) = [x for x in d.log_text().splitlines() if "checksums cover" in x]
        assert covered.count("Spec, ") == family.groups
        assert "KV checksums do not cover" not in d.log_text()


def test_later_requests_do_not_answer_from_a_damaged_window(forks):
    """Damage each group in turn: after damage was served, no other group may be found either."""
    family = replace(FAMILIES["gemma3"], dtype="float32")
    fault = {"kind": "zero_block", "blocks": 4}
    faults = {f"group{g}-": {**fault, "group": g} for g in range(family.groups)}
    p, d = pair(forks, "gemma3", mode="fail-open", family=family, faults=faults)
    with serving(p, d):
        for seed, prefix in enumerate(faults):
            pairs.assert_followers_are_right(p, d, prefix, 80 + 2 * seed, MAX_TOKENS)
