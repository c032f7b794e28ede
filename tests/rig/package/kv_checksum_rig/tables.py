"""Tell how much a running server holds for checksums, so that a test can see that nothing grows.

With ``KV_CHECKSUM_RIG_TABLES=FOLDER`` in the environment, a thread of every process answers each file
``FOLDER/ask-N`` with ``FOLDER/N-PID.json``: the length of every container of the feature's long-lived objects and of
what it adds to connectors, and the number of living per-request objects by class. Nothing is changed or kept alive.
"""

from __future__ import annotations

import collections
import gc
import json
import os
import queue
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from kv_checksum_rig.instances import remember

VARIABLE = "KV_CHECKSUM_RIG_TABLES"
FEATURE = "vllm.distributed.kv_transfer.kv_checksum"
ROOTS = {
    f"{FEATURE}.scheduler": "KVChecksumScheduler",
    f"{FEATURE}.worker": "KVChecksumWorker",
    "vllm.distributed.kv_transfer.kv_connector.v1.base": "KVConnectorBase_V1",
}

_roots: list[weakref.ref[Any]] = []
_answering: set[int] = set()


def apply() -> None:
    """Start to answer, if the environment asks for it."""
    if VARIABLE not in os.environ or os.getpid() in _answering:
        return
    for module, name in ROOTS.items():
        remember(module, name, _roots)
    os.register_at_fork(after_in_child=_answer_in_background)
    _answer_in_background()


def _answer_in_background() -> None:
    _answering.add(os.getpid())
    threading.Thread(target=_answer, name="kv-checksum-rig-tables", daemon=True).start()


def _answer() -> None:
    folder, pid = Path(os.environ[VARIABLE]), os.getpid()
    (folder / f"process-{pid}").touch()
    answered: set[str] = set()
    while True:
        for ask in folder.glob("ask-*"):
            if ask.name not in answered:
                answered.add(ask.name)
                scratch = folder / f".{pid}"
                scratch.write_text(json.dumps(sizes()))
                scratch.replace(folder / f"{ask.name.removeprefix('ask-')}-{pid}.json")
        time.sleep(0.1)


def sizes() -> dict[str, int]:
    """Return the lengths of tables and the numbers of living objects, by name."""
    found: dict[str, int] = {}
    for number, root in enumerate(_roots):
        held = root()
        if held is None:
            continue
        path = f"{number}:{type(held).__name__}"
        ours = type(held).__module__.startswith(FEATURE)
        _tables(held, path, found, everything=ours)
        for half in ("connector_scheduler", "connector_worker"):
            if getattr(held, half, None) is not None:
                _tables(getattr(held, half), f"{path}.{half}", found, everything=False)
    gc.collect()
    living = collections.Counter(
        type(x).__name__
        for x in gc.get_objects()
        # Not every class says its module as text.
        if str(getattr(type(x), "__module__", "")).startswith(FEATURE)
    )
    return {**found, **{f"living {name}": count for name, count in living.items()}}


def _tables(held: Any, path: str, found: dict[str, int], everything: bool) -> None:
    """Add the lengths of an object's containers; of vLLM's own objects only what checksums brought."""
    for name, value in list(vars(held).items()):
        if not everything and "checksum" not in name and name != "_orders":
            continue
        if isinstance(value, dict | list | set | collections.deque):
            found[f"{path}.{name}"] = len(value)
        elif isinstance(value, queue.Queue | queue.SimpleQueue):
            found[f"{path}.{name}"] = value.qsize()
        elif type(value).__module__.startswith(FEATURE):
            _tables(value, f"{path}.{name}", found, everything=True)
