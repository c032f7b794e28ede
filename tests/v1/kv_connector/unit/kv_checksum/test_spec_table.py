# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that the design document has a true row for every spec class and backend."""

import ast
import inspect
import re
from pathlib import Path

import pytest
import torch

import vllm
from vllm.distributed.kv_transfer.kv_checksum.checksum import Skipped
from vllm.distributed.kv_transfer.kv_checksum.worker import formats
from vllm.v1 import kv_cache_interface as interface

from .rig import caches as u
from .rig.versions import needs, older_than

DOCS = Path(__file__).parents[5] / "docs" / "design" / "kv_checksum.md"


def rows() -> dict[str, str]:
    """Return the verdict by spec class, as the table says."""
    found = {}
    for line in DOCS.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[1] in ("covered", "skipped"):
            found[cells[0].strip("`")] = cells[1]
    return found


def spec_classes() -> dict[str, type]:
    return {
        name: c
        for name, c in inspect.getmembers(interface, inspect.isclass)
        if issubclass(c, interface.KVCacheSpec)
    }


OLDER = {"KpoolTailSpec"}
"""Of older releases alone: not in the table, and skipped as unknown ones are."""


def test_every_spec_class_has_a_row():
    assert set(rows()) == set(spec_classes()) - OLDER
    assert older_than("0.32.0") or not OLDER & set(spec_classes())


ATTENTION = dict(block_size=16, num_kv_heads=2, head_size=8, dtype=torch.bfloat16)
MORE = {
    "ChunkedLocalAttentionSpec": dict(attention_chunk_size=64),
    "HiddenStateCacheSpec": dict(num_kv_heads=1),
    "KpoolTailSpec": dict(sliding_window=64),
    "MLAAttentionSpec": dict(num_kv_heads=1),
    "RSWASpec": dict(rswa_window=32),
    "SinkFullAttentionSpec": dict(sink_len=16),
    "SlidingWindowMLASpec": dict(num_kv_heads=1, sliding_window=64),
    "SlidingWindowSpec": dict(sliding_window=64),
}


def example(name):
    """Return an instance of a spec class and a cache for it."""
    raw = torch.zeros(4096, dtype=torch.int8)
    spec_class = spec_classes()[name]
    if name == "MambaSpec":
        spec = spec_class(16, shapes=((4, 3), (4, 2)), dtypes=(torch.float32,) * 2)
        return spec, torch.zeros(8, 1, 1, 80, dtype=torch.int8)
    if name == "HiSparseHotSpec":
        return spec_class(block_size=16, page_size=64, blocks_per_request=2), raw
    if name == "HiSparseResidentSpec":
        return spec_class(block_size=16, page_size=64), raw
    if name == "KVCacheSpec":
        return spec_class(block_size=16), u.random_cache(8, u.full_spec())
    if name == "UniformTypeKVCacheSpecs":
        inner = {u.names(0)[0]: u.full_spec()}
        return spec_class(16, kv_cache_specs=inner), u.random_cache(8, u.full_spec())
    spec = spec_class(**{**ATTENTION, **MORE.get(name, {})})
    return spec, u.random_cache(8, spec)


@pytest.mark.parametrize("name", sorted(set(spec_classes()) - OLDER))
def test_the_tables_verdict_is_what_the_worker_does(name):
    spec, cache = example(name)
    caches = {u.names(0)[0]: cache}
    w = u.worker(u.config(8, (caches, spec)), caches)
    assert ("covered" if 0 in w.groups else "skipped") == rows()[name]
    assert (0 in w.groups) != (0 in w.skipped)
    for reason in w.skipped.values():
        assert Skipped.of(reason) not in (Skipped.OTHER, Skipped.MEMORY_LAYOUT)


@pytest.mark.parametrize("name", sorted(set(spec_classes()) & OLDER))
def test_a_spec_class_of_older_releases_alone_is_skipped(name):
    spec, cache = example(name)
    caches = {u.names(0)[0]: cache}
    assert name in u.worker(u.config(8, (caches, spec)), caches).skipped[0]


def test_an_unknown_spec_class_is_skipped():
    """Whether its blocks hold tokens by position is not known."""

    class PluginSpec(interface.FullAttentionSpec):
        pass

    caches = {u.names(0)[0]: u.random_cache(8, u.full_spec())}
    w = u.worker(u.config(8, (caches, PluginSpec(**ATTENTION))), caches)
    assert "PluginSpec" in w.skipped[0]


# ---- backends

EVIDENCE = DOCS.with_name("kv_checksum_evidence.md")


def names_in(column, columns):
    """Return names in backticks of one column of the tables with so many columns."""
    section = EVIDENCE.read_text().partition("## Layouts seen written")[2]
    section = section.partition("\n#")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines()]
    cells = [row[column] for row in rows if len(row) == columns]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def backends():
    """Return every class in vLLM that derives from `AttentionBackend`, by source."""
    root, bases = Path(vllm.__file__).parent, {}
    for path in root.rglob("*.py"):
        text = path.read_text()
        if "Backend" not in text or ".kv_checksum" in str(path):
            continue
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.ClassDef):
                names = {ast.unparse(base).split(".")[-1] for base in node.bases}
                bases.setdefault(node.name, set()).update(names)
    found, more = {"AttentionBackend"}, True
    while more:
        more = {name for name, of in bases.items() if of & found} - found
        found |= more
    return found


@needs("0.33.0", "tables of backends")
def test_every_backend_is_in_one_of_the_tables():
    covered, skipped = names_in(2, 5), names_in(0, 2)
    assert not covered & skipped
    listed = {*formats.BACKENDS, *formats.COMPRESSED, *formats.RINGS}
    assert {path.rpartition(".")[2] for path in listed} == covered
    made = {"TritonFlashAttentionBackend", "TritonFlashInferBackend"}
    assert covered | skipped == backends() | made
