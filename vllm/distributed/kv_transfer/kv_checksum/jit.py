# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Compile functions with numba."""

from collections.abc import Callable
from typing import Any

import numba


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a function that holds no GIL; keep the code on disk where possible."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # There is no folder to cache in.
        return numba.njit(nogil=True)(function)
