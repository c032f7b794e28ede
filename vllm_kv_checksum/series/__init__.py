"""List the edits to vLLM, a module per step, in an order in which each stands alone.

A step brings modules of the feature, too, and is one patch of ``format-patch``: its
docstring is the patch's message. Two steps that share a patch are joined.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib import import_module

from ..edits import Module


@dataclass(frozen=True)
class Patch:
    """One patch of the series.

    Attributes:
        name: names the patch's file.
        steps: modules of this package, whose edits it makes.
        feature: modules of the feature that it brings, by path below the feature's
            folder; a path that ends in a slash stands for all below it.
        tests: names of tests, without ``test_`` and ``.py``, that go with this patch
            although an earlier one brings all that they import.
        files: other files of the checkout; a path that ends in a slash stands for all
            below it.

    """

    name: str
    steps: tuple[str, ...]
    feature: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()
    files: tuple[str, ...] = ()

    @property
    def message(self) -> str:
        """Return the commit message: a title, a blank line and a text."""
        documents = [import_module(f"{__name__}.{s}").__doc__ or "" for s in self.steps]
        title, _, text = documents[0].strip().partition("\n")
        parts = [text.strip(), *(d.strip() for d in documents[1:])]
        return "\n\n".join([title.rstrip("."), *(p for p in parts if p)]) + "\n"

    def edits(self) -> list[Module]:
        """Return the edits of the patch's steps."""
        return [m for s in self.steps for m in import_module(f"{__name__}.{s}").MODULES]


_TRANSPORTS = "tests/v1/kv_connector/unit/kv_checksum/rig/transports"
"""Modules that tests find by themselves, one for each connector that is there."""

PATCHES = (
    Patch("replicated-indexer", ("models",)),
    Patch("mamba-state-splits", ("mamba",)),
    Patch(
        "definition",
        ("definition",),
        feature=(
            "__init__.py",
            "checksum.py",
            "jit.py",
            "stored.py",
            "worker/__init__.py",
            "worker/attention.py",
            "worker/formats.py",
            "worker/groups.py",
            "worker/kernels/",
            "worker/rings.py",
            "worker/rows.py",
            "worker/states.py",
            "worker/views.py",
            "worker/worker.py",
        ),
    ),
    Patch("settings-and-messages", ("config", "messages")),
    Patch(
        "worker",
        ("worker", "base"),
        feature=("payload.py", "support.py", "worker/factory.py"),
    ),
    Patch(
        "scheduler",
        ("scheduler", "errors", "traces", "support"),
        feature=("metrics.py", "naming.py", "scheduler/", "verdict.py"),
    ),
    Patch("metrics", ("metrics",), feature=("info.py",)),
    Patch("conformance-suite", ("testing",), feature=("testing/",)),
    Patch(
        "nixl-pull",
        ("nixl_pull",),
        tests=("from_decode",),
        files=(f"{_TRANSPORTS}/nixl_pull.py",),
    ),
    Patch(
        "nixl-push",
        ("nixl_push",),
        feature=("connectors/__init__.py", "connectors/nixl_push.py"),
        files=(f"{_TRANSPORTS}/nixl_push.py",),
    ),
    Patch(
        "mooncake",
        ("mooncake",),
        feature=("connectors/mooncake.py",),
        tests=("machinery",),
        files=(f"{_TRANSPORTS}/mooncake.py",),
    ),
    Patch(
        "mooncake-store",
        ("mooncake_store",),
        feature=("connectors/mooncake_store.py",),
    ),
    Patch(
        "simple-cpu-offload",
        ("simple_cpu_offload",),
        feature=("connectors/simple_cpu_offload.py",),
        tests=("host_resident", "workers_decline"),
    ),
    Patch(
        "multi-connector",
        ("multi_connector",),
        feature=("connectors/multi_connector.py",),
        tests=("every_load", "multi_connector", "report", "stored"),
    ),
    Patch(
        "ledger",
        ("ledger",),
        tests=("connector_suite", "info", "ledger", "ledger_cases", "ledger_loads"),
    ),
    Patch("fault-drill", ("fault_drill",), feature=("fault_drill/",)),
    Patch("docs", ("docs",), tests=("spec_table",), files=("docs/",)),
)
"""The patches in order. The first nine are whole by themselves."""


def load_series(patches: Iterable[Patch] = PATCHES) -> list[Module]:
    """Return the edits of some patches, by file."""
    merged: dict[str, Module] = {}
    for patch in patches:
        for module in patch.edits():
            target = merged.setdefault(module.path, Module(module.path))
            target.import_code += module.import_code
            target.edits += module.edits
    return list(merged.values())
