# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Keep the table of outcomes: expected and seen verdicts by kind of damage."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

CLEAN = "none"
"""The kind of what was not damaged."""

CHECK = "check: "
"""With what a row begins that counts checks: *verified* if one held."""

VERDICTS = ("mismatch", "unverified", "verified")

MAX_EXAMPLES = 20
"""Unexpected outcomes that are kept with what repeats them."""


@dataclass
class Row:
    """Outcomes of one kind.

    Attributes:
        expected: the verdicts that are right for damage that changed something.
        damaged: verdicts of what the damage changed. For `CLEAN`, and for the
            kinds of which nothing that counts is changed, empty.
        intact: verdicts of what it did not change, which must be *verified*.
        missed_by: of the damaged, how many other checksums did not see.

    """

    expected: tuple[str, ...]
    damaged: Counter[str] = field(default_factory=Counter)
    intact: Counter[str] = field(default_factory=Counter)
    missed_by: Counter[str] = field(default_factory=Counter)

    def count(self, verdict: str, changed: bool) -> None:
        (self.damaged if changed else self.intact)[verdict] += 1

    @property
    def undetected(self) -> int:
        """Damage that was called verified and should not have been."""
        return 0 if "verified" in self.expected else self.damaged["verified"]

    def right(self, changed: bool) -> tuple[str, ...]:
        """Return the right verdicts of what the damage changed, or did not.

        What must be *unverified* must be so damaged or not.
        """
        intact = self.expected if "mismatch" not in self.expected else ("verified",)
        return self.expected if changed else intact

    @property
    def unexpected(self) -> int:
        """Return all outcomes that are not the expected ones."""
        wrong = (n for v, n in self.damaged.items() if v not in self.right(True))
        return sum(wrong) + self.false_alarms

    @property
    def false_alarms(self) -> int:
        return sum(n for v, n in self.intact.items() if v not in self.right(False))


class Tally:
    """Rows by depth and kind; tallies of batches add up."""

    def __init__(self) -> None:
        self.rows: dict[tuple[str, str], Row] = {}
        self.examples: list[str] = []
        self.drawn: dict[str, Counter[str]] = {}

    def draw(self, depth: str, **properties: object) -> None:
        """Count what a batch drew."""
        for name, value in properties.items():
            name = f"{depth}: {name.replace('_', ' ')}"
            self.drawn.setdefault(name, Counter())[str(value)] += 1

    def row(self, depth: str, kind: str, expected: Iterable[str]) -> Row:
        return self.rows.setdefault((depth, kind), Row(tuple(expected)))

    def example(self, text: str) -> None:
        if len(self.examples) < MAX_EXAMPLES:
            self.examples.append(text)

    def add(self, other: Tally) -> None:
        for (depth, kind), row in other.rows.items():
            mine = self.row(depth, kind, row.expected)
            mine.damaged += row.damaged
            mine.intact += row.intact
            mine.missed_by += row.missed_by
        for text in other.examples:
            self.example(text)
        for name, values in other.drawn.items():
            self.drawn.setdefault(name, Counter()).update(values)

    def total(self, depth: str, of: str) -> int:
        """Sum of a `Row` number over a depth: damaged, intact, or a property.

        Without the checks.
        """
        numbers = (
            getattr(row, of)
            for (where, kind), row in self.rows.items()
            if where == depth and not kind.startswith(CHECK)
        )
        return sum(n.total() if isinstance(n, Counter) else n for n in numbers)

    @property
    def unexpected(self) -> int:
        return sum(row.unexpected for row in self.rows.values())

    def json(self) -> list[dict[str, object]]:
        return [
            {
                "depth": depth,
                "kind": kind,
                "expected": list(row.expected),
                "damaged": dict(row.damaged),
                "intact": dict(row.intact),
                "undetected": row.undetected,
                "false_alarms": row.false_alarms,
                "missed_by": dict(row.missed_by),
            }
            for (depth, kind), row in sorted(self.rows.items())
        ]

    def drawn_lines(self, depth: str) -> list[str]:
        """Return how often each property was drawn at a depth."""
        return [
            f"- {name}: " + "; ".join(f"{v}: {n:,}" for v, n in sorted(values.items()))
            for name, values in self.drawn.items()
            if name.startswith(depth)
        ]

    def check_lines(self, depth: str) -> list[str]:
        """Return a Markdown table of the checks of one depth."""
        lines = [_line(["check", "held", "failed"]), _line(["---"] * 3)]
        for (where, kind), row in sorted(self.rows.items()):
            if where == depth and kind.startswith(CHECK):
                cells = [row.intact["verified"], row.false_alarms]
                lines.append(_line([kind.removeprefix(CHECK), *cells]))
        return lines

    def lines(self, depth: str, others: tuple[str, ...] = ()) -> list[str]:
        """Return a Markdown table of one depth; `others` are columns of `missed_by`."""
        head = ["damage", "expected", "damaged", *VERDICTS, "without effect"]
        head += ["false alarms", *(f"missed by {o}" for o in others)]
        lines = [_line(head), _line(["---"] * len(head))]
        totals: Counter[int] = Counter()
        for (where, kind), row in sorted(self.rows.items()):
            if where == depth and not kind.startswith(CHECK):
                cells = _cells(row, others)
                totals.update(dict(enumerate(cells)))
                lines.append(_line([kind, " or ".join(row.expected), *cells]))
        return [*lines, _line(["all", "", *totals.values()])]


def _cells(row: Row, others: tuple[str, ...]) -> list[int]:
    return [
        row.damaged.total(),
        *(row.damaged[v] for v in VERDICTS),
        row.intact.total(),
        row.false_alarms,
        *(row.missed_by[o] for o in others),
    ]


def _line(cells: Iterable[object]) -> str:
    return (
        f"| {' | '.join(f'{c:,}' if isinstance(c, int) else str(c) for c in cells)} |"
    )
