# SPDX-License-Identifier: Apache-2.0
"""All targets, by name."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
CORPUS, CRASHES = HERE / "corpus", HERE / "crashes"

helpers = str(HERE.parent / "v1/kv_connector/unit")
if helpers not in sys.path:
    sys.path.append(helpers)

from .base import Target  # noqa: E402
from .mooncake import Removals, Responses  # noqa: E402
from .nixl_push import Notifs, Registrations  # noqa: E402
from .payloads import Params, Payloads  # noqa: E402

TARGETS: dict[str, type[Target]] = {
    target.name: target
    for target in (Payloads, Params, Notifs, Registrations, Responses, Removals)
}
