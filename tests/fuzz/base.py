# SPDX-License-Identifier: Apache-2.0
"""Define fuzz targets, and the bounds that hold for every input."""

import logging
import time
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random
from typing import Any

import msgspec

MAX_CPU_S = 0.5
"""CPU time that one input may take, all the loads that it is tried on together."""

MAX_LINE = 4096
"""Characters of one line that the feature logs."""


class Target:
    """One kind of message, and the code that receives it.

    Attributes:
        max_len: longest input, in bytes.
        memory, memory_per_byte: peak of traced memory that any input may take, and
            further memory for each byte of it.
        of_vllm: vLLM's functions that the input goes through, with the feature's lines.
        share: of the time of a run, relative to the other targets.

    """

    name: str
    max_len = 4096
    memory, memory_per_byte = 2**17, 16
    of_vllm: tuple[Any, ...] = ()
    share = 1

    def run(self, data: bytes) -> str:
        """Give the code one input; what became of it, in a word.

        Raises:
            AssertionError: something that must hold does not.
            Exception: whatever escaped the code.

        """
        raise NotImplementedError

    def seeds(self) -> dict[str, bytes]:
        """Return inputs from real encoders and the ways to break them, by name."""
        raise NotImplementedError

    def long_seeds(self) -> dict[str, bytes]:
        """Return seeds that are too long to be kept in the repository."""
        return {}

    def parse(self, data: bytes) -> Any:
        """Return the input as nested lists, dicts and scalars, for mutation (ValueError)."""
        return msgspec.msgpack.decode(data)

    def repair(self, tree: Any) -> None:
        """Change what contradicts itself after a mutation, where decoders look."""

    def unparse(self, tree: Any) -> bytes:
        """Return the inverse of `parse`."""
        return msgspec.msgpack.encode(tree)

    def invent(self, random: Random) -> bytes | None:
        """Return an input whose parts fit together as chance would not have them."""
        return None


class Lines(logging.Handler):
    """Formats what the feature logs, as a real handler would, and drops it."""

    def __init__(self) -> None:
        super().__init__()
        self.longest, self.plain = 0, True

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "kv_checksum" in record.name:
            self.longest = max(self.longest, len(text))
            self.plain = self.plain and text.isprintable()


@contextmanager
def quiet() -> Iterator[Lines]:
    """Print nothing that vLLM logs, but format all of it."""
    logger, lines = logging.getLogger("vllm"), Lines()
    before = logger.handlers, logger.level, logger.propagate
    logger.handlers, logger.propagate = [lines], False
    logger.setLevel(logging.DEBUG)
    try:
        yield lines
    finally:
        logger.handlers, level, logger.propagate = before
        # Not by assignment: loggers below keep what they were told of the level before.
        logger.setLevel(level)


def check(
    target: Target, data: bytes, lines: Lines, *, memory: bool
) -> tuple[str, float]:
    """Run one input within the bounds; what became of it, and its CPU time in seconds.

    Args:
        memory: measure memory too, which makes it several times slower.

    """
    lines.longest, lines.plain = 0, True
    bound = MAX_CPU_S * (10 if memory else 1)
    # CPU time grows, too, where others share the core: too much of it is so each time.
    for _ in range(3):
        outcome, spent, peak = _run(target, data, memory)
        if spent < bound:
            break
    assert spent < bound, f"{spent:.2f} s of CPU time"
    limit = target.memory + target.memory_per_byte * len(data)
    assert peak <= limit, f"{peak} bytes of memory"
    assert lines.longest < MAX_LINE, f"a line of {lines.longest} characters"
    assert lines.plain, "a line that is not one line of text"
    return outcome, spent


def _run(target: Target, data: bytes, memory: bool) -> tuple[str, float, int]:
    """Return what became of an input, its CPU time, and its peak of memory, 0 if that is not measured."""
    if memory:
        tracemalloc.start()
    began = time.thread_time()
    try:
        outcome = target.run(data)
        spent = time.thread_time() - began
        return outcome, spent, tracemalloc.get_traced_memory()[1] if memory else 0
    finally:
        tracemalloc.stop()
