# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Move KV and payloads between instances that share a process.

`FAKES` stand in for the workers of a connector: they copy KV token by token, by the
block ids that the real scheduler side chose, for any TP, PP and block size. Payloads
pass through the feature's real code for that connector. There is one module per
connector. One whose part of the feature is not installed is left out, so every patch
of the series can bring its own.
"""

from importlib import import_module
from pkgutil import iter_modules

from vllm.distributed.kv_transfer import kv_checksum

from .base import FakeTransport, copy_tokens, scheduler_tables
from .nixl_pull import FakeNixlPull

__all__ = ["FAKES", "FakeTransport", "copy_tokens", "scheduler_tables"]


def _find_fakes() -> dict[str, type[FakeTransport]]:
    """Return the stand-ins of the connectors that the feature covers here, by name."""
    connectors = f"{kv_checksum.__name__}.connectors"
    for module in iter_modules(__path__):
        try:
            import_module(f"{__name__}.{module.name}")
        except ModuleNotFoundError as error:
            if not (error.name or "").startswith(connectors):
                raise
    others = (f for f in FakeTransport.__subclasses__() if f is not FakeNixlPull)
    return {fake.name: fake for fake in (FakeNixlPull, *others)}


FAKES = _find_fakes()
"""By name; "pull", which every instance uses unless told otherwise, comes first."""
