"""Run the ``vllm-kv-checksum`` command."""

import argparse
import sys
from pathlib import Path

from . import apply as installer
from .check import check
from .diff import diff
from .doctor import diagnose
from .patches import write_patches
from .series import load_series
from .stock import open_stock
from .wheel import patch_wheel


def feature_dir() -> Path:
    """Return the folder of the feature's modules: packaged, or else in the checkout."""
    here = Path(__file__).resolve().parent
    packaged = here / "_feature"
    return packaged if packaged.is_dir() else here.parent / "vllm" / installer.FEATURE


def checkout() -> Path | None:
    """Return the project's checkout, or None if only the package is installed."""
    root = Path(__file__).resolve().parent.parent
    return root if (root / "tests" / "series").is_dir() else None


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="vllm-kv-checksum",
        description="Put KV-cache checksums into a vLLM tree, all or nothing.",
    )
    tree = argparse.ArgumentParser(add_help=False)
    tree.add_argument(
        "--tree",
        type=Path,
        metavar="DIR",
        help="a vLLM checkout or package (default: the installed vLLM)",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser(
        "apply", parents=[tree], help="add the feature and its hooks to vLLM"
    )
    command.add_argument(
        "--link", action="store_true", help="symlink the feature, for development"
    )
    command.add_argument(
        "--force", action="store_true", help="also for an unknown vLLM version"
    )
    command = commands.add_parser(
        "revert", parents=[tree], help="put vLLM's own files back, bit-identical"
    )
    command.add_argument(
        "--force", action="store_true", help="also over files changed since"
    )
    commands.add_parser(
        "status",
        parents=[tree],
        help="exit status 0: applied, 1: not applied, 2: changed, interrupted, or "
        "closed to users that may read vLLM",
    )
    commands.add_parser(
        "diff", parents=[tree], help="print what apply would change, for git apply"
    )
    command = commands.add_parser(
        "check",
        help="judge whether the series fits a vLLM, known or not, and write nothing",
        description="Judge whether the series fits a vLLM, known or not, and write "
        "nothing: name every anchor as found or missing, and the parameters, attributes "
        "and imports that are missing. Exit status 0: all of these are there, 1: not all, 2: "
        "there is no vLLM to judge. What the feature reads of vLLM's objects while it runs is "
        "for its tests to show.",
    )
    place = command.add_mutually_exclusive_group()
    place.add_argument(
        "--tree",
        type=Path,
        metavar="DIR",
        help="a vLLM checkout or package without the series (default: the installed)",
    )
    place.add_argument("--wheel", type=Path, metavar="FILE", help="vLLM's own wheel")
    command.add_argument(
        "--json", action="store_true", help="print everything as one JSON object"
    )
    command = commands.add_parser(
        "format-patch",
        parents=[tree],
        help="write what apply would change as a series of patches, for git am",
    )
    command.add_argument(
        "-o", dest="folder", type=Path, metavar="DIR", required=True, help="where to"
    )
    command.add_argument(
        "--from",
        dest="author",
        metavar="NAME <ADDRESS>",
        help="the patches' author (default: git's identity)",
    )
    command = commands.add_parser(
        "wheel", help="write a patched wheel from vLLM's own, to pin in an image"
    )
    command.add_argument("base", type=Path, metavar="BASE.whl", help="vLLM's own wheel")
    command.add_argument(
        "-o", dest="folder", type=Path, metavar="DIR", required=True, help="where to"
    )
    command.add_argument(
        "--force", action="store_true", help="also for an unknown vLLM version"
    )
    command = commands.add_parser(
        "doctor",
        help="ask running servers whether they will verify each other's KV",
        description="Ask each server's /metrics, and tell in plain words whether P and D "
        "will verify each other, what is not covered, and what to change. Exit status 0: "
        "all that was asked will verify, 1: something is not verified, or did not match, "
        "2: it could not be found out, because a server could not be asked or one side "
        "is missing. Needs prometheus_client, which vLLM brings.",
    )
    command.add_argument(
        "urls",
        nargs="+",
        metavar="URL",
        help="every P and D: http://host:port or host:port, not a router",
    )
    command.add_argument(
        "--timeout",
        type=positive,
        default=10.0,
        metavar="SECONDS",
        help="until all must have answered (default: 10)",
    )
    command.add_argument(
        "--json", action="store_true", help="print everything as one JSON object"
    )
    return parser


def positive(text: str) -> float:
    """Return a number of seconds, more than 0 and at most an hour."""
    seconds = float(text)
    if not 0 < seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 3600")
    return seconds


def run(arguments: argparse.Namespace) -> int:
    if arguments.command == "wheel":
        path = patch_wheel(
            arguments.base,
            arguments.folder,
            load_series(),
            feature_dir(),
            force=arguments.force,
        )
        print(path)
        return 0
    if arguments.command == "check":
        return run_check(arguments)
    if arguments.command == "doctor":
        found = diagnose(arguments.urls, arguments.timeout)
        sys.stdout.write(found.to_json() + "\n" if arguments.json else found.to_text())
        return found.status
    package = installer.find_package(arguments.tree)
    if arguments.command == "apply":
        print(
            installer.apply(
                package,
                load_series(),
                feature_dir(),
                link=arguments.link,
                force=arguments.force,
            )
        )
    elif arguments.command == "revert":
        print(installer.revert(package, force=arguments.force))
    elif arguments.command == "format-patch":
        if checkout() is None:
            print(
                "tests and documents are left out: they go with the patches if this is "
                "run from the project's checkout (pip install -e .)",
                file=sys.stderr,
            )
        for path in write_patches(
            package,
            feature_dir(),
            arguments.folder,
            author=arguments.author,
            checkout=checkout(),
        ):
            print(path)
    elif arguments.command == "diff":
        sys.stdout.write(diff(package, load_series(), feature_dir()))
    else:
        code, text = installer.status(package)
        print(text)
        return code
    return 0


def run_check(arguments: argparse.Namespace) -> int:
    with open_stock(arguments.tree, arguments.wheel) as stock:
        report = check(stock, installer.read_feature(feature_dir()))
    sys.stdout.write(report.to_json() + "\n" if arguments.json else report.to_text())
    return 1 if report.problems else 0


def main(argv: list[str] | None = None) -> int:
    try:
        return run(build_parser().parse_args(argv))
    except (installer.InstallError, OSError) as error:
        print(f"vllm-kv-checksum: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
