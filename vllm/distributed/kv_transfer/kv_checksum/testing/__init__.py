# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tell authors of connectors, in words, what theirs does wrong with KV checksums.

    checks         runs a connector through the suite
    transfers      cases for connectors from producer to consumer
    tiers          cases for connectors that keep KV and load it back
    suite          starts instances, runs requests, collects problems
    diagnosis      tells from what was seen of a load what is wrong
    problems       the names of problems, and what to do
    factory        describes a connector to the suite
    instance       one vLLM instance in this process, watched
    forward        stands in for a model
    configuration  vLLM's configuration of such an instance
    process        process groups, and the end of worker sides

Nothing that serves imports it. `docs/design/connectors.md` explains its use.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "ConnectorFactory": "factory",
    "Fault": "problems",
    "Problem": "problems",
    "assert_conforms": "checks",
    "check_connector": "checks",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
