# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test what vLLM's NIXL connectors refuse: no load of it asks for a verdict.

Where one of these fails, vLLM transfers what it did not, and the pair belongs to those
of `test_kv_checksum_scheduler` and to the servers' tests.
"""

from contextlib import ExitStack
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.ssm_conv_transfer_utils import (
    derive_mamba_conv_split,
)
from vllm.model_executor.layers.mamba import mamba_utils
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.engine import FinishReason
from vllm.v1.kv_cache_interface import MambaSpec, SlidingWindowSpec

from .rig import caches as u
from .rig import instances as rig
from .rig import real_workers as real
from .rig.versions import older_than

LAYERS_DIFFER = "Number of KV layers must match between prefill and decode"


@pytest.fixture(scope="module")
def side(model):
    """Yield the first stage of a P of two, and a D of one, over real NIXL."""
    with ExitStack() as stack:
        p = real.real_instance(stack, model, "kv_producer", "pull", pp=2)
        closed = dict(kv_checksum_fail_closed=True)
        d = real.real_instance(stack, model, "kv_consumer", "pull", **closed)
        yield SimpleNamespace(p=p, d=d)


def address(p):
    connector = p.scheduler.connector.connector_scheduler
    return connector.side_channel_host, connector.side_channel_port


def test_nixl_pull_refuses_a_producer_of_two_stages_at_the_handshake(side):
    worker = side.d.transport.worker.connector_worker
    host, port = address(side.p)
    engine_id = side.p.scheduler.connector.engine_id
    with pytest.raises(AssertionError, match=LAYERS_DIFFER):
        worker._nixl_handshake(host, port, 1, engine_id, remote_pp_size=2)


def test_a_load_that_nixl_pull_refuses_fails_and_has_no_verdict(side, caplog):
    host, port = address(side.p)
    params = dict(
        do_remote_prefill=True,
        do_remote_decode=False,
        remote_engine_id=side.p.scheduler.connector.engine_id,
        remote_request_id="p-r",
        remote_block_ids=[[3, 4, 5, 6]],
        remote_host=host,
        remote_port=port,
        tp_size=1,
        pp_size=2,
    )
    d = side.d
    request = d.add("r", rig.tokens(100), params)
    real.run(side.p, d, lambda: rig.RequestStatus.is_finished(request.status))
    assert d.results["r"][-1].finish_reason == FinishReason.ERROR
    assert LAYERS_DIFFER in caplog.text
    assert d.stats["loads_started"] == d.stats["loads_failed"] == 1
    assert not any(key.startswith("loads:") for key in d.stats)


def worker_connector(model, role, connector, *groups):
    """Return the connector's worker of the first of two stages."""
    config = rig.vllm_config(model, role, kv_connector=connector, pp=2)
    plan = u.config(50, *groups)
    return KVConnectorFactory.create_connector(config, KVConnectorRole.WORKER, plan)


FULL = (u.names(0, 1), u.full_spec(rig.HEADS, 32, rig.HEAD_SIZE))
WINDOW = SlidingWindowSpec(
    block_size=32,
    num_kv_heads=rig.HEADS,
    head_size=rig.HEAD_SIZE,
    dtype=torch.bfloat16,
    sliding_window=64,
)
STATES = MambaSpec(
    block_size=2048, shapes=((28, 3), (8, 2, 6)), dtypes=(torch.bfloat16,) * 2
)


@pytest.mark.parametrize("connector", ["NixlConnector", "NixlPushConnector"])
def test_nixl_refuses_a_consumer_of_two_stages(model, side, connector):
    message = r"consumer \(decode\) does not support pipeline_parallel_size > 1"
    with pytest.raises(NotImplementedError, match=message):
        worker_connector(model, "kv_consumer", connector, FULL)


@pytest.mark.parametrize(
    ("connector", "group", "message"),
    [
        (
            "NixlConnector",
            (u.names(2, 3), WINDOW),
            r"\(pull\) does not support pipeline_parallel_size > 1 with hybrid",
        ),
        (
            "NixlPushConnector",
            (u.names(8), STATES),
            "does not support pipeline_parallel_size > 1 with Mamba/SSM",
        ),
    ],
    ids=["pull, a window", "push, states"],
)
def test_nixl_refuses_hybrid_producers_of_two_stages(
    model, side, connector, group, message, monkeypatch
):
    if older_than("0.31.0"):
        message = "does not support pipeline_parallel_size > 1 with hybrid"
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", lambda: "DS")
    with pytest.raises(NotImplementedError, match=message):
        worker_connector(model, "kv_producer", connector, FULL, group)


@pytest.mark.parametrize("kind", ["SHORT_CONV", "LINEAR"])
def test_nixl_refuses_states_of_short_convolutions_and_linear_attention(kind):
    """Another connector may transfer them, and then they can be compared."""
    spec = replace(STATES, mamba_type=MambaAttentionBackendEnum[kind])
    with pytest.raises(NotImplementedError, match="only supports Mamba1, Mamba2 and"):
        derive_mamba_conv_split(spec, 1)
