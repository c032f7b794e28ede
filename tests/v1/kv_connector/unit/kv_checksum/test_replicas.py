# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test copies of the same KV on several TP ranks of P that are not bit-identical."""

import pytest
import torch
from campaign.instances import Mla

from vllm.distributed.kv_transfer.kv_checksum import payload as wire

from .rig import instances as rig
from .rig import tier
from .rig.instances import load


class OwnCopies(Mla):
    """Instances whose ranks' copies differ: all but rank 0's have one other bit.

    D's rank ``k`` loads the copy of P's rank ``k``, or its `source`.
    """

    source = None

    def _copy(self, block_ids):
        for (n, rank), copy in self.copies.items():
            if rank:
                copy[block_ids] = self.kv[n][block_ids]
                bits = copy.view(torch.int16)
                bits[block_ids, 0, 5, 7] ^= rank if n == 1 else 0

    def copy_states(self, producer, ours, theirs):
        for (n, rank), copy in self.copies.items():
            source = rank if self.source is None else self.source
            first = len(theirs[0]) - len(ours[0])
            copy[ours[0]] = producer.copies[n, source][theirs[0][first:]]


def copies_pair(model, p_tp, d_tp, transport, **settings):
    make = OwnCopies
    return (
        make(model, "kv_producer", tp=p_tp, transport=transport),
        make(model, "kv_consumer", tp=d_tp, transport=transport, **settings),
    )


@pytest.mark.parametrize(
    ("p_tp", "d_tp", "source"),
    [(2, 2, None), (2, 1, 1), (2, 1, 0), (4, 4, None), (4, 2, 3), (2, 4, 1)],
)
def test_every_copy_of_the_producer_verifies(model, transport, p_tp, d_tp, source, log):
    settings = dict(kv_checksum_fail_closed=True, policy="fail")
    p, d = copies_pair(model, p_tp, d_tp, transport, **settings)
    d.source = source
    for i in range(3):
        load(p, d, 100, f"r{i}", prompt=rig.tokens(100, i))
    assert d.loads("verified") == 3
    # Blocks of fewer than 6 tokens are alike on all ranks.
    assert p.stats["replicas_differ"] == 3
    (line,) = [x for x in log if "differ between TP ranks" in x]
    assert "KV cache groups [0]" in line


def test_a_copy_that_is_none_of_the_producer_s_is_a_mismatch(model, transport, log):
    p, d = copies_pair(model, 2, 2, transport)

    def damage(req_id, block_ids):
        d.copies[1, 1].view(torch.int16)[block_ids[0][3], 0, 5, 7] ^= 2

    d.loaded = damage
    load(p, d, 100)
    assert d.loads("mismatch") == 1
    (line,) = [x for x in log if "KV checksum mismatch" in x]
    assert "1 of 7 blocks differ, position 3" in line
    assert ", on ranks PP 0 TP 1 here; served as loaded" in line


@pytest.mark.parametrize(("d_tp", "bad"), [(1, 0), (4, 0), (4, 2)])
def test_the_rank_that_holds_a_bad_copy_is_named_where_others_hold_good_ones(
    model, d_tp, bad, log
):
    p, d = copies_pair(model, 1, d_tp, "pull")
    d.source = 0

    def copy_states(producer, ours, theirs):
        for (n, rank), copy in d.copies.items():
            copy[ours[0]] = d.kv[n][ours[0]]
        d.copies[1, bad].view(torch.int16)[ours[0][3], 0, 5, 7] ^= 2

    d.copy_states = copy_states
    load(p, d, 100)
    assert d.loads("mismatch") == 1
    (line,) = [x for x in log if "KV checksum mismatch" in x]
    named = f", on ranks PP 0 TP {bad} here" if d_tp > 1 else ""
    assert line.split("loaded ")[1][16:] == f"{named}; served as loaded"


def test_equal_copies_take_no_room(model, transport, log):
    p = Mla(model, "kv_producer", tp=2, transport=transport)
    d = Mla(model, "kv_consumer", tp=2, transport=transport)
    sent = []
    p.alter = lambda data: sent.append(data) or data
    load(p, d, 100)
    assert d.loads("verified") == 1 and "replicas_differ" not in p.stats
    assert all(wire.decode(data).groups[0].copies is None for data in sent)
    assert not any("differ between TP ranks" in x for x in log)


class Copies(Mla, tier.TierInstance):
    """Every TP rank has its own copy of all KV; the tier keeps the first rank's."""

    own = False

    def _copy(self, block_ids):
        super()._copy(block_ids)
        if self.own:
            for (n, rank), copy in self.copies.items():
                if rank and n == 1:
                    copy[block_ids, 0, 5, 7] += rank

    def load(self, load):
        super().load(load)
        self._copy(load.ids()[0])
        self.damage_copies(load.ids()[0])

    def damage_copies(self, block_ids):
        """Changes the copy of one rank behind the first."""


@pytest.mark.parametrize("is_sync", [False, True])
@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("bad", [False, True])
def test_what_comes_back_is_compared_for_each_rank(model, is_sync, own, bad):
    """By the ledger, also where the ranks' copies are never equal bit for bit."""
    prompt = rig.tokens(200)
    d = Copies(model, tp=2, num_blocks=40, sync=is_sync)
    d.own = own
    d.ask("first", prompt)
    d.evict()

    def damage(block_ids):
        d.copies[2, 1][block_ids[3], 0, 3, 2] += 4

    if bad:
        d.damage_copies = damage
    d.ask("again", prompt)
    assert d.outcome("mismatch" if bad else "verified") == 1
    assert d.stats["blocks_mismatched"] == bad
