# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Tell authors of connectors, in words, what theirs does wrong with KV checksums.

    checks         runs a connector through the suite
    transfers      cases for connectors from producer to consumer
    tiers          cases for connectors that keep KV and load it back
    suite          starts instances, runs requests, collects problems
    diagnosis      tells from what was seen of a load what is wrong
    problems       the names of problems, and what to do
    factory        describes a connector to the suite
    instance       one vLLM instance in this process, watched
    forward        stands in for a model
    configuration  vLLM's configuration of such an instance
    process        process groups, and the end of worker sides

Nothing that serves imports it. `docs/design/connectors.md` explains its use.
"""

from vllm.distributed.kv_transfer.kv_checksum.testing.checks import (
    assert_conforms,
    check_connector,
)
from vllm.distributed.kv_transfer.kv_checksum.testing.factory import ConnectorFactory
from vllm.distributed.kv_transfer.kv_checksum.testing.problems import Fault, Problem

__all__ = [
    "ConnectorFactory",
    "Fault",
    "Problem",
    "assert_conforms",
    "check_connector",
]
