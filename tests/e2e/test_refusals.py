"""Test that a refusal by fail-closed ends the process: `vllm serve` returns in seconds, and says why.

All at the same time. One of those that the configuration refuses is plain `vllm serve`,
nothing of it forked; the others are forked from one process that imported vLLM (rig only).
"""

from __future__ import annotations

from typing import Any

import pytest
from rig.families import tiny
from rig.model import tiny_qwen3
from rig.mooncake_store import MooncakeStore
from rig.servers import Server

from e2e import pairs

pytestmark = pytest.mark.e2e

BOUND_S = 120
"""All of them together, on a busy machine of two cores."""

CLOSED = {
    "enable_kv_checksum": True,
    "kv_checksum_ledger_blocks": 0,
    **pairs.MODES["fail"],
}

NIXL_CHILD = {
    "kv_connector": "NixlConnector",
    "kv_role": "kv_both",
    "kv_buffer_device": "cpu",
}
OFFLOADING_CHILD = {
    "kv_connector": "OffloadingConnector",
    "kv_role": "kv_both",
    "kv_connector_extra_config": {"cpu_bytes_to_use": 32 << 20},
}

CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "multi": ("MultiConnector", {"connectors": [NIXL_CHILD, OFFLOADING_CHILD]}),
    "offloading": ("OffloadingConnector", {"cpu_bytes_to_use": 32 << 20}),
    "example": ("ExampleConnector", {"shared_storage_path": "unused"}),
}
"""Connector and its extra configuration, refused before any process is started."""

NAMED = {
    "multi": "OffloadingConnector",
    "offloading": "OffloadingConnector",
    "example": "ExampleConnector",
}


def servers_of_every_refusal(store, forks):
    for name, (connector, extra) in CONFIGURATIONS.items():
        yield Server(
            f"refused-{name}",
            "kv_both",
            model=tiny_qwen3(),
            connector=connector,
            transfer={**CLOSED, "kv_connector_extra_config": extra},
            fork_server=None if name == "multi" else forks,
        )
    for processes in "01":
        yield store.instance(
            f"refused-window-{processes}",
            "kv_both",
            model=tiny("gemma3"),
            transfer=CLOSED,
            env={"VLLM_ENABLE_V1_MULTIPROCESSING": processes},
            fork_server=forks,
        )
        yield store.instance(
            f"refused-declined-{processes}",
            "kv_both",
            model=tiny_qwen3(),
            transfer=CLOSED,
            env={
                "VLLM_ENABLE_V1_MULTIPROCESSING": processes,
                "KV_CHECKSUM_RIG_SKIP_RANK": "0",
            },
            fork_server=forks,
        )


@pytest.fixture(scope="module")
def ended(forks, tmp_path_factory):
    """Yield each server's exit status and log, by name, once it has ended by itself."""
    with MooncakeStore(tmp_path_factory.mktemp("mooncake")) as store:
        servers = [x.start() for x in servers_of_every_refusal(store, forks)]
        try:
            yield {
                server.name.removeprefix("refused-"): (
                    server.wait_ended(BOUND_S),
                    server.log_text(),
                )
                for server in servers
            }
        finally:
            for server in servers:
                server.stop()


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_connector_that_nobody_checks_is_refused_from_the_configuration(name, ended):
    status, log = ended[name]
    assert status not in (0, None)
    (reason,) = {x for x in log.splitlines() if "kv_checksum_fail_closed is set" in x}
    assert f"{NAMED[name]} neither carries nor stores KV checksums" in reason
    assert f"or take {NAMED[name]} out of the configuration" in reason
    assert "Unset kv_checksum_fail_closed in --kv-transfer-config" in reason
    assert "NixlConnector" not in reason
    assert "EngineCore" not in log, "the engine was started"


@pytest.mark.parametrize("processes", "01")
def test_a_store_of_a_windowed_model_is_refused_once_its_groups_are_known(
    processes, ended
):
    status, log = ended[f"window-{processes}"]
    assert status not in (0, None)
    lines = [x for x in log.splitlines() if "kv_checksum_fail_closed is set" in x]
    assert lines, log[-3000:]
    assert all("MooncakeStoreConnector stores no KV checksums" in x for x in lines)
    assert all("take MooncakeStoreConnector out" in x for x in lines)
    assert "KV checksums are on" not in log


@pytest.mark.parametrize("processes", "01")
def test_a_store_whose_worker_declines_is_refused_once_its_caches_are_there(
    processes, ended
):
    status, log = ended[f"declined-{processes}"]
    assert status not in (0, None)
    lines = [x for x in log.splitlines() if "kv_checksum_fail_closed is set" in x]
    assert lines, log[-3000:]
    reason = "MooncakeStoreConnector stores no KV checksums: KV cache group 0: "
    assert all(reason in x for x in lines)
    assert "KV checksums are on" not in log
