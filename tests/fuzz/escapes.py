# SPDX-License-Identifier: Apache-2.0
"""Tell exceptions of vLLM's own lines from exceptions of the feature's lines."""

import traceback
from collections.abc import Callable
from typing import Any

FEATURE = "kv_transfer/kv_checksum/"


def only_in_vllm(function: Callable[..., Any], *args: Any) -> bool:
    """Call a function of vLLM's; whether it raised.

    Raises:
        Exception: the one that was raised, if it passed through the feature.

    """
    try:
        function(*args)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        if any(FEATURE in frame.filename for frame in frames):
            raise
        return True
    return False
