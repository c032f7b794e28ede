# SPDX-License-Identifier: Apache-2.0
"""Real schedulers of P and D with a group of states beside attention, or alone."""

import zlib

import kv_checksum_instances as rig
import kv_checksum_utils as u
import pytest
import torch
from kv_checksum_states import DTYPES, FAMILIES, local_states, page_of, unsharded
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import MambaSpec

STATE_LAYERS = (8, 9)


class Hybrid(rig.Instance):
    """An instance with a group of state layers behind the token groups.

    Args:
        mode: vLLM's `mamba_cache_mode`; "align" has prefix caching.
        scratch: speculative scratch blocks per request.
        splits: whether the layers tell how TP splits their states.
        tokens: whether there are attention layers at all.
    """

    def __init__(
        self,
        model,
        role,
        *,
        mode="none",
        scratch=0,
        family="mamba2, 1 group",
        splits=True,
        tokens=True,
        **settings,
    ):
        self.mode, self.family, self.splits = mode, FAMILIES[family], splits
        self.scratch, self.tokens = scratch, tokens
        self.state_size = settings.get("block_size", 16) if mode == "align" else 2048
        self.states = {}
        super().__init__(model, role, **settings)

    def make_kv_config(self, groups):
        cache = self.config.cache_config
        cache.mamba_cache_mode = self.mode
        cache.enable_prefix_caching = self.mode == "align"
        if not self.tokens:
            groups, self.layers = [], []
        spec = self.local_spec(None, tp=1)
        self.pages = {
            (n, rank): torch.randint(
                -128, 128, (self.num_blocks, 1, 1, self.page_bytes()), dtype=torch.int8
            )
            for n in STATE_LAYERS
            for rank in range(self.tp)
        }
        return u.config(self.num_blocks, *groups, (u.names(*STATE_LAYERS), spec))

    def page_bytes(self):
        spec = self.local_spec(None)
        return spec.state_content_size_bytes

    def local_spec(self, spec, tp=None):
        if spec is not None and not isinstance(spec, MambaSpec):
            return super().local_spec(spec)
        tp = tp or self.tp
        return MambaSpec(
            block_size=self.state_size,
            shapes=self.family.shapes(tp),
            dtypes=DTYPES,
            mamba_cache_mode=self.mode,
            num_speculative_blocks=self.scratch,
            state_splits=self.family.splits(tp) if self.splits else None,
        )

    def caches_of(self, stage, rank):
        caches = super().caches_of(stage, rank) if self.tokens else {}
        for i, n in enumerate(STATE_LAYERS):
            if i * self.pp // len(STATE_LAYERS) == stage:
                caches[u.names(n)[0]] = self.pages[n, rank]
        return caches

    def put_state(self, block, layer, states):
        self.states[layer, block] = states
        for rank in range(self.tp):
            local = local_states(self.family, states, rank, self.tp)
            page = page_of(*local, mamba_utils.get_conv_state_layout())
            self.pages[layer, rank][block, 0, 0] = torch.frombuffer(
                bytearray(page), dtype=torch.int8
            )

    def running(self, request, tokens):
        """The block vLLM's workers write the state after `tokens` tokens into."""
        rows = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        row = rows[len(self.layers)]
        return row[(tokens - 1) // self.state_size if self.mode == "align" else 0]

    def write(self, request, first, last):
        super().write(request, first, last)
        for n in STATE_LAYERS:
            seed = zlib.crc32(str([n, *request.all_token_ids[:last]]).encode())
            self.put_state(self.running(request, last), n, unsharded(self.family, seed))

    def copy_states(self, producer, ours, theirs):
        """Pair the blocks from the end, as Mooncake does where scratch is sent too."""
        ours, theirs = ([b for b in x[len(self.layers)] if b] for x in (ours, theirs))
        for to, source in zip(ours, theirs[-len(ours) :], strict=True):
            for n in STATE_LAYERS:
                if (n, source) in producer.states:
                    self.put_state(to, n, producer.states[n, source])
                    self.damage_state(to)

    damage_state = staticmethod(lambda block: None)

    def flip_state_bit(self, block):
        self.pages[STATE_LAYERS[1], self.tp - 1][block, 0, 0, -3] ^= 8


@pytest.fixture(autouse=True)
def conv_layout(monkeypatch):
    """NIXL transfers states in this layout alone."""
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")


def pair(model, p=None, d=None, **both):
    return (
        Hybrid(model, "kv_producer", **{**both, **(p or {})}),
        Hybrid(model, "kv_consumer", **{**both, **(d or {})}),
    )


tokens = rig.tokens


def load(*args, **kwargs):
    return rig.load(*args, **kwargs)[1]


SPLITS = [
    ((1, 1), (1, 1)),
    ((2, 1), (1, 1)),
    ((1, 1), (4, 1)),
    ((1, 2), (2, 1)),
    ((4, 1), (2, 2)),
]


@pytest.mark.parametrize(("p_split", "d_split"), SPLITS)
@pytest.mark.parametrize(
    ("mode", "scratch"), [("none", 0), ("none", 2), ("align", 0), ("align", 2)]
)
def test_states_verify_and_a_flipped_bit_is_seen(
    model, transport, p_split, d_split, mode, scratch
):
    p, d = pair(
        model,
        dict(tp=p_split[0], pp=p_split[1]),
        dict(tp=d_split[0], pp=d_split[1], kv_checksum_fail_closed=True),
        mode=mode,
        scratch=scratch,
        transport=transport,
    )
    for number in (2, 16, 17, 100, 300):
        out = load(p, d, number, f"r{number}", prompt=tokens(number, number))
        assert out.finish_reason == FinishReason.LENGTH
        # Connectors leave the prompt's last token to D; one more block is the state.
        compared = -(-(number - 1) // 16) + 1
        assert d.stats.pop("blocks_compared") == compared
    assert d.loads("verified") == 5
    d.damage_state = d.flip_state_bit
    out = load(p, d, 100, "bad", prompt=tokens(100, 7))
    assert out.finish_reason == FinishReason.ERROR
    assert d.stats["blocks_mismatched"] == 1
    assert not any(k.startswith(("unverified", "left_out")) for k in d.stats)


@pytest.mark.parametrize("family", ["mamba1", "gated delta net", "mamba2, 4 groups"])
def test_other_families_verify_at_unequal_tp(model, family):
    p, d = pair(model, dict(tp=2), dict(tp=4), family=family)
    load(p, d, 100)
    assert d.loads("verified") == 1


def test_a_state_of_another_request_is_seen(model):
    p, d = pair(model)
    load(p, d, 90, "other", prompt=tokens(90, 3))
    stale = {k: v for k, v in p.states.items()}

    def swap(block):
        for n in STATE_LAYERS:
            d.put_state(block, n, next(v for (m, _), v in stale.items() if m == n))

    d.damage_state = swap
    load(p, d, 100)
    assert d.stats["blocks_mismatched"] == 1


def test_the_state_is_compared_beside_a_local_prefix_hit(model):
    p, d = pair(model, mode="align")
    prompt = tokens(101)
    load(p, d, 65, "warm", prompt=prompt[:65])
    d.stats.clear()
    load(p, d, 101, prompt=prompt)
    assert d.loads("verified") == 1
    assert d.stats["blocks_compared"] < 7 + 1


def test_cache_modes_may_differ(model):
    p, d = pair(model, dict(mode="align"), dict(mode="none"))
    load(p, d, 100)
    assert d.loads("verified") == 1 and d.stats["blocks_compared"] == 8


@pytest.mark.parametrize("d_tp", [1, 2])
def test_states_without_a_known_split_need_equal_tp(model, d_tp, caplog):
    p, d = pair(model, None, dict(tp=d_tp), splits=False)
    for i in range(2):
        load(p, d, 100, f"r{i}", prompt=tokens(100, i))
    assert d.loads("verified") == 2
    assert d.stats["blocks_compared"] == 2 * (8 if d_tp == 1 else 7)
    left_out = 0 if d_tp == 1 else 2
    assert d.stats.get("left_out:tp_sizes", 0) == left_out
    said = [x for x in caplog.messages if "leave out KV cache group 1: tp_sizes" in x]
    assert len(said) == (left_out > 0)


@pytest.mark.parametrize(("d_tp", "outcome"), [(1, "verified"), (2, "unverified")])
def test_a_model_of_states_alone(model, d_tp, outcome):
    p, d = pair(model, None, dict(tp=d_tp), splits=False, tokens=False)
    load(p, d, 100)
    assert d.loads(outcome) == 1
    if outcome == "unverified":
        assert d.stats["unverified:nothing_in_common"] == 1
