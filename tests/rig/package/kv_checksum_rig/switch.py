"""Switch checksums off in a running server and on again: a benchmark compares both in the same processes.

Off is what it is for who does not want them: every attribute that vLLM asks ``is None`` is None. The server must be idle,
and only loads over NIXL pull are known to go on as before.
"""

from __future__ import annotations

import weakref
from typing import Any

from kv_checksum_rig.instances import remember

HOLDERS = {
    "kv_checksum": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "kv_checksum_worker": ("vllm.v1.worker.gpu.kv_connector", "ActiveKVConnector"),
    "kv_checksum_ledger": ("vllm.v1.core.block_pool", "BlockPool"),
}
"""By attribute, the class whose instances hold it."""

_instances: dict[str, list[weakref.ref[Any]]] = {name: [] for name in HOLDERS}
_taken: list[tuple[Any, str, Any]] = []


def remember_holders() -> None:
    """Note what can be switched, from now on."""
    for name, (module, cls) in HOLDERS.items():
        remember(module, cls, _instances[name])


def off() -> dict[str, int]:
    """Take the feature's objects away; return how many are away, by attribute."""
    for name, found in _instances.items():
        for reference in found:
            holder = reference()
            if getattr(holder, name, None) is not None:
                _taken.append((holder, name, getattr(holder, name)))
                setattr(holder, name, None)
    return {name: sum(name == taken for _, taken, _ in _taken) for name in HOLDERS}


def on() -> dict[str, int]:
    """Give back what ``off`` took; return how many are there, by attribute."""
    while _taken:
        setattr(*_taken.pop())
    return {
        name: sum(getattr(reference(), name, None) is not None for reference in found)
        for name, found in _instances.items()
    }
