"""Test the first pull request: the patches up to NIXL pull are whole by themselves.

No later patch is there: the damage comes from a connector of the rig.
"""

from __future__ import annotations

import pytest
from rig.model import CACHE, tiny_qwen3
from rig.servers import Server, fork_server, serving
from rig.stock import link_patched_vllm

from e2e import pairs
from vllm_kv_checksum.series import PATCHES

pytestmark = pytest.mark.e2e

NUMBER = 1 + [patch.name for patch in PATCHES].index("nixl-pull")
MAX_TOKENS = 4


@pytest.fixture(scope="module")
def patched(tmp_path_factory):
    site = tmp_path_factory.mktemp("site")
    link_patched_vllm(site, NUMBER)
    feature = site / "vllm/distributed/kv_transfer/kv_checksum"
    assert (feature / "scheduler").is_dir() and not (feature / "connectors").exists()
    env = {"PYTHONPATH": str(site)}
    with fork_server(CACHE / "logs" / "first-patches", env) as forks:
        yield {"fork_server": forks, "env": env}


def test_nixl_pull_verifies_and_finds_a_flipped_bit(patched):
    model = tiny_qwen3()
    connector = pairs.CONNECTORS["nixl_pull"]
    p = pairs.producer("first-p", model=model, connector=connector, **patched)
    flip = {"group": 0, "prefix": "flipped-", "flip": True}
    transfer = {
        "enable_kv_checksum": True,
        **pairs.MODES["fail"],
        "kv_connector": f"Lossy{connector}",
        "kv_connector_module_path": "kv_checksum_rig.damaged_nixl",
        "kv_connector_extra_config": {"lost_block": flip},
    }
    d = Server(
        "first-d",
        "kv_consumer",
        model=model,
        connector=connector,
        transfer=transfer,
        **patched,
    )
    with serving(p, d):
        prompt = pairs.prompt_of(150, 1)
        asked, expected = pairs.ask_anew(p, d, [prompt] * 5, MAX_TOKENS, "whole")
        assert asked.counted == {"verified": 1}
        assert pairs.text_of(asked.answer) == expected
        prompt = pairs.prompt_of(150, 2)
        asked, _ = pairs.ask_anew(p, d, [prompt] * 5, MAX_TOKENS, "flipped-one")
        assert asked.counted == {"mismatch": 1}
        pairs.assert_failed(asked.answer)
        (line,) = [x for x in d.log_text().splitlines() if "KV checksum mismatch:" in x]
        assert "flipped-one" in line and "position 0" in line
