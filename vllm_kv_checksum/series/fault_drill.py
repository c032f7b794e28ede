"""Add a connector that damages chosen loads on purpose.

Operators use it to try their alarms before they count. Nothing else depends on it.
"""

from ..edits import Module

MODULES: list[Module] = []
