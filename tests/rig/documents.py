"""Read the fenced blocks of the operators' documents, by the word behind their language."""

from __future__ import annotations

import re
from dataclasses import dataclass

from rig.model import CACHE

FEATURES = CACHE.parent / "docs" / "features"
GUIDE = FEATURES / "kv_checksum.md"

_FENCE = re.compile(r"^```(\w+) ?(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block: its language, the word that says how it is tested, its text."""

    language: str
    mark: str
    text: str


def blocks(language: str, mark: str | None = None) -> list[Block]:
    """Return the guide's blocks of a language, with this mark if one is given."""
    found = [Block(*match) for match in _FENCE.findall(GUIDE.read_text())]
    return [
        b for b in found if b.language == language and (mark is None or b.mark == mark)
    ]


def script(mark: str) -> str:
    """Return all shell blocks with this mark, one behind the other."""
    return "\n".join(block.text for block in blocks("bash", mark))


def fits(expected: str, line: str) -> bool:
    """Tell whether a line is as the document shows it; ``...`` there stands for anything."""
    pattern = ".*".join(map(re.escape, expected.split("...")))
    return re.search(pattern, line) is not None
