# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Put the results of `benchmarks/results` into the documents: all plots, and tables.

A table stands between two comments of the evidence document. What was not measured yet
is said in its place.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import plots
from cost_plots import kernel_instructions
from serving_ratios import summary, table

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCUMENT = ROOT / "docs" / "design" / "kv_checksum_evidence.md"

PLOTS = {
    "kernel_cpu": ("kernel_cpu",),
    "host": ("host_blocks_16", "host_blocks_64", "host_blocks_128"),
    "requests": ("requests",),
    "engine": ("engine",),
    "cpu_layouts": ("cpu_layouts",),
    "instructions": ("kernel_instructions",),
    "serving": ("serving",),
    "serving_switched": ("serving_switched",),
}
"""By the plot's name behind `kv_checksum_`: the results that it is drawn from."""


def results(plot: str) -> list[dict[str, Any]]:
    """Return the results of a plot; none if they are not all there."""
    files = [RESULTS / f"{name}.json" for name in PLOTS[plot]]
    if not all(file.exists() for file in files):
        return []
    return [json.loads(file.read_text()) for file in files]


def draw(plot: str, folder: Path = DOCUMENT.parent) -> Path | None:
    """Draw a plot and return its file, or None if nothing was measured."""
    found = results(plot)
    if not found:
        return None
    file = folder / f"kv_checksum_{plot}.svg"
    plots.draw(found, file, requests=plot == "requests")
    return file


def serving() -> str:
    """Return the section about pairs of servers that were started differently."""
    return _served(
        "serving",
        "{turns} turns of {requests} requests",
        "Ratios of served requests to those with checksums off, with their intervals",
    )


def serving_switched() -> str:
    """Return the section about servers that switch checksums off and on."""
    return _served(
        "serving_switched",
        "{rounds} rounds of {requests} turns",
        "The same ratios in servers that switch checksums off and on",
    )


def _served(name: str, asked: str, caption: str) -> str:
    """Return a table of ratios; `asked` says how often, in the settings' names."""
    found = results(name)
    if not found:
        return (
            f"Not measured yet: `benchmarks/benchmark_{name}.py --json "
            f"benchmarks/results/{name}.json`, then `benchmarks/evidence.py`."
        )
    (result,) = found
    restarts = len({row["restart"] for row in result["rows"]})
    asked = asked.format(**result["settings"])
    return (
        f"{restarts} restarts of all servers; per restart, workload and arm {asked}. The "
        "third column\nis the median of the arm without checksums.\n\n"
        f"{table(summary(result['rows']))}\n\n![{caption}](kv_checksum_{name}.svg)"
    )


def instructions() -> str:
    """Return the tables of instructions and of what devices can issue."""
    found = results("instructions")
    if not found:
        return "Not made yet: `benchmarks/kernels/kernel_instructions.py`."
    return kernel_instructions.tables(kernel_instructions.Result.of(found[0]))


def sections() -> dict[str, str]:
    """Return what stands between the document's comments, by their name."""
    return {
        "instructions": instructions(),
        "serving": serving(),
        "serving_switched": serving_switched(),
    }


def written(name: str, document: Path = DOCUMENT) -> str:
    """Return a section as it stands in the document."""
    text = document.read_text().partition(f"<!-- begin: {name} -->")[2]
    return text.partition(f"<!-- end: {name} -->")[0].strip()


def write(name: str, text: str, document: Path = DOCUMENT) -> None:
    """Put a section into the document.

    Raises:
        ValueError: the document has no place for it.

    """
    begin, end = f"<!-- begin: {name} -->", f"<!-- end: {name} -->"
    before, _, rest = document.read_text().partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"{document} has no {begin} and {end}")
    document.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def main() -> int:
    """Write all sections and plots."""
    for name, text in sections().items():
        write(name, text)
    for plot in PLOTS:
        try:
            file = draw(plot)
        except ImportError:
            print(plots.NEEDS, file=sys.stderr)
            return 1
        print(f"{plot}: {file or 'not measured'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
