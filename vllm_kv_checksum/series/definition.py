"""Define KV checksums, read cache layouts, and sum blocks.

A block's checksum is a sum of terms that any split over ranks and layers leaves
unchanged. The kernels (Triton, numba, PyTorch) return identical values; how caches are
read depends on the attention backend, and what was not seen written by vLLM's own code is
not covered. Nothing calls any of this yet.
"""

from ..edits import Module

MODULES: list[Module] = []
