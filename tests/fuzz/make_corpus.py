# SPDX-License-Identifier: Apache-2.0
"""Write the seed corpus: ``python tests/fuzz/make_corpus.py`` (same bytes each time).

Seeds come from the real encoders and stand under their own names; what fuzzing added
stands beside them under its hash and is left alone.
"""

from fuzz.targets import CORPUS, TARGETS


def main() -> None:
    for name, target in TARGETS.items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for seed, data in target().seeds().items():
            (folder / seed).write_bytes(data)


if __name__ == "__main__":
    main()
