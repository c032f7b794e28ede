# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test the suite for authors of connectors: right ones pass, broken ones are named."""

import pytest

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_checksum.testing import (
    ConnectorFactory,
    assert_conforms,
)

from .rig.authors import folder, memory


@pytest.fixture
def factory(tmp_path):
    """Return a function that describes a connector of one of the authors' modules."""

    def describe(connector, carrier="CONNECTOR", **extra):
        made = ConnectorFactory()
        made.connector = connector.__name__
        made.module_path = connector.__module__
        made.extra_config = {"folder": str(tmp_path), "store": str(tmp_path), **extra}
        made.carrier = KVChecksumCarrier[carrier]
        return made

    return describe


@pytest.mark.parametrize(
    ("connector", "carrier", "extra"),
    [
        (folder.FolderConnector, "CONNECTOR", {}),
        (memory.MemoryConnector, "STORED", {}),
        (memory.UnstoredConnector, "LEDGER", {}),
        (memory.UnstoredConnector, "LEDGER", {"sync": True}),
    ],
)
def test_right_connectors_conform(factory, connector, carrier, extra):
    assert_conforms(factory(connector, carrier, **extra))
