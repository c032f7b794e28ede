"""Ask servers for completions without a pause, and replace them one by one meanwhile."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import Counter
from collections.abc import Iterator, Mapping

from rig import verdicts
from rig.routing import prefill_decode
from rig.servers import Server, retire, serving, stop_all

from e2e import pairs

MAX_TOKENS = 4


class Fleet:
    """Two Ps and two Ds in service, and clients that ask them without a pause."""

    def __init__(self, servers: dict[str, list[Server]]) -> None:
        self._servers, self._changes = servers, threading.Condition()
        self._busy: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._ends = threading.Event()
        self.texts: dict[int, str] = {}
        self.errors: list[Exception] = []
        # The verdicts of servers that were replaced.
        self.judged: Counter[str] = Counter()

    @contextlib.contextmanager
    def _pair(self, number: int) -> Iterator[list[Server]]:
        """Yield a P and a D; all four pairs in turn."""
        with self._changes:
            turns = (("p", number), ("d", number // 2))
            pair = [self._servers[side][turn % 2] for side, turn in turns]
            self._busy.update(server.name for server in pair)
        try:
            yield pair
        finally:
            with self._changes:
                self._busy.subtract(server.name for server in pair)
                self._changes.notify_all()

    def ask(self, number: int) -> None:
        """Ask for a prompt that nobody asks for again."""
        with self._pair(number) as (p, d):
            answer = prefill_decode(p, d, self.prompt(number), MAX_TOKENS)
        self.texts[number] = pairs.text_of(answer)

    @staticmethod
    def prompt(number: int) -> list[int]:
        return pairs.prompt_of(100 + number % 60, 8000 + number)

    def _ask_on(self) -> None:
        while not self._ends.is_set():
            try:
                self.ask(next(self._numbers))
            except Exception as error:  # all of them are what the test is about
                self.errors.append(error)

    @contextlib.contextmanager
    def under_load(self, clients: int) -> Iterator[None]:
        threads = [threading.Thread(target=self._ask_on) for _ in range(clients)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._ends.set()
            for thread in threads:
                thread.join()

    def replace(self, side: str, index: int, new: Server) -> None:
        """Start a server, ask it in the place of another, and end that when it is done."""
        new.start().wait_ready()
        with self._changes:
            old, self._servers[side][index] = self._servers[side][index], new
            assert self._changes.wait_for(lambda: not self._busy[old.name], 60)
        if old.checks_loads:
            self.note_verdicts(old)
        retire([old])

    def note_verdicts(self, server: Server) -> None:
        """Add the verdicts of a server that nobody asks any more to those that were met."""
        for (verdict, _), number in verdicts.settled(server).judged.items():
            self.judged[verdict] += number

    def rounds(self, number: int) -> None:
        """Let clients go on until they have asked so many times more."""
        goal = len(self.texts) + number
        pairs.wait(lambda: self.errors or len(self.texts) >= goal, "answers")

    def assert_answers_are_those_of(self, server: Server) -> None:
        """Check some of the texts that clients got against what a server computes itself."""
        asked = sorted(self.texts)[::4]
        prompts = [self.prompt(number) for number in asked]
        expected = pairs.reference_texts(server, prompts, MAX_TOKENS)
        assert [self.texts[number] for number in asked] == expected


PLACES = [("d", 0), ("p", 0), ("p", 1), ("d", 1)]
"""The servers of a fleet, in the order in which they are replaced."""


@contextlib.contextmanager
def replaced_under_load(
    before: Mapping[tuple[str, int], Server], after: Mapping[tuple[str, int], Server]
) -> Iterator[Fleet]:
    """Yield the fleet when all of its servers were replaced and no request noticed."""
    fleet = Fleet({side: [before[side, n] for n in range(2)] for side in "pd"})
    with serving(*before.values()), contextlib.ExitStack() as stack:
        stack.callback(stop_all, list(after.values()))
        with fleet.under_load(clients=3):
            for place in PLACES:
                fleet.replace(*place, after[place])
                fleet.rounds(8)
        assert fleet.errors == []
        yield fleet
        fleet.assert_answers_are_those_of(after["p", 0])
        retire(list(after.values()))
