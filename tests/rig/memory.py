"""Sample the resident memory of servers over time, and tell how fast it grows."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from rig.servers import Server


@dataclass(frozen=True)
class Trend:
    """A least-squares line through a process's samples, in KiB and minutes.

    ``error`` is the slope's standard error; it takes the residuals as independent, which samples of one process are not
    quite, so it is a lower bound.
    """

    samples: int
    minutes: float
    mean: float
    slope: float
    error: float

    @property
    def growth(self) -> float:
        """Return the line's rise over the samples' time, as a share of their mean."""
        return self.slope * self.minutes / self.mean if self.mean else 0.0


def trend(points: Sequence[tuple[float, float]]) -> Trend:
    """Return the trend of (minute, KiB) points.

    Raises:
        ValueError: fewer than three points, or all at one time.

    """
    if len(points) < 3:
        raise ValueError(f"{len(points)} points give no trend")
    n = len(points)
    x_mean = sum(x for x, _ in points) / n
    y_mean = sum(y for _, y in points) / n
    spread = sum((x - x_mean) ** 2 for x, _ in points)
    if not spread:
        raise ValueError("points of one time give no trend")
    slope = sum((x - x_mean) * (y - y_mean) for x, y in points) / spread
    left = sum((y - y_mean - slope * (x - x_mean)) ** 2 for x, y in points)
    minutes = max(x for x, _ in points) - min(x for x, _ in points)
    return Trend(n, minutes, y_mean, slope, (left / (n - 2) / spread) ** 0.5)


class Sampler:
    """Reads the memory of every process of some servers every few seconds, until closed."""

    def __init__(self, servers: Sequence[Server], every_s: float) -> None:
        self._servers, self._every_s = servers, every_s
        self._began = time.monotonic()
        self._samples: dict[str, list[tuple[float, int, int]]] = {}
        self._names: dict[psutil.Process, str] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def samples(self) -> dict[str, list[tuple[float, int, int]]]:
        """Return (minute, RSS in KiB, PSS in KiB) of each process, by its server's name and its own."""
        return {name: list(found) for name, found in self._samples.items()}

    def close(self) -> None:
        """Stop reading."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.is_set():
            minute = (time.monotonic() - self._began) / 60
            for server in self._servers:
                for process in server.family():
                    with contextlib.suppress(psutil.Error):
                        name = self._name(server, process)
                        used = process.memory_full_info()
                        kept = self._samples.setdefault(name, [])
                        kept.append((minute, used.rss // 1024, used.pss // 1024))
            self._ended.wait(self._every_s)

    def _name(self, server: Server, process: psutil.Process) -> str:
        """Name a process by its server and title; a number tells apart those of one title."""
        known = self._names.get(process)
        if known is None:
            prefix = f"{server.name} {process.name()}"
            same = collections.Counter(
                x.partition("#")[0] for x in self._names.values()
            )
            known = f"{prefix}#{same[prefix] + 1}" if same[prefix] else prefix
            self._names[process] = known
        return known
