"""Fix models' specs that checksums depend on.

MiniMax-M3's indexer keeps one index-key vector per token on every TP rank, but its
spec does not say so; without `max_tp_shards` it would count as sharded.
"""

from ..edits import Module

indexer = Module("models/minimax_m3/common/indexer.py")
with indexer.function("MiniMaxM3IndexerCache.get_kv_cache_spec", since="0.31.0") as f:
    f.keyword("MLAAttentionSpec", "max_tp_shards=1")

MODULES = [indexer]
