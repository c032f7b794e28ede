"""Test a hybrid of states, a window and full attention whose groups lag behind each other on D.

D holds the whole prefix of a second prompt in full attention, and nothing of it in the
window's group or as a state. NIXL loads what each group lacks: of the window's group it
begins one block before full attention's local hit ends.
"""

from __future__ import annotations

import pytest
from kv_checksum_rig.damaged_nixl import SAYS
from rig.families import tiny
from rig.servers import Server, serving

from e2e import pairs

pytestmark = [pytest.mark.e2e, pairs.needs_conv_states]

MAX_TOKENS = 6
DTYPE = "float32" if pairs.MAMBA_IN_FLOAT32 else "bfloat16"

WINDOW_GROUP, FULL_GROUP = 2, 3

ARGS = ("--enable-prefix-caching", "--mamba-cache-mode", "align")


@pytest.fixture(params=["nixl_pull", "nixl_push"])
def pair(request, forks):
    connector = pairs.CONNECTORS[request.param]
    common = {
        "model": tiny("nemotron_h", DTYPE),
        "connector": connector,
        "dtype": DTYPE,
        "args": ARGS,
        # vLLM sets it for NIXL by name.
        "env": {"VLLM_SSM_CONV_STATE_LAYOUT": "DS"},
        "fork_server": forks,
    }
    p = pairs.producer(f"lag-{request.param}-p", **common)
    lost = {"group": WINDOW_GROUP, "prefix": "lost-"}
    transfer = {
        "enable_kv_checksum": True,
        **pairs.MODES["fail"],
        "kv_connector": f"Lossy{connector}",
        "kv_connector_module_path": "kv_checksum_rig.damaged_nixl",
        "kv_connector_extra_config": {"lost_block": lost},
    }
    d = Server(f"lag-{request.param}-d", "kv_consumer", transfer=transfer, **common)
    with serving(p, d):
        yield p, d


def test_a_block_that_a_lagging_group_alone_loads_is_checked(pair):
    p, d = pair
    (covered,) = [x for x in d.log_text().splitlines() if "checksums cover" in x]
    assert f"{WINDOW_GROUP} (SlidingWindowSpec" in covered
    assert f"{FULL_GROUP} (FullAttentionSpec" in covered and "0 (MambaSpec" in covered
    block = block_size(d)
    for n, kind in enumerate(("clean", "lost")):
        first = pairs.prompt_of(9 * block + 20, n)
        second = first[: 6 * block + 30] + pairs.prompt_of(20, n)
        expected = pairs.reference_texts(p, [first, second], MAX_TOKENS)
        asked = pairs.ask(p, d, first, MAX_TOKENS)
        assert asked.counted == {"verified": 1}
        assert_text(asked, expected[0])
        asked = pairs.ask(p, d, second, MAX_TOKENS, f"{kind}-second")
        assert asked.local_tokens == 6 * block, "D's full attention did not run ahead"
        if kind == "clean":
            assert asked.counted == {"verified": 1}
            assert_text(asked, expected[1])
    assert asked.counted == {"mismatch": 1}
    pairs.assert_failed(asked.answer)
    log = d.log_text().splitlines()
    assert sum(SAYS in line and "lost-second" in line for line in log) == 1
    (line,) = [x for x in log if "KV checksum mismatch" in x]
    # One block before the ones that full attention loads.
    assert f"group {WINDOW_GROUP}: 1 of 2 blocks differ, position 5" in line


def assert_text(asked: pairs.Asked, expected: str):
    """Check an answer, where rounding does not change it."""
    text = pairs.text_of(asked.answer)
    assert text == expected or not pairs.MAMBA_IN_FLOAT32


def block_size(server: Server) -> int:
    """Return the tokens per block of attention, which vLLM sets so that a state fits into it."""
    (line,) = [x for x in server.log_text().splitlines() if "attention block size" in x]
    return int(line.partition("attention block size to ")[2].split()[0])
