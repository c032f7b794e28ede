# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test every model family of the design's table, with its caches as vLLM plans them.

Real schedulers of P and D, real checksum workers, the scheduler sides of the real
connector. Groups, backends and placement come from vLLM's own models
(`rig.model_families`); forward and transfer are fake and move whole pages. Beside the
families, there are models with chunked-local attention, static sinks, and drafters
whose KV has a spec of its own or shares the target's (EAGLE-3, MTP, DFlash).
"""

import pytest

from vllm.config import ModelConfig
from vllm.v1.engine import FinishReason

from .rig.instances import load, prefill, tokens
from .rig.model_families import table
from .rig.model_families.configurations import MODELS
from .rig.model_families.instances import FamilyInstance
from .rig.model_families.plans import plans
from .rig.versions import needs

pytestmark = needs("0.33.0", "tables of model families")

LOADED = [name for name, family in MODELS.items() if not family.not_run]
BEHIND_A_BLOCK = 73
"""Tokens of a prompt behind the largest block: 9 in the last of 16, 32 or 64."""


def test_the_table_of_the_design_is_what_the_code_does():
    made = table.table()
    assert table.written() == made, f"rebuild it with: {table.COMMAND}"


def pair(model, name, transport):
    settings = dict(plan=plans()[name], transport=transport)
    return (
        FamilyInstance(model, "kv_producer", **settings),
        FamilyInstance(model, "kv_consumer", **settings),
    )


class Side:
    """A pair of instances of a family, and the blocks that each load brought."""

    def __init__(self, model, name, transport="pull"):
        self.p, self.d = pair(model, name, transport)
        (worker,) = self.d.workers
        self.covered, self.skipped = set(worker.groups), set(worker.skipped)
        self.number = max(s.block_size for s in self.d.first_specs) + BEHIND_A_BLOCK
        self.count = 0

    def load(self, strike=lambda d, blocks: None):
        """Load a prompt; return its blocks and what the load adds to the counters."""
        seen = []

        def struck(d, blocks):
            seen.extend(blocks)
            strike(d, blocks)

        self.d.strike = struck
        self.d.stats.clear()
        self.count += 1
        prompt = tokens(self.number, self.count)
        _, out = load(self.p, self.d, 0, f"r{self.count}", prompt=prompt)
        assert out.finish_reason == FinishReason.LENGTH
        return seen, dict(self.d.stats)

    def is_full(self, block):
        """Return whether all of a block's slots hold tokens that were loaded."""
        d = self.d
        if d.holds_one_block(block.group_id):
            return True
        size = d.first_specs[block.group_id].block_size
        return (block.position + 1) * size <= d.loaded_tokens


@pytest.mark.parametrize("name", LOADED)
def test_loads_verify_and_one_bit_of_any_covered_group_is_a_mismatch(
    model, name, transport, log
):
    side = Side(model, name, transport)
    blocks, stats = side.load()
    assert {b.group_id for b in blocks} == side.covered | side.skipped
    outcome = "verified" if side.covered else "unverified"
    assert side.d.loads(outcome) == 1, stats
    compared = [b for b in blocks if b.group_id in side.covered]
    assert stats.get("blocks_compared", 0) == len(compared)
    layers = [(i, n) for i in sorted(side.covered) for n in side.d.layers_of(i)]
    for group_id, layer in layers:
        struck = []

        def flip(d, blocks, group_id=group_id, layer=layer, struck=struck):
            first = next(
                b for b in blocks if b.group_id == group_id and side.is_full(b)
            )
            struck.append(first)
            assert d.flip(first, side.count % 7 / 7, layer)

        log.clear()
        _, stats = side.load(flip)
        assert side.d.loads("mismatch") == stats["blocks_mismatched"] == 1, layer
        (said,) = (line for line in log if "KV checksum mismatch" in line)
        assert f"group {group_id}: 1 of " in said
        assert f"position {struck[0].position} sent" in said


@pytest.mark.parametrize("name", LOADED)
def test_a_bit_of_what_is_not_covered_changes_nothing(model, name):
    """Slots behind the last token, padding, and groups that are skipped."""
    side = Side(model, name)
    flipped = set()

    def flip(d, blocks):
        for block in blocks:
            if block.group_id in side.skipped:
                flipped.add(block.group_id)
                d.flip(block, 0.3)
                continue
            if d.flip(block, 0, padding=True):
                flipped.add(block.group_id)
            if not side.is_full(block):
                flipped.add(block.group_id)
                d.flip(block, 1)  # of the last slot, in whatever order they lie

    side.load(flip)
    assert flipped
    assert side.d.loads("verified" if side.covered else "unverified") == 1


RINGS = ("deepseek_v41", "qwen4_exp", "glm5next", "step5")


@pytest.mark.parametrize("name", RINGS)
def test_rings_that_a_router_s_token_follows_are_no_false_alarm(model, name, transport):
    """D loads as many tokens as P summed, or one more."""
    side = Side(model, name, transport)
    for number in range(side.number, side.number + 8):
        prompt = tokens(number, number)
        params = prefill(side.p, f"p{number}", prompt)
        request = side.d.add(f"r{number}", [*prompt, 7], params, max_tokens=2)
        side.d.run(request, side.p)
    assert side.d.stats["loads_started"] == 8
    assert side.d.loads("mismatch") == side.d.stats["blocks_mismatched"] == 0
    # Connectors that know P's count, or hold a token back, load what was summed.
    unverified = side.d.loads("unverified")
    assert unverified + side.d.loads("verified") == 8
    assert unverified == side.d.stats.get("unverified:num_tokens", 0)


# ---- what vLLM itself does not run


def test_vllm_refuses_connectors_of_encoder_decoder_models(model, monkeypatch):
    """So cross attention is never loaded, and no block of it needs a sum."""
    monkeypatch.setattr(ModelConfig, "is_encoder_decoder", True)
    message = "Encoder-decoder models are not currently supported with KV connectors"
    with pytest.raises(AssertionError, match=message):
        FamilyInstance(model, "kv_consumer", plan=plans()["whisper"])


def test_vllm_cannot_schedule_static_sinks(model):
    """Its manager of sinks lacks an argument that its coordinator passes."""
    plan = plans()["openpangu (static sinks)"]
    with pytest.raises(TypeError, match="needs_kv_cache_zeroing"):
        FamilyInstance(model, "kv_consumer", plan=plan)
