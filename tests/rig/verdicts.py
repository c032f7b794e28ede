"""Check what must hold for the KV loads of every server that checks them, whatever a test is about.

Every load that started ended in one way (it was judged, failed or aborted), and what was summed of it is what its
connector was told to load. ``rig.servers.serving`` asks for both before it stops its servers.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import httpx
from kv_checksum_rig.loads import COMPARED, DIFFERS

from rig.metrics import total

if TYPE_CHECKING:
    from rig.servers import Server

SETTLED_S = 30
"""Within this, a server that nobody asks any more must have counted every load's end."""

NOT_SUMMED = "none"
"""The carrier's label of loads that nobody sums."""

LOCAL = "local"
"""The carrier's label of hits in the server's own prefix cache that are summed again."""


@dataclass(frozen=True)
class Loads:
    """What one server has counted so far.

    ``judged`` counts by verdict and carrier.
    """

    started: int
    failed: int
    aborted: int
    judged: dict[tuple[str, str], int]

    @property
    def under_way(self) -> int:
        """Return how many loads have not ended yet."""
        ended = self.failed + self.aborted + sum(self.judged.values())
        return self.started - ended

    def of(self, verdict: str) -> int:
        """Return how many loads had this verdict."""
        return sum(n for (found, _), n in self.judged.items() if found == verdict)

    @property
    def summed(self) -> int:
        """Return how many loads workers were asked to sum and that were judged."""
        return sum(
            n for (_, by), n in self.judged.items() if by not in (NOT_SUMMED, LOCAL)
        )


def counted(server: Server) -> Loads:
    """Return what a server tells on /metrics, all of one moment."""
    page = server.metrics()
    name = "vllm:kv_checksum_loads"
    judged: Counter[tuple[str, str]] = Counter()
    for (found, labels), value in page.items():
        if found == f"{name}_total":
            of = dict(labels)
            judged[of["verdict"], of["carrier"]] += int(value)
    return Loads(
        started=int(total(page, f"{name}_started_total")),
        failed=int(total(page, f"{name}_failed_total")),
        aborted=int(total(page, f"{name}_aborted_total")),
        judged=judged,
    )


def settled(server: Server, timeout: float = SETTLED_S) -> Loads:
    """Wait until every load has ended, and return what was counted.

    Raises:
        AssertionError: not within ``timeout`` seconds.

    """
    deadline = time.monotonic() + timeout
    while True:
        # Statistics travel with steps, and an idle engine makes none. With a prompt of one token vLLM's ExampleConnector
        # says that it has a negative number of tokens.
        for rank in range(server.dp):
            server.completions([5, 5], 1, dp_rank=rank).raise_for_status()
        found = counted(server)
        if found.under_way == 0:
            return found
        if time.monotonic() > deadline:
            raise AssertionError(
                f"{found.started} loads started, which is not the sum of "
                f"{found.judged} judged, {found.failed} failed and {found.aborted} aborted"
            )
        time.sleep(0.2)


def problems(server: Server) -> list[str]:
    """Name what does not hold of one server that is about to be stopped."""
    if not server.checks_loads:
        return []
    found, summed = [], 0
    if server.alive() and not server.killed:
        try:
            summed = settled(server).summed
        except (AssertionError, httpx.HTTPError) as error:
            found.append(str(error))
    elif not server.killed:
        found.append(f"ended by itself\n{server.log_errors()}")
    log = server.log_text()
    found += [line for line in log.splitlines() if DIFFERS in line]
    if summed and COMPARED not in log:
        found.append("what was summed was compared with nothing")
    return [f"{server.name}: {problem}" for problem in found]


def check(servers: Sequence[Server]) -> None:
    """Ask of each server whether it counted every load and summed what was loaded.

    Raises:
        AssertionError: one of them did not.

    """
    found = [line for server in servers for line in problems(server)]
    assert not found, "\n".join(found)
