"""LMCache, in a folder of its own that only its servers see.

``env.py`` builds the folder from ``lmcache.lock``, once for each content of that file. Where that is not possible it notes
why, and the tests of LMCache are skipped with that reason.
"""

from __future__ import annotations

from pathlib import Path

from rig.model import CACHE

VERSION = "0.5.6"
LOCK = Path(__file__).resolve().parent / "lmcache.lock"
FOLDER = CACHE / f"lmcache-{VERSION}"
CHUNK = 64
"""Tokens per chunk: two blocks of the tests' servers."""

ENVIRONMENT = {
    "KV_CHECKSUM_RIG_LMCACHE": str(FOLDER),
    "LMCACHE_LOCAL_CPU": "True",
    "LMCACHE_MAX_LOCAL_CPU_SIZE": "0.25",
    "LMCACHE_CHUNK_SIZE": str(CHUNK),
    "LMCACHE_TRACK_USAGE": "false",
}
"""What a server with LMCache is started with: chunks in its own memory, nothing told to anybody."""

TRANSFER = {
    "kv_connector": "LMCacheOnCPU",
    "kv_connector_module_path": "kv_checksum_rig.lmcache_cpu",
}
"""Its ``--kv-transfer-config``."""


def why_missing() -> str | None:
    """Return why there is no LMCache here, or None if there is."""
    if (FOLDER / "lmcache").exists():
        return None
    note = FOLDER.with_name(f"{FOLDER.name}.missing")
    return note.read_text() if note.exists() else f"{FOLDER} was not built: make env"
