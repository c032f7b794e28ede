"""Switch checksums off in a running server and on again: a benchmark compares both in the same processes.

With ``KV_CHECKSUM_RIG_SWITCH`` in the environment, every process that holds something to switch listens at ``address``. Off is
what it is for who does not want checksums: each attribute that vLLM asks ``is None`` is None. The server must be idle, and only
loads over NIXL pull are known to go on as before.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from multiprocessing.connection import Listener
from typing import Any

from kv_checksum_rig.instances import remember

VARIABLE = "KV_CHECKSUM_RIG_SWITCH"

HOLDERS = {
    "kv_checksum": ("vllm.v1.core.sched.scheduler", "Scheduler"),
    "kv_checksum_worker": ("vllm.v1.worker.gpu.kv_connector", "ActiveKVConnector"),
    "kv_checksum_ledger": ("vllm.v1.core.block_pool", "BlockPool"),
}
"""By attribute, the class whose instances hold it."""

_instances: dict[str, list[weakref.ref[Any]]] = {name: [] for name in HOLDERS}
_listening: set[int] = set()
_taken: list[tuple[Any, str, Any]] = []


def apply() -> None:
    """Listen in this process and those that are forked from it, if the environment asks for it."""
    if VARIABLE not in os.environ or os.getpid() in _listening:
        return
    for name, (module, cls) in HOLDERS.items():
        remember(module, cls, _instances[name])
    os.register_at_fork(after_in_child=_listen_in_background)
    _listen_in_background()


def address(pid: int) -> str:
    """Return the abstract socket at which a process listens."""
    return f"\0kv_checksum_rig_switch-{pid}"


def _listen_in_background() -> None:
    _listening.add(os.getpid())
    name = "kv-checksum-rig-switch"
    threading.Thread(target=_listen, name=name, daemon=True).start()


def _listen() -> None:
    """Do what one client after the other asks for, until it leaves."""
    with Listener(address(os.getpid())) as listener:
        while True:
            with listener.accept() as asked, contextlib.suppress(EOFError):
                while True:
                    asked.send(on() if asked.recv() else off())


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
