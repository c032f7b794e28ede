# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Damage chosen loads on purpose, to try alarms before they are needed."""

from vllm.distributed.kv_transfer.kv_checksum.fault_drill.connector import (
    KVChecksumFaultDrill,
)

__all__ = ["KVChecksumFaultDrill"]
