# SPDX-License-Identifier: Apache-2.0
"""Write the seed corpus: ``python tests/fuzz/make_corpus.py`` (same bytes each time).

Seeds come from the real encoders and stand under their own names; what fuzzing added
stands beside them under its hash and is left alone.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from fuzz.targets import CORPUS, TARGETS  # noqa: E402


def main() -> None:
    for name, target in TARGETS.items():
        folder = CORPUS / name
        folder.mkdir(parents=True, exist_ok=True)
        for seed, data in target().seeds().items():
            (folder / seed).write_bytes(data)


if __name__ == "__main__":
    main()
