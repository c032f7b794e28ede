"""Compare, in every step of a running server, what is summed with what is loaded, and write down what is loaded.

Done if ``KV_CHECKSUM_RIG_LOADED=1`` is in the environment: a difference is one error line that begins with ``DIFFERS``,
the first load that was compared one line ``COMPARED``. The unit tests' oracle tells what is loaded, from the connectors' own
metadata; every request's blocks are a line of ``loads.jsonl`` in the folder ``KV_CHECKSUM_RIG_TABLES``, whether checksums
are on or not (``rig.tampering.loaded_blocks`` reads them).
"""

from __future__ import annotations

import functools
import json
import logging
import os
from pathlib import Path
from types import ModuleType
from typing import Any

from kv_checksum_rig.on_import import on_import

VARIABLE = "KV_CHECKSUM_RIG_LOADED"
FOLDER = "KV_CHECKSUM_RIG_TABLES"
RECORD = "loads.jsonl"
DIFFERS = "KV CHECKSUM RIG: summed is not loaded"
COMPARED = "KV CHECKSUM RIG: loads are held against their connector's metadata"

# A child of vLLM's logger, so that it stands in the server's log.
logger = logging.getLogger("vllm.kv_checksum_rig")


def apply() -> None:
    """Compare in every step of this process's schedulers, if the environment asks for it."""
    if os.environ.get(VARIABLE) == "1":
        on_import("vllm.v1.core.sched.scheduler", _compare_every_step)


def _compare_every_step(module: ModuleType) -> None:
    from kv_checksum.rig import loaded

    cls: Any = module.Scheduler  # type: ignore[attr-defined]
    stock = cls.schedule
    if getattr(stock, "kv_checksum_rig", False):
        return
    said: list[str] = []

    @functools.wraps(stock)
    def schedule(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = stock(self, *args, **kwargs)
        _write_down(output, self.kv_cache_config)
        # An unpatched scheduler has none.
        ours = getattr(self, "kv_checksum", None)
        if ours is not None and output.kv_connector_metadata is not None:
            for line in loaded.differences(output, self.kv_cache_config):
                logger.error("%s: %s", DIFFERS, line)
            if not said and loaded.summed_blocks(output):
                said.append("once")
                logger.info(COMPARED)
        return output

    schedule.kv_checksum_rig = True  # type: ignore[attr-defined]
    cls.schedule = schedule


def _write_down(output: Any, kv_cache_config: Any) -> None:
    """Append a line for every request that loads in this step."""
    from kv_checksum.rig import loaded

    folder = os.environ.get(FOLDER)
    if folder is None or output.kv_connector_metadata is None:
        return
    loads = loaded.loads_of(output.kv_connector_metadata, kv_cache_config, output)
    by_request = dict(loads.by_request)
    if len(loads.requests_together) == 1:
        by_request[loads.requests_together[0]] = {0: list(loads.together)}
    if by_request:
        with Path(folder, RECORD).open("a") as record:
            for req_id, groups in by_request.items():
                record.write(json.dumps({"request": req_id, "groups": groups}) + "\n")
