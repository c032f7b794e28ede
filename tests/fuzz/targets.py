# SPDX-License-Identifier: Apache-2.0
"""All targets, by name."""

from pathlib import Path

from .base import Target
from .mooncake import Removals, Responses
from .nixl_push import Notifs, Registrations
from .payloads import Params, Payloads

HERE = Path(__file__).parent
CORPUS, CRASHES = HERE / "corpus", HERE / "crashes"

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (Payloads, Params, Notifs, Registrations, Responses, Removals)
}
