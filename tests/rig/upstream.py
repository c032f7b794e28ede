"""Run vLLM's own tests on the patched tree: what passes on the stock one must pass there too.

``.venv/bin/python tests/rig/upstream.py`` takes the tests from vLLM's source distribution on the package index,
into ``.rig``, runs the files that touch what the series edits on a stock and on the patched tree, and
prints every test that passes on the first and not on the second. Exit status: 0 if there is none, 1 if there are
some, 2 if the tests are not to be had. What passes on stock is kept and not run again, unless ``--fresh`` is given.

No model is downloaded: there is no network, and configurations of the models that most tests name are made here.
Tests that need more (weights, a GPU) fail on both trees, and tell nothing.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rig.env import CACHE, VLLM, child_environment, digest
from rig.stock import stock_environment

FOLDER = CACHE / f"upstream-{VLLM}"
SOURCE = FOLDER / f"vllm-{VLLM}"
RUNNER = Path(__file__).with_name("upstream_runner.py")

FILES = (
    "v1/kv_connector/**/test_*.py",
    "v1/core/**/test_*.py",
    "v1/kv_offload/**/test_*.py",
    "v1/simple_kv_offload/**/test_*.py",
    "v1/worker/**/test_*.py",
    "v1/metrics/**/test_*.py",
    "v1/engine/**/test_*.py",
    "v1/executor/**/test_*.py",
    "v1/attention/test_attention_backends_selection.py",
    "v1/attention/test_mamba*.py",
    "v1/attention/test_gdn*.py",
    "v1/test_serial_utils.py",
    "v1/test_outputs.py",
    "test_outputs.py",
    "entrypoints/anthropic/test_error_type_mapping.py",
    "entrypoints/openai/chat_completion/test_serving_chat.py",
    "entrypoints/openai/**/test_*error*.py",
    "entrypoints/openai/responses/test_*.py",
    "entrypoints/serve/**/test_*error*.py",
    "entrypoints/serve/utils/test_*.py",
    "config/**/test_*.py",
    "engine/test_arg_utils.py",
    "test_config.py",
)
"""The files that touch what the series edits, as patterns under vLLM's ``tests``."""

NAMED = (
    "v1/kv_connector/unit/test_nixl_push_connector.py",
    "v1/kv_connector/unit/test_mooncake_connector.py::pull_completion",
    "v1/kv_connector/unit/test_multi_connector.py::overrides_all_base_methods",
    "v1/attention/test_attention_backends_selection.py::replayssm",
    "v1/simple_kv_offload/test_worker.py::no_forward_step",
    "test_config.py::v1_model_runner_rejects",
)
"""Tests that once passed on stock alone: files, where not all of one behind :: what the names of the tests have."""

MODELS: dict[str, dict[str, Any]] = {
    "facebook/opt-125m": {
        "architectures": ["OPTForCausalLM"],
        "model_type": "opt",
        "hidden_size": 768,
        "word_embed_proj_dim": 768,
        "ffn_dim": 3072,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "max_position_embeddings": 2048,
        "vocab_size": 50272,
        "torch_dtype": "float16",
    },
    "Qwen/Qwen3-0.6B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "vocab_size": 151936,
        "torch_dtype": "bfloat16",
    },
}
"""Models that most tests name: shapes alone, no weights and no tokenizer."""

TEST_PACKAGES = (
    "tblib==3.2.2",
    "pytest-asyncio==1.4.0",
    "pytest-mock==3.15.1",
    "ray==2.60.0",
    "msgpack==1.1.2",
)
BUILD_PACKAGES = ("setuptools-scm>=8,<9", "setuptools-rust>=1.9,<2")
"""What pip needs to ask the source distribution for its version."""

SETTINGS = {
    "TRITON_INTERPRET": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "HF_HOME": str(FOLDER / "huggingface"),
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_TLS": "tcp,self,sm",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "PYTHONHASHSEED": "0",
    "VLLM_CACHE_ROOT": str(FOLDER / "vllm-cache"),
}

CONDITIONS = digest(*TEST_PACKAGES, MODELS, sorted(SETTINGS.items()))[:8]
"""What the tests find, in short: results of other conditions are not compared with."""


class Stop(Exception):
    """Raised to end the run with one line for the reader."""


@dataclass(frozen=True)
class Tree:
    """A vLLM to run the tests on, and where what they gave is kept."""

    name: str
    path: tuple[Path, ...]
    results: Path


def fetch() -> None:
    """Download the source distribution and unpack its tests, unless they are there."""
    if SOURCE.exists():
        return
    FOLDER.mkdir(parents=True, exist_ok=True)
    archive = FOLDER / f"vllm-{VLLM}.tar.gz"
    if not archive.exists():
        _download(archive)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch, tarfile.open(archive) as t:
        wanted = [
            member
            for member in t.getmembers()
            if member.name.split("/")[1:2] in (["tests"], ["pyproject.toml"])
        ]
        t.extractall(scratch, members=wanted, filter="data")
        (Path(scratch) / SOURCE.name).rename(SOURCE)


def _download(archive: Path) -> None:
    """Let pip download the archive; it runs the archive's setup to learn the version."""
    say(f"downloading vLLM {VLLM}'s source distribution")
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        tools = Path(scratch) / "tools"
        flags = ["--no-deps", "--no-build-isolation", "--no-binary", "vllm"]
        overrides = {
            "PYTHONPATH": str(tools),
            "VLLM_TARGET_DEVICE": "empty",
            "VLLM_VERSION_OVERRIDE": VLLM,
        }
        try:
            pip({}, "install", "--target", str(tools), *BUILD_PACKAGES)
            pip(overrides, "download", *flags, "-d", str(FOLDER), f"vllm=={VLLM}")
        except subprocess.CalledProcessError as problem:
            raise Stop(
                f"vLLM {VLLM}'s source distribution is not to be had from the package index, so its own tests "
                "cannot be run"
            ) from problem
    if not archive.exists():
        raise Stop(f"pip downloaded no {archive.name}")


def pip(overrides: dict[str, str], *arguments: str) -> None:
    """Run the environment's pip."""
    command = [sys.executable, "-m", "pip", "--quiet", *arguments]
    subprocess.run(command, check=True, env={**child_environment(), **overrides})


def install_test_packages() -> Path:
    """Return a folder of the packages that vLLM's tests need and the environment lacks."""
    site = FOLDER / f"site-{CONDITIONS}"
    if not site.exists():
        with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
            target = Path(scratch) / "site"
            pip({}, "install", "--no-deps", "--target", str(target), *TEST_PACKAGES)
            target.rename(site)
    return site


def write_model_configurations() -> None:
    """Fill a Hugging Face cache with configurations, without weights, of models that many tests name."""
    for name, config in MODELS.items():
        model = Path(SETTINGS["HF_HOME"]) / "hub" / f"models--{name.replace('/', '--')}"
        snapshot = model / "snapshots" / "made-here"
        (model / "refs").mkdir(parents=True, exist_ok=True)
        snapshot.mkdir(parents=True, exist_ok=True)
        (model / "refs" / "main").write_text("made-here")
        (snapshot / "config.json").write_text(json.dumps(config))


def trees() -> tuple[Tree, Tree]:
    """Return the stock tree, built anew as the series may have grown, and the patched one."""
    site = install_test_packages()
    stock = FOLDER / "stock"
    stock_environment(stock)
    return (
        Tree("stock", (stock, site), FOLDER / f"results-stock-{CONDITIONS}"),
        Tree("patched", (site,), FOLDER / f"results-patched-{CONDITIONS}"),
    )


def files(patterns: Iterable[str], only: Sequence[str] = ()) -> list[str]:
    """Return the test files that match, once each, under vLLM's ``tests``."""
    root = SOURCE / "tests"
    found = {
        str(path.relative_to(root)): None
        for pattern in patterns
        for path in sorted(root.glob(pattern))
    }
    return [name for name in found if not only or any(text in name for text in only)]


def stem(name: str) -> str:
    """Return what the files of one test file's outcomes are called."""
    return name.replace("/", "--").replace("::", "--only--")


def run(tree: Tree, names: Sequence[str], timeout: int) -> None:
    """Run the files on a tree; what they gave lies in its results, whatever became of them."""
    tree.results.mkdir(parents=True, exist_ok=True)
    environment = {**child_environment(), **SETTINGS}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, (*tree.path, SOURCE)))
    files_of = [f"{stem(name)}={name}" for name in names]
    command = [sys.executable, str(RUNNER), str(tree.results), str(timeout), *files_of]
    private = ["unshare", "--map-root-user", "--net", "--"]
    if subprocess.run([*private, "true"], check=False, capture_output=True).returncode:
        say("no private network here: tests that ask for one run with this machine's")
        private = []
    ended = subprocess.run(
        [*private, *command],
        check=False,
        cwd=SOURCE,
        env=environment,
        stdin=subprocess.DEVNULL,
    )
    if ended.returncode:
        raise Stop(f"the {tree.name} tree's run ended with {ended.returncode}")


def result_file(tree: Tree, name: str) -> Path:
    """Return where the outcomes of one test file on a tree are kept."""
    return tree.results / f"{stem(name)}.jsonl"


def outcomes(tree: Tree, name: str) -> dict[str, str]:
    """Return test to outcome ("passed" or other) of one file; empty if it did not run."""
    path = result_file(tree, name)
    lines = path.read_text().splitlines() if path.exists() else []
    found: dict[str, str] = {}
    for line in lines:
        test, outcome = json.loads(line)
        # A test that fails behind its call, in teardown, failed.
        if found.get(test, "passed") == "passed":
            found[test] = outcome
    return found


def passed(tree: Tree, names: Iterable[str]) -> set[str]:
    """Return the tests of these files that passed."""
    return {
        test
        for name in names
        for test, outcome in outcomes(tree, name).items()
        if outcome == "passed"
    }


def compare(names: Sequence[str], timeout: int, fresh: bool) -> list[str]:
    """Run the files on both trees; the tests that pass on stock alone, twice. One run at a time."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with (FOLDER / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return _compare(names, timeout, fresh)


def _compare(names: Sequence[str], timeout: int, fresh: bool) -> list[str]:
    stock, patched = trees()
    missing = [n for n in names if fresh or not result_file(stock, n).exists()]
    if missing:
        say(f"stock tree: {len(missing)} files")
        run(stock, missing, timeout)
    say(f"patched tree: {len(names)} files")
    run(patched, names, timeout)
    differing = _files_that_differ(stock, patched, names)
    if differing:
        say(f"again, for tests that do not always pass: {len(differing)} files")
        right, seen = passed(stock, differing), passed(patched, differing)
        run(patched, differing, timeout)
        again = passed(patched, differing)
        run(stock, differing, timeout)
        always = right & passed(stock, differing)
        alone = sorted(always - seen - again)
    else:
        alone = []
    say(
        f"vLLM's own tests in {len(names)} files: {len(passed(stock, names))} pass on stock, "
        f"{len(passed(patched, names))} on the patched tree, {len(alone)} on stock alone"
    )
    return alone


def _files_that_differ(stock: Tree, patched: Tree, names: Iterable[str]) -> list[str]:
    return [n for n in names if passed(stock, [n]) - passed(patched, [n])]


def say(text: str) -> None:
    """Print a line at once."""
    print(f"upstream: {text}", flush=True)


def main() -> int:
    """Run the program."""
    parser = argparse.ArgumentParser(description="Run vLLM's own tests on both trees.")
    parser.add_argument("--only", nargs="*", default=(), help="files whose path has it")
    parser.add_argument("--named", action="store_true", help="tests that once differed")
    parser.add_argument("--fresh", action="store_true", help="run the stock tree again")
    parser.add_argument("--timeout", type=int, default=600, help="seconds per file")
    options = parser.parse_args()
    try:
        fetch()
        write_model_configurations()
        names = list(NAMED) if options.named else files(FILES, options.only)
        alone = compare(names, options.timeout, options.fresh)
    except Stop as problem:
        say(str(problem))
        return 2
    for test in alone:
        print(f"passes on stock alone: {test}")
    return 1 if alone else 0


if __name__ == "__main__":
    sys.exit(main())
