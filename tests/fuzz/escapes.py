# SPDX-License-Identifier: Apache-2.0
"""Telling what vLLM's own lines raise from what the feature's raise."""

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
