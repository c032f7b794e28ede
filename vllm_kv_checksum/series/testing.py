"""Add a suite that tells authors of connectors what theirs does wrong.

It runs a connector through loads of every kind, in one process and on CPUs, with vLLM's
real scheduler and both sides of the connector. Tests of the feature share its stand-ins
for a model and a configuration. Nothing that serves imports it.
"""

from ..edits import Module

MODULES: list[Module] = []
