# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Check that accesses to memory are ordered, whatever else is fast or slow.

Every stream and every host thread is an actor with a vector clock. An access happens
before another one if the clock of the latter has seen it. Two accesses to the same
memory of which one is a write must be ordered as the program issued them; then no
timing of streams and threads can change what is read.

Memory that is freed may be overwritten by whoever the allocator gives it next. The
worst case is checked: its next owner writes to it at once.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

Clock = dict[str, int]
Cells = frozenset[int] | None
"""Parts of a memory, numbered; None stands for all of it."""


class OutOfOrder(AssertionError):
    """Two accesses to one memory are not ordered."""


@dataclass
class Access:
    """One access: its actor, the actor's count at it, and what it touched."""

    actor: str
    count: int
    cells: Cells
    writes: bool
    what: str


@dataclass(eq=False)
class Memory:
    """Memory of one allocation.

    Attributes:
        name: what is told of it.
        owner: the actor to which the allocator gives it next if it is freed.
        device: whether kernels alone access it.
        pinned: whether copies between it and a device do not make the host wait.
        guarded: actors whose work so far must be done before it is given away.
        accesses: what touched it, as it was issued.

    """

    name: str
    owner: str
    device: bool = False
    pinned: bool = False
    guarded: set[str] = field(default_factory=set)
    accesses: list[Access] = field(default_factory=list)


class Order:
    """The clocks of all actors, and the accesses that they made."""

    def __init__(self) -> None:
        self._clocks: defaultdict[str, Clock] = defaultdict(dict)
        self.number = 0

    def now(self, actor: str) -> Clock:
        """Return what an actor has seen, its own accesses included."""
        return dict(self._clocks[actor])

    def join(self, actor: str, seen: Clock) -> None:
        """Let all that an actor does from now on happen after what is `seen`."""
        _join(self._clocks[actor], seen)

    def access(
        self,
        actor: str,
        memory: Memory,
        *,
        writes: bool,
        cells: Cells = None,
        what: str = "",
    ) -> None:
        """Add an access, as the next thing that an actor does.

        Raises:
            OutOfOrder: it may happen before an earlier one.

        """
        clock = self._clocks[actor]
        clock[actor] = clock.get(actor, 0) + 1
        self.number += 1
        new = Access(actor, clock[actor], cells, writes, what)
        self._compare(memory, new, clock)
        memory.accesses.append(new)

    def free(self, memory: Memory, thread: str) -> None:
        """Give memory away that a host thread freed; its next owner writes to it.

        Raises:
            OutOfOrder: an access to it may not have ended.

        """
        clock = self.now(memory.owner)
        for actor in (thread, *memory.guarded):
            _join(clock, self._clocks[actor])
        what = f"whoever gets it after {thread} freed it"
        self._compare(memory, Access("", 0, None, True, what), clock)

    @staticmethod
    def _compare(memory: Memory, new: Access, clock: Clock) -> None:
        for old in memory.accesses:
            if not (old.writes or new.writes):
                continue
            if not (old.cells is None or new.cells is None or old.cells & new.cells):
                continue
            if old.count > clock.get(old.actor, 0):
                raise OutOfOrder(
                    f"{memory.name}: {_told(new)} does not wait for {_told(old)}"
                )


def _join(clock: Clock, seen: Clock) -> None:
    for actor, count in seen.items():
        if count > clock.get(actor, 0):
            clock[actor] = count


def _told(access: Access) -> str:
    kind = "write" if access.writes else "read"
    where = f" on {access.actor}" if access.actor else ""
    return f"the {kind} by {access.what}{where}"
