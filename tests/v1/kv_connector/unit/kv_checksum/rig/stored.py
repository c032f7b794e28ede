# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make ranks whose workers keep a checksum per block, and hashes of blocks to store."""

from . import caches as u

HASHES = [bytes([7 * i + 1] * 8 + [i] * 24) for i in range(6)]


def caches(tp=1, layers=3, heads=2, seed=0, block_size=16):
    spec = u.full_spec(heads * tp, block_size)
    whole = {n: u.random_cache(20, spec, seed=n + seed) for n in range(layers)}
    ranks = [
        {n: c[:, r * heads : (r + 1) * heads] for n, c in whole.items()}
        for r in range(tp)
    ]
    return whole, ranks


def workers_of(ranks, name=lambda n: u.names(n)[0], heads=2):
    made = []
    for rank, kv in enumerate(ranks):
        named = {name(n): c for n, c in kv.items()}
        (size,) = {cache.shape[2] for cache in kv.values()}
        cfg = u.config(20, (list(named), u.full_spec(heads, size)))
        made.append(u.worker(cfg, named, tp_rank=rank, tp_size=len(ranks)))
    return made
