"""Put a mixed load on a P and a D: requests are drawn from a seed, and every answer is judged."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
from rig.routing import prefill
from rig.servers import Server

from e2e import pairs

MIX = {"whole": 78, "streamed": 12, "leaves D": 6, "leaves P": 2, "never asks D": 2}
"""Shares of what clients do. Damaged requests are whole or streamed."""

FAMILIES = 12
"""How many prefixes are shared by requests."""

LONGEST = 1500
ANSWER_S = 240
"""A client that waits longer takes the server for hung."""


@dataclass(frozen=True)
class Ask:
    """One request. ``fault`` names the damage done to its load; ``patience_s`` tells when its client leaves."""

    request_id: str
    does: str
    prompt: list[int]
    max_tokens: int
    fault: str | None = None
    patience_s: float = ANSWER_S
    compare: bool = False


class Draws:
    """An endless, seeded row of requests; several threads may take from it.

    Args:
        share: share of the requests whose loads are damaged, the kinds in turn.
        faults: kinds of damage by request id prefix.
        compared: share of the clean requests whose text is compared.

    """

    def __init__(
        self, seed: int, share: float, faults: dict[str, str], compared: float = 0.1
    ) -> None:
        self._seed, self._share, self._compared = seed, share, compared
        self._random = random.Random(seed)
        self._faults = itertools.cycle(faults.items())
        self._numbers = itertools.count()
        self._lock = threading.Lock()

    def next(self) -> Ask:
        """Return the next request."""
        with self._lock:
            draw, number = self._random, next(self._numbers)
            max_tokens = draw.randint(1, 8)
            does = draw.choices(list(MIX), list(MIX.values()))[0]
            if draw.random() < self._share:
                # Long enough for every kind of damage, and nothing of it on D.
                prefix, fault = next(self._faults)
                prompt = self._tokens(f"damaged {number}", draw.randint(161, 900))
                does = "streamed" if does == "streamed" else "whole"
                return Ask(
                    f"{prefix}{self._seed}-{number}", does, prompt, max_tokens, fault
                )
            return Ask(
                f"clean-{self._seed}-{number}",
                does,
                self._prompt(number),
                50 if does == "leaves D" else max_tokens,
                patience_s=draw.choice((0.02, 0.1, 0.3, 0.6, 1.0))
                if does.startswith("leaves")
                else ANSWER_S,
                compare=draw.random() < self._compared,
            )

    def _prompt(self, number: int) -> list[int]:
        """Draw a prompt: half of them begin as others do; lengths are spread evenly over orders of magnitude."""
        draw = self._random
        length = round(LONGEST ** draw.random())
        if draw.random() < 0.5:
            return self._tokens(f"alone {number}", length)
        family = draw.randrange(FAMILIES)
        shared = self._tokens(f"family {family}", 64 * (1 + family))
        return shared + self._tokens(f"suffix {number}", min(length, 500))

    def _tokens(self, of: str, length: int) -> list[int]:
        draw = random.Random(f"{self._seed} {of}")
        return [draw.randrange(2, 512) for _ in range(length)]


@dataclass
class Tally:
    """The outcomes of the requests so far. ``damaged`` counts by (kind, what its client was told)."""

    asked: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    compared: int = 0
    left: int = 0
    left_d: int = 0
    damaged: Counter[tuple[str, str]] = field(default_factory=Counter)
    not_refused: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def problem(self, text: str) -> None:
        """Note something that must not happen."""
        with self.lock:
            self.problems.append(text)

    def told(self, verdict: str) -> int:
        """Return how many clients were told of this verdict."""
        return sum(n for (_, told), n in self.damaged.items() if told == verdict)


class Clients:
    """Threads that ask P and D until they are stopped."""

    def __init__(self, p: Server, d: Server, draws: Draws, number: int) -> None:
        self.tally = Tally()
        self._p, self._d, self._draws = p, d, draws
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, daemon=True) for _ in range(number)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Ask nothing more and wait for the answers."""
        self._stop.set()
        for thread in self._threads:
            thread.join(2 * ANSWER_S)
            if thread.is_alive():
                self.tally.problem("a client still waits for its answer")

    def _ask_on(self) -> None:
        while not self._stop.is_set():
            ask = self._draws.next()
            with self.tally.lock:
                self.tally.asked[ask.does] += 1
            try:
                self.ask(ask)
            except httpx.TimeoutException:
                self.tally.problem(f"{ask.request_id}: no answer in {ask.patience_s} s")
            except (httpx.HTTPError, ValueError, KeyError, IndexError) as error:
                self.tally.problem(f"{ask.request_id} ({ask.does}): {error!r}")
                # A server that is gone answers at once: do not fill the list.
                self._stop.wait(1)

    def ask(self, ask: Ask) -> None:
        """Do one request and judge what comes of it."""
        if ask.does == "leaves P":
            self._leave(self._p, ask, dict(do_remote_decode=True), 1)
            return
        params = prefill(
            self._p, ask.prompt, request_id=ask.request_id, ignore_eos=True
        )
        if ask.does == "never asks D":
            return
        if ask.does == "leaves D":
            self._leave(self._d, ask, params, ask.max_tokens)
            return
        streamed = ask.does == "streamed"
        answer = self._d.completions(
            ask.prompt,
            ask.max_tokens,
            params,
            request_id=ask.request_id,
            ignore_eos=True,
            stream=streamed,
        )
        if ask.fault is not None:
            self._judge_damaged(ask, answer)
        else:
            self._judge_clean(ask, answer)

    def _leave(
        self, server: Server, ask: Ask, params: dict[str, Any], max_tokens: int
    ) -> None:
        """Ask, and leave before the answer is complete: while nothing came, or after the first words."""
        with (
            contextlib.suppress(httpx.TimeoutException),
            server.streamed(
                ask.prompt,
                max_tokens,
                params,
                request_id=ask.request_id,
                patience_s=ask.patience_s,
                ignore_eos=True,
                stream=True,
            ) as answer,
        ):
            if answer.status_code != 200:
                text = answer.read().decode()
                self.tally.problem(f"{ask.request_id} ({ask.does}): {text[:200]}")
            for line in answer.iter_lines():
                if line.startswith('data: {"error"'):
                    self.tally.problem(f"{ask.request_id} ({ask.does}): {line[:200]}")
                if line:
                    break
        with self.tally.lock:
            self.tally.left += 1
            self.tally.left_d += server is self._d

    def _judge_clean(self, ask: Ask, answer: httpx.Response) -> None:
        text = whole_text(answer)
        with self.tally.lock:
            self.tally.answered += 1
        if ask.compare:
            alone = self._p.completions(ask.prompt, ask.max_tokens, ignore_eos=True)
            if text != whole_text(alone):
                self.tally.problem(f"{ask.request_id}: the text is not that of P alone")
            with self.tally.lock:
                self.tally.compared += 1

    def _judge_damaged(self, ask: Ask, answer: httpx.Response) -> None:
        """Check that a damaged load fails, and that its client is told of the right verdict."""
        told = told_of(answer)
        assert ask.fault is not None
        with self.tally.lock:
            self.tally.damaged[ask.fault, told] += 1
            if told == "nothing":
                # The drill's log tells later whether it was damaged at all.
                self.tally.not_refused.append(ask.request_id)
        expected = {"not verified"} if ask.fault in pairs.UNVERIFIED else {"mismatch"}
        if ask.fault == "other_request_payload":
            # One of fewer blocks has nothing to compare some of the load with.
            expected.add("not verified")
        if not pairs.TELLS_WHY:
            expected = {"failed"}
        if told not in {"nothing", *expected}:
            self.tally.problem(f"{ask.request_id}: told {told}, expected {expected}")


def told_of(answer: httpx.Response) -> str:
    """Return what an answer says of checksums: "mismatch", "not verified", or "nothing" where the request succeeded.

    It is "failed" where vLLM does not tell why, or ends a stream without text.

    Raises:
        ValueError: it failed for another reason.

    """
    if answer.status_code == 200 and not failed_stream(answer):
        if not pairs.STREAMS_TELL and not "".join(
            x["text"] for x in choices_of(answer)
        ):
            return "failed"
        return "nothing"
    message = pairs.error_of(answer)
    if not pairs.TELLS_WHY and message == pairs.GENERAL_ERROR:
        return "failed"
    for start, told in (
        ("KV checksum mismatch", "mismatch"),
        ("KV checksums not verified", "not verified"),
    ):
        if message.startswith(start):
            return told
    raise ValueError(f"it failed: {message[:200]}")


def failed_stream(answer: httpx.Response) -> bool:
    """Return whether an answer is a stream that ends in an error."""
    return is_stream(answer) and any(
        x.startswith('{"error"') for x in events_of(answer)
    )


def is_stream(answer: httpx.Response) -> bool:
    """Return whether an answer is a stream of events."""
    return "text/event-stream" in answer.headers["content-type"]


def events_of(answer: httpx.Response) -> list[str]:
    """Return the data of a stream's events. Text may hold what `str.splitlines` takes for the end of a line."""
    return [x.removeprefix("data: ") for x in answer.text.split("\n") if x]


def whole_text(answer: httpx.Response) -> str:
    """Return the text of a completion that ended because it was as long as asked for.

    Raises:
        ValueError: it failed, or ended otherwise.

    """
    if answer.status_code != 200 or failed_stream(answer):
        raise ValueError(f"failed: {pairs.error_of(answer)[:200]}")
    choices = choices_of(answer)
    if choices[-1]["finish_reason"] != "length":
        raise ValueError(f"ended for {choices[-1]['finish_reason']}")
    return "".join(choice["text"] for choice in choices)


def choices_of(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the parts of an answer, streamed or not."""
    if not is_stream(answer):
        return [answer.json()["choices"][0]]
    events = events_of(answer)
    if events[-1] != "[DONE]":
        raise ValueError("the stream has no end")
    return [json.loads(x)["choices"][0] for x in events[:-1]]


def seen(tally: Tally, kinds: Sequence[str]) -> dict[str, dict[str, int]]:
    """Return, of each kind of damage, how many clients were told of which verdict."""
    return {
        kind: {told: n for (of, told), n in sorted(tally.damaged.items()) if of == kind}
        for kind in kinds
    }
