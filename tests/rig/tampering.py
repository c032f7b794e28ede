"""Damage KV in a running server, and look at what its cache holds and its connectors load, all from outside.

What a connector of the rig keeps is damaged by an order (rig package, ``damage.py``): the next load carries it out. KV at
rest, in the cache itself, is looked at and damaged by a worker extension (``at_rest.py``): start such a server with
``AT_REST`` and ``DEV``.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from kv_checksum_rig.loads import RECORD

if TYPE_CHECKING:
    from rig.servers import Server

DEV = {"VLLM_SERVER_DEV_MODE": "1"}
"""Environment of a server that forgets its prefix cache, and answers ``/collective_rpc``, on request."""

AT_REST = ("--worker-extension-cls", "kv_checksum_rig.at_rest.KVAtRest")
"""Arguments of a server whose cache can be looked at and damaged."""


def order(server: Server, kind: str, **options: Any) -> int:
    """Order damage to a coming load; see ``kv_checksum_rig.damage`` for the kinds and options.

    Returns:
        The order's number, for ``reports``.

    """
    number = len(list(server.damage.glob("order-*.json")))
    scratch = server.damage / ".order"
    scratch.write_text(json.dumps({"kind": kind, **options}))
    scratch.replace(server.damage / f"order-{number}.json")
    return number


def reports(server: Server, number: int) -> list[dict[str, Any]]:
    """Return what came of an order so far, one report per process that carried it out."""
    files = sorted(server.damage.glob(f"{number}-*.json"))
    return [json.loads(file.read_text()) for file in files]


@contextlib.contextmanager
def damaged_load(server: Server, kind: str, **options: Any) -> Iterator[dict[str, Any]]:
    """Let the next load that is started in the block be damaged.

    What is yielded is empty until the block ends, and holds the report then.

    Raises:
        AssertionError: nothing was loaded, or nothing of it was changed.

    """
    number = order(server, kind, **options)
    report: dict[str, Any] = {}
    yield report
    found = reports(server, number)
    assert found, f"{server.name} loaded nothing that could be damaged"
    refused = [r["refused"] for r in found if "refused" in r]
    assert not refused, f"{server.name}: {refused}"
    assert all(r["bytes_changed"] for r in found), f"no byte was changed: {found}"
    report.update(found[0])


def loaded_blocks(server: Server) -> dict[str, dict[int, list[int]]]:
    """Return the blocks that each request loaded last, by KV cache group, as connectors told their workers."""
    record = server.tables / RECORD
    lines = record.read_text().splitlines() if record.exists() else []
    return {
        line["request"]: {int(group): ids for group, ids in line["groups"].items()}
        for line in map(json.loads, lines)
    }


def block_digests(server: Server) -> dict[str, list[str]]:
    """Return a digest of every block of the cache, by layer; of the first worker."""
    digests: dict[str, list[str]] = _call(server, "rig_block_digests")[0]
    return digests


def changed_blocks(
    before: dict[str, list[str]], after: dict[str, list[str]]
) -> list[int]:
    """Return the blocks of which any layer was written in between, without the null block."""
    return sorted(
        {
            block
            for layer, digests in after.items()
            for block, digest in enumerate(digests)
            if block and digest != before[layer][block]
        }
    )


def contents(digests: dict[str, list[str]], block: int) -> tuple[str, ...]:
    """Return a block's digests, layer by layer; equal if and only if every byte is."""
    return tuple(of_layer[block] for of_layer in digests.values())


def flip_bit(
    server: Server, block: int, layer: int = 0, byte: int = 0, bit: int = 0
) -> None:
    """Flip one bit of a block that lies in the cache, in every worker."""
    for done in _call(server, "rig_flip_bit", block, layer, byte, bit):
        assert done["before"] != done["after"], done


def forget(server: Server, timeout: float = 10) -> None:
    """Empty the server's own prefix cache, so that it asks its connector again.

    Blocks that are being stored hold the cache for a moment.
    """
    until = time.monotonic() + timeout
    while not server.post("/reset_prefix_cache").json()["success"]:
        assert time.monotonic() < until, f"{server.name} does not forget"
        time.sleep(0.1)


def _call(server: Server, method: str, *args: int) -> list[Any]:
    response = server.post(
        "/collective_rpc", method=method, args=[str(arg) for arg in args]
    )
    results: list[Any] = response.raise_for_status().json()["results"]
    return results
