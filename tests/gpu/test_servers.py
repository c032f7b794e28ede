"""Test two servers on one CUDA card: NIXL pull, CUDA graphs on, every wait for the device an error."""

from __future__ import annotations

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from e2e import pairs
from rig.model import tiny_qwen3
from rig.routing import prefill_decode
from rig.servers import ENVIRONMENT, Server, serving

pytestmark = pytest.mark.e2e

ON_CPUS_ALONE = {
    "TRITON_INTERPRET",
    "TORCHDYNAMO_DISABLE",
    "OMP_NUM_THREADS",
    "UCX_TLS",
    *(name for name in ENVIRONMENT if name.startswith("VLLM_CPU")),
}


class OnCard(Server):
    """A server on the card, with the settings that the rig's CPUs need left out."""

    def command(self) -> list[str]:
        return [part for part in super().command() if part != "--enforce-eager"]

    def environment(self) -> dict[str, str]:
        env = super().environment()
        kept = {k: v for k, v in env.items() if k not in ON_CPUS_ALONE}
        return {**kept, "VLLM_GPU_SYNC_CHECK": "error"}


def server(name: str, role: str, **transfer: object) -> OnCard:
    transfer = {"enable_kv_checksum": True, "kv_buffer_device": "cuda", **transfer}
    return OnCard(name, role, model=tiny_qwen3(), block_size=16, transfer=transfer)


def drilled(name: str) -> OnCard:
    options = {
        "damage_kv_on_purpose": True,
        "connector": "NixlConnector",
        "faults": dict(pairs.FAULTS),
    }
    return server(
        name,
        "kv_consumer",
        kv_connector="KVChecksumFaultDrill",
        kv_connector_module_path=pairs.DRILL,
        kv_connector_extra_config={"kv_checksum_fault_drill": options},
        **pairs.MODES["fail"],
    )


def test_clean_loads_are_verified_and_damaged_ones_refused():
    p, d = server("gpu-p", "kv_producer"), drilled("gpu-d")
    lengths = (17, 100, 333, 1024)
    with serving(p, d):
        for length in lengths:
            answer = prefill_decode(p, d, pairs.prompt_of(length), 8)
            assert answer.status_code == 200
        assert pairs.loads(d) == {
            "verified": len(lengths),
            "mismatch": 0,
            "unverified": 0,
        }
        damaged = prefill_decode(p, d, pairs.prompt_of(200, 3), 8, request_id="flip-1")
        assert damaged.status_code >= 500
        assert pairs.loads(d)["mismatch"] == 1
    for log in (p.log_text(), d.log_text()):
        assert "KV checksums are on" in log
