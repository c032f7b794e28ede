# SPDX-License-Identifier: Apache-2.0
"""Write the seed corpus: ``python tests/fuzz/make_corpus.py`` (same bytes each time).

Seeds come from the real encoders and stand under their own names. With folders as
arguments, what fuzzing has found joins them: ``.rig/fuzz/payload/crashes`` adds each of
its files to the target ``payload``. All others that are kept are left alone.
"""

import argparse
from pathlib import Path

from fuzz.targets import TARGETS, read_corpus, write_corpus


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the fuzzers' seed corpus.")
    parser.add_argument(
        "found",
        nargs="*",
        type=Path,
        metavar="TARGET/FOLDER",
        help="a folder of inputs to keep; the folder around it is named as its target",
    )
    kept = read_corpus()
    for folder in parser.parse_args().found:
        if folder.parent.name not in TARGETS or not folder.is_dir():
            parser.error(f"{folder}: name a folder as .rig/fuzz/TARGET/crashes")
        for path in folder.iterdir():
            kept[folder.parent.name][path.name] = path.read_bytes()
    for name, target in TARGETS.items():
        kept[name].update(target().seeds())
    write_corpus(kept)


if __name__ == "__main__":
    main()
