"""Document KV checksums for operators and developers.

The operator's guide, the design and its evidence, alert rules and a dashboard.
"""

from ..edits import Module

MODULES: list[Module] = []
