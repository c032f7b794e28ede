"""Make the operators' guide's table of what each supported release of vLLM covers.

``.venv/bin/python tests/rig/releases.py`` reads vLLM's own wheels, which it downloads to ``.rig/wheels`` (300 MB each),
and writes the table. It shows what the series puts into each release and what it finds there to read; which caches
are read right is for each release's unit tests to show (``make test-base``).
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from rig.documents import GUIDE
from rig.env import child_environment
from rig.model import CACHE
from vllm_kv_checksum import KNOWN_VERSIONS
from vllm_kv_checksum.apply import read_feature
from vllm_kv_checksum.check import check
from vllm_kv_checksum.cli import feature_dir
from vllm_kv_checksum.series import load_series
from vllm_kv_checksum.stock import Stock, open_stock

BEGIN, END = "<!-- begin: releases -->", "<!-- end: releases -->"
WHEELS = CACHE / "wheels"
FACTORY = "distributed/kv_transfer/kv_connector/factory.py"

_CARRIED = "def kv_checksum_carrier"
_STORED = "def get_kv_checksum_sources"
_CONNECTORS = {
    (True, True): "as the one inside",
    (True, False): "carried",
    (False, True): "stored",
}
_STATES = "def get_state_splits"


def fits(stock: Stock) -> str:
    """Tell whether the whole series fits."""
    report = check(stock, read_feature(feature_dir()))
    return "whole" if not report.problems else f"lacks {len(report.problems)}"


def connectors(stock: Stock) -> dict[str, str]:
    """Return how checksums travel with each connector that a release has and the series edits."""
    added: dict[str, str] = defaultdict(str)
    for module in load_series():
        for edit in module.edits:
            if edit.where == "method" and edit.concerns(stock.version):
                added[edit.scope] += edit.code
    ways = {
        name: (_CARRIED in added[name], _STORED in added[name])
        for name in registered(stock)
    }
    return {name: _CONNECTORS[way] for name, way in ways.items() if any(way)}


def registered(stock: Stock) -> list[str]:
    """Return the names of a release's connectors."""
    tree = stock.tree(FACTORY)
    assert tree is not None
    return [
        str(node.args[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "KVConnectorFactory.register_connector"
        and isinstance(node.args[0], ast.Constant)
    ]


def others(stock: Stock) -> str:
    """Return the number of connectors that the ledger checks."""
    covered = {*connectors(stock), "NixlConnector"}
    return f"{len(set(registered(stock)) - covered)}: the ledger"


def states(stock: Stock) -> str:
    """Return how many classes of state layers tell how TP splits their states."""
    edits = [edit for module in load_series() for edit in module.edits]
    layers = [e for e in edits if _STATES in e.code and e.scope != "MambaBase"]
    return str(sum(edit.concerns(stock.version) for edit in layers))


def backends(stock: Stock) -> str:
    """Return how many of the attention backends whose caches are read a release has."""
    from vllm.distributed.kv_transfer.kv_checksum.worker import formats

    names = sorted({*formats.BACKENDS, *formats.COMPRESSED})
    found = [n for n in names if stock.has(*_split(n))]
    return f"{len(found)} of {len(names)}"


def _split(name: str) -> tuple[str, str]:
    module, _, attribute = name.rpartition(".")
    return module, attribute


def told(stock: Stock) -> str:
    """Return what the client of a failed request reads."""
    has = "error" in stock.members("v1/engine/__init__.py", "EngineCoreOutput")
    return "the reason" if has else "vLLM's general error"


def tiers(stock: Stock) -> str:
    """Return whether a connector can say that only a part of a load brings checksums."""
    base = "distributed/kv_transfer/kv_connector/v1/base.py"
    names = stock.members(base, "KVConnectorBase_V1")
    return "each tier" if "get_external_cache_hit_sources" in names else "the connector"


def context(stock: Stock) -> str:
    """Return what becomes of context parallelism: whether specs tell which caches it shards."""
    members = stock.members("v1/kv_cache_interface.py", "KVCacheSpec")
    return "`NixlConnector`" if "dcp_sharded" in members else "off, or refused"


def ray(stock: Stock) -> str:
    """Return which executors lose reports under pipeline parallelism."""
    return "refused" if stock.path_of("vllm.v1.executor.ray_executor") else "not there"


def rows(stocks: list[Stock]) -> Iterator[tuple[str, list[str]]]:
    """Yield every row: what it is about, and what each release has."""
    yield "the series", [fits(s) for s in stocks]
    found = [connectors(s) for s in stocks]
    for name in sorted(set().union(*found)):
        yield f"`{name}`", [f.get(name, "not there") for f in found]
    probes: dict[str, Callable[[Stock], str]] = {
        "other connectors": others,
        "stored checksums are asked of": tiers,
        "classes of state layers whose TP split is known": states,
        "attention backends that are read": backends,
        "a failed request's client reads": told,
        "context parallelism": context,
        "legacy Ray executor with pipeline parallelism": ray,
    }
    for label, probe in probes.items():
        yield label, [probe(s) for s in stocks]


def table(stocks: list[Stock]) -> str:
    """Return the table's lines."""
    lines = [
        "| | " + " | ".join(release(s) for s in stocks) + " |",
        "|---" * (len(stocks) + 1) + "|",
    ]
    lines += [f"| {label} | {' | '.join(cells)} |" for label, cells in rows(stocks)]
    return "\n".join(lines)


def release(stock: Stock) -> str:
    return stock.version.partition("+")[0]


def written() -> str:
    """Return the table as it stands in the guide."""
    return GUIDE.read_text().partition(BEGIN)[2].partition(END)[0].strip()


def column(name: str) -> dict[str, str]:
    """Return what the guide's table says of one release."""
    lines = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in written().splitlines()
    ]
    at = lines[0].index(name)
    return {line[0]: line[at] for line in lines[2:]}


def write(stocks: list[Stock], document: Path = GUIDE) -> None:
    """Put the table into the guide."""
    before, _, rest = document.read_text().partition(BEGIN)
    after = rest.partition(END)[2]
    assert after, f"{document} has no {BEGIN} and {END}"
    document.write_text(f"{before}{BEGIN}\n\n{table(stocks)}\n\n{END}{after}")


def wheel_of(version: str) -> Path:
    """Return vLLM's own wheel of a version; it is downloaded once."""
    if not (found := sorted(WHEELS.glob(f"vllm-{version}-*.whl"))):
        wanted = ["--no-deps", "--only-binary", ":all:", f"vllm=={version}"]
        command = [sys.executable, "-m", "pip", "--quiet", "download", *wanted]
        subprocess.run(
            [*command, "-d", str(WHEELS)], check=True, env=child_environment()
        )
        found = sorted(WHEELS.glob(f"vllm-{version}-*.whl"))
    return found[0]


def main() -> None:
    """Run the program."""
    with ExitStack() as stack:
        wheels = [wheel_of(version) for version in KNOWN_VERSIONS]
        write([stack.enter_context(open_stock(None, wheel)) for wheel in wheels])


if __name__ == "__main__":
    main()
