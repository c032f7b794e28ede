# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Make the design document's table of model families from their plans."""

import re
from collections import Counter
from itertools import groupby
from pathlib import Path

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumWorker
from vllm.distributed.kv_transfer.kv_checksum.checksum import is_ring_spec
from vllm.distributed.kv_transfer.kv_checksum.worker.attention import kind_of_cells
from vllm.distributed.kv_transfer.kv_checksum.worker.views import layer_spec
from vllm.v1.kv_cache_interface import KVCacheSpec, MambaSpec

from .. import compressed, model_writers
from ..writers import MLA, WRITERS
from .configurations import MODELS
from .plans import TESTS, Plan, plans

DOCUMENT = TESTS.parent / "docs" / "design" / "kv_checksum.md"
BEGIN, END = "<!-- begin: model families -->", "<!-- end: model families -->"
COMMAND = (
    "PYTHONPATH=tests:tests/v1/kv_connector/unit TRITON_INTERPRET=1 "
    "python -m kv_checksum.rig.model_families.table"
)
_HEAD = (
    "| family | groups | block size | caches | verdict | seen by, or why not |",
    "|---|---|---|---|---|---|",
)
_WRITERS = (
    *WRITERS,
    *compressed.WRITERS,
    *model_writers.WRITERS,
    *model_writers.COMPRESSED,
)


def table() -> str:
    """Return the table's lines."""
    lines = [*_HEAD]
    for name, plan in plans().items():
        worker = plan.worker(plan.allocate())
        groups = [
            (group_id, _cells(plan, worker, group_id))
            for group_id in range(len(plan.config.kv_cache_groups))
        ]
        note = MODELS[name].not_run
        label = f"{name} ({note})" if note else name
        for cells, same in groupby(groups, key=lambda group: group[1]):
            ids = [group_id for group_id, _ in same]
            number = str(ids[0]) if len(ids) == 1 else f"{ids[0]}-{ids[-1]}"
            lines.append(f"| {label} | {number} | {' | '.join(cells)} |")
            label = ""
    return "\n".join(lines)


def _cells(plan: Plan, worker: KVChecksumWorker, group_id: int) -> tuple[str, ...]:
    """Return a group's cells: block size, caches, verdict and its reason."""
    group = plan.config.kv_cache_groups[group_id]
    specs: dict[str, KVCacheSpec] = {}
    for name in group.layer_names:
        spec = layer_spec(group.kv_cache_spec, name)
        assert spec is not None
        specs[name] = spec
    kinds = Counter(_kind(plan, name, spec) for name, spec in specs.items())
    caches = [text + (f", {n} layers" if n > 1 else "") for text, n in kinds.items()]
    if group_id in worker.groups:
        seen = {_seen_by(plan, name, spec): None for name, spec in specs.items()}
        verdict, why = "covered", "; ".join(seen)
    else:
        verdict, why = "skipped", _shortened(worker.skipped[group_id])
    size = str(group.kv_cache_spec.block_size)
    return size, "; ".join(caches), verdict, why


def _kind(plan: Plan, name: str, spec: KVCacheSpec) -> str:
    """Describe a layer's cache: spec class, backend, and tokens per state."""
    text = f"`{type(spec).__name__}`, `{plan.backends[name]}`"
    if not isinstance(spec, MambaSpec) and spec.tokens_per_state != 1:
        text += f", {spec.tokens_per_state} tokens per state"
    return text


def _seen_by(plan: Plan, name: str, spec: KVCacheSpec) -> str:
    """Tell how a covered layer's blocks were seen written."""
    if isinstance(spec, MambaSpec):
        if spec.state_splits is not None:
            return "states, by the layer's splits"
        return "states, whole" + ("" if spec.tp_replicated else ", at equal TP sizes")
    layer = plan.formats[name]
    backend, short = layer.backend, layer.backend.rpartition(".")[2]
    if is_ring_spec(spec):
        # `test_rings.py` runs the writer of every one that is covered.
        return f"`{short}`, rings: interpreter"
    cells = kind_of_cells(spec, layer)
    seen = {w.seen for w in _WRITERS if (w.backend, w.cells) == (backend, cells)}
    if not seen:
        assert backend.startswith(MLA)
        seen = {"writer of all latents"}
    return f"`{short}`, {cells}: {' and '.join(sorted(seen))}"


def _shortened(reason: str) -> str:
    return re.sub(r"vllm\.[\w.]*\.(\w+)", r"`\1`", reason)


def written() -> str:
    """Return the table as it stands in the document."""
    text = DOCUMENT.read_text()
    return text.partition(BEGIN)[2].partition(END)[0].strip()


def write(document: Path = DOCUMENT) -> None:
    """Put the table into the document."""
    before, _, rest = document.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    assert after, f"{document} has no {BEGIN} and {END}"
    document.write_text(f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}")


if __name__ == "__main__":
    write()
