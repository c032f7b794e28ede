# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Skip tests of what the vLLM under test does not have."""

from __future__ import annotations

import pytest
from packaging.version import Version

import vllm

RELEASE = Version(vllm.__version__).base_version


def older_than(release: str) -> bool:
    """Tell whether this vLLM came before a release."""
    return Version(RELEASE) < Version(release)


def without(what: str) -> str:
    """Return the reason to skip a test."""
    return f"vLLM {RELEASE} has no {what}"


ON_EVERY_RANK = {} if older_than("0.31.0") else {"max_tp_shards": 1}
"""Arguments of a spec whose cache every TP rank holds whole. Before vLLM 0.31.0 specs
did not declare that; MLA-type ones are held so."""

REPORTED_PUSH = "report of a finished push, so that P keeps its blocks for 30 s"
"""What NIXL push lacks before vLLM 0.31.0, with checksums or without."""


def needs(release: str, what: str) -> pytest.MarkDecorator:
    """Skip tests on a vLLM from before a release, which brought something."""
    return pytest.mark.skipif(older_than(release), reason=without(what))
