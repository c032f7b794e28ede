# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""A connector that damages chosen loads, to try alarms before they count."""

from vllm.distributed.kv_transfer.kv_checksum.fault_drill.connector import (
    KVChecksumFaultDrill,
)

__all__ = ["KVChecksumFaultDrill"]
