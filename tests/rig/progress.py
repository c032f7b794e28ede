"""Show how far long work is: a bar on a terminal, beside the lines that a program prints anyway.

Where standard error is no terminal there is no bar, and the lines alone tell.
"""

from __future__ import annotations

import sys
from typing import TextIO

from tqdm import tqdm

# No thread that redraws: some of the programs fork.
tqdm.monitor_interval = 0


def bar(total: float, what: str, unit: str) -> tqdm:
    """Return a bar; close it, or use it as a context manager."""
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        disable=None,
        dynamic_ncols=True,
        leave=False,
        # The time left is told from the whole run: its parts differ.
        smoothing=0,
    )


def advance(shown: tqdm, to: float, **told: object) -> None:
    """Show how much is done, and what else there is to tell."""
    shown.set_postfix(told, refresh=False)
    shown.update(min(to, shown.total) - shown.n)
    shown.refresh()


def say(text: object = "", file: TextIO | None = None) -> None:
    """Print a line at once, above the bar if there is one."""
    with tqdm.external_write_mode(file or sys.stdout):
        print(text, file=file or sys.stdout, flush=True)
