# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Verify every KV block that is loaded from elsewhere by its checksum.

    checksum      the definition, and the records that carry partial sums
    payload       the message from a producer to a consumer
    verdict       the outcome of comparing a load
    stored        checksums that are stored with offloaded KV
    support       which set-ups are covered, and why others are not
    metrics       counters on /metrics
    info          a description of the instance, on /metrics too
    naming        requests and blocks in log lines
    jit           numba, for the kernel of the CPU and the ledger's table
    worker/       reads caches and sums their blocks (kernels/: one per device)
    scheduler/    asks for sums, compares them, and handles the consequences
    connectors/   the part of single connectors
    fault_drill/  a connector that damages loads on purpose
    testing/      tells authors of connectors what theirs does wrong

Imports run one way: the modules here know none of the folders, the folders know these,
and `fault_drill` and `testing` know them all. Names are resolved on first use:
connectors import `payload` while the modules that need connectors are still being
loaded.
"""

from importlib import import_module
from typing import Any

_HOME = {
    "MAX_KV_HEADS_PER_LAYER": "checksum",
    "ReplicaKey": "checksum",
    "KVChecksumBlocks": "checksum",
    "KVChecksumScheduled": "checksum",
    "KVChecksumGroup": "checksum",
    "KVChecksumRecord": "checksum",
    "KVChecksumCarrier": "payload",
    "KVChecksumWorker": "worker",
    "KVChecksumOutput": "worker",
    "create_kv_checksum_worker": "worker.factory",
    "KVChecksumScheduler": "scheduler",
    "KV_TRANSFER_PARAMS_KEY": "payload",
    "create_kv_checksum_scheduler": "scheduler.factory",
    "KVChecksumProm": "metrics",
    "export_kv_checksum_info": "info",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
