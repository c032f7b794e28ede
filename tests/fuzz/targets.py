# SPDX-License-Identifier: Apache-2.0
"""Name all targets."""

import json
from base64 import b64decode, b64encode
from pathlib import Path

from .base import Target
from .mooncake import Removals, Responses
from .nixl_push import Notifs, Registrations
from .payloads import Params, Payloads

CORPUS = Path(__file__).parent / "corpus.json"
"""The inputs that are kept: by target and name, in base64."""

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (Payloads, Params, Notifs, Registrations, Responses, Removals)
}


def read_corpus() -> dict[str, dict[str, bytes]]:
    """Return the kept inputs by target and name."""
    kept = json.loads(CORPUS.read_text())
    return {
        target: {name: b64decode(text) for name, text in kept.get(target, {}).items()}
        for target in TARGETS
    }


def write_corpus(inputs: dict[str, dict[str, bytes]]) -> None:
    """Write inputs in the place of those that are kept; same inputs, same bytes."""
    text = {
        target: {name: b64encode(data).decode() for name, data in named.items()}
        for target, named in inputs.items()
    }
    CORPUS.write_text(json.dumps(text, indent=1, sort_keys=True) + "\n")
