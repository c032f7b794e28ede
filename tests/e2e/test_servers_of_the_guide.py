"""Start the servers of the operators' guide as its ``vllm serve`` lines have them, and see their loads verified.

What a machine without a GPU needs is added (the rig's model, ports and memory), and nothing is taken away.
``test_drill_of_the_docs.py`` runs those of the drill.
"""

from __future__ import annotations

import copy
import json
import shlex
import time
from dataclasses import dataclass
from typing import Any

import pytest
from rig import documents, tampering, verdicts
from rig.model import tiny_qwen3
from rig.mooncake_store import MooncakeStore
from rig.routing import prefill
from rig.servers import NIXL, Server, free_port, serving

from e2e import pairs, reloads

pytestmark = pytest.mark.e2e

slow = pytest.mark.slow

MAX_TOKENS = 4

HASHES = {"PYTHONHASHSEED": "0"}
"""What the guide sets so that instances name blocks alike."""

Settings = dict[str, Any]


@dataclass(frozen=True)
class Line:
    """A ``vllm serve`` line of the guide.

    Attributes:
        settings: its ``--kv-transfer-config``.
        environment: the names of the variables that stand before it.

    """

    settings: Settings
    environment: tuple[str, ...]

    @property
    def connector(self) -> str:
        """The connector's name."""
        return str(self.settings["kv_connector"])


def lines_of(block: documents.Block) -> list[Line]:
    """Return the ``vllm serve`` lines of a block."""
    words = shlex.split(block.text)
    starts = [n for n, word in enumerate(words) if word == "serve"]
    lines = []
    for start, end in zip(starts, [*starts[1:], len(words)], strict=True):
        before = start - 1
        assert words[before] == "vllm"
        names = []
        while before and "=" in words[before - 1] and "{" not in words[before - 1]:
            before -= 1
            names.append(words[before].split("=")[0])
        config = words[words.index("--kv-transfer-config", start, end) + 1]
        lines.append(Line(json.loads(config), tuple(names)))
    return lines


BLOCKS = [
    lines_of(block)
    for block in documents.blocks("bash", "gpu")
    if "FaultDrill" not in block.text
]


def named(*connectors: str, extra: str | None = None) -> list[Line]:
    """Return the lines of the one block with these connectors, and with a key of the connector's own settings."""
    (found,) = [
        lines
        for lines in BLOCKS
        if tuple(x.connector for x in lines) == connectors
        and tuple(lines[0].settings.get("kv_connector_extra_config", {}))
        == ((extra,) if extra else ())
    ]
    return found


def started(
    line: Line,
    forks: Any,
    role: str | None = None,
    *,
    number: int = 0,
    extra: Settings | None = None,
    **options: Any,
) -> Server:
    """Return the server of a line, or, with `role`, its partner with the same settings.

    `extra` takes the place of the connector's own settings.
    """
    settings = {**line.settings, **({"kv_role": role} if role else {})}
    role = settings["kv_role"]
    name = f"guide-{line.connector}-{role}-{number}"
    if extra is not None:
        settings["kv_connector_extra_config"] = extra
    server = Server(
        name,
        role,
        model=tiny_qwen3(),
        connector=line.connector,
        transfer=settings,
        fork_server=forks,
        **options,
    )
    assert set(line.environment) <= set(server.environment())
    return server


def assert_says_that_it_checks(server: Server) -> None:
    log = server.log_text()
    assert "KV checksums are on" in log and "KV checksums cover KV cache groups" in log


def test_every_block_of_the_guide_is_run_here():
    """Fail where a ``vllm serve`` line comes to the guide that no test starts."""
    tested = [
        named("NixlConnector", "NixlConnector"),
        named("NixlConnector", "NixlConnector", extra="bidirectional_kv_xfer"),
        named("NixlPushConnector", "MooncakeConnector"),
        named("MooncakeStoreConnector"),
        named("MultiConnector", extra="connectors"),
        named("OffloadingConnector", extra="cpu_bytes_to_use"),
    ]
    assert sorted(map(str, tested)) == sorted(map(str, BLOCKS))


@slow
def test_enabling(forks):
    p, d = (started(x, forks) for x in named("NixlConnector", "NixlConnector"))
    with serving(p, d):
        asked = pairs.ask(p, d, pairs.prompt_of(100, 1), MAX_TOKENS, "enabled")
        assert asked.counted == {"verified": 1}
        for server in (p, d):
            assert_says_that_it_checks(server)


@slow
def test_what_d_sends_back(forks):
    """P loads from D what is longer than vLLM's threshold, which the guide leaves as it is."""
    lines = named("NixlConnector", "NixlConnector", extra="bidirectional_kv_xfer")
    p, d = (started(line, forks) for line in lines)
    with serving(p, d):
        prompt = pairs.prompt_of(100, 2)
        params = prefill(p, prompt, request_id="turn")
        options = {"return_token_ids": True, "ignore_eos": True}
        answer = d.completions(prompt, 120, params, request_id="turn", **options)
        told = answer.raise_for_status().json()
        second = [*prompt, *told["choices"][0]["token_ids"], 7, 8]
        back = p.completions(second, 1, told["kv_transfer_params"], request_id="back")
        assert back.status_code == 200
        for server in (p, d):
            loads = verdicts.settled(server)
            assert loads.judged["verified", "kv_transfer_params"] == loads.started == 1


@slow
@pytest.mark.parametrize("which", [0, 1], ids=["push", "mooncake"])
def test_connectors_that_carry_checksums_themselves(forks, which):
    line = named("NixlPushConnector", "MooncakeConnector")[which]
    p, d = started(line, forks, "kv_producer"), started(line, forks)
    with serving(p, d):
        prompts = pairs.prompts_of(100, 3)
        asked, expected = pairs.ask_anew(p, d, prompts, MAX_TOKENS, "carried")
        assert pairs.text_of(asked.answer) == expected
        assert asked.counted == {"verified": 1}
        assert_says_that_it_checks(d)


@slow
def test_a_store_alone_and_beside_p_and_d(forks, tmp_path):
    (alone,) = named("MooncakeStoreConnector")
    (multi,) = named("MultiConnector", extra="connectors")
    with MooncakeStore(tmp_path) as store:
        a, b = (in_store(alone, store, forks, n) for n in (0, 1))
        p, d = (in_store(multi, store, forks, n) for n in (0, 1))
        with serving(a, b, p, d):
            asked = pairs.ask(p, d, pairs.prompt_of(300, 4), MAX_TOKENS, "both")
            assert asked.counted == {"verified": 1}
            assert verdicts.settled(d).judged["verified", "kv_transfer_params"] == 1
            for stores, loads in ((a, b), (p, d)):
                assert_loads_what_another_stored(stores, loads)
                assert_says_that_it_checks(loads)


def in_store(line: Line, store: MooncakeStore, forks: Any, number: int) -> Server:
    """Return an instance of a store's client, with ports of its own, and NIXL as the rig needs it."""
    extra = copy.deepcopy(line.settings.get("kv_connector_extra_config", {}))
    for inside in extra.get("connectors", ()):
        if inside["kv_connector"].startswith("Nixl"):
            inside |= NIXL
        else:
            inside["kv_connector_extra_config"] = {"lookup_rpc_port": free_port()}
    if line.connector == "MooncakeStoreConnector":
        extra["lookup_rpc_port"] = free_port()
    return started(
        line, forks, number=number, extra=extra, env={**store.environment, **HASHES}
    )


def assert_loads_what_another_stored(stores: Server, loads: Server) -> None:
    """Ask both for new prompts until one is loaded: an instance stores after it has answered."""
    for seed in range(5):
        prompt = pairs.prompt_of(300, 10 + seed)
        expected = pairs.text_of(stores.completions(prompt, MAX_TOKENS))
        time.sleep(1)
        assert pairs.text_of(loads.completions(prompt, MAX_TOKENS)) == expected
        found = verdicts.settled(loads).judged
        if found.get(("verified", "stored"), 0):
            return
    raise AssertionError(f"nothing was loaded from the store: {found}")


@slow
def test_offloading(forks):
    """The host's memory is the rig's share of it, and the rig copies the blocks, as there is no GPU's stream."""
    (line,) = named("OffloadingConnector", extra="cpu_bytes_to_use")
    server = started(
        line,
        forks,
        extra=reloads.OFFLOADING,
        args=(*tampering.AT_REST, *reloads.SMALL),
        env=tampering.DEV,
    )
    with serving(server):
        reloads.computed(server)
        assert verdicts.settled(server).judged["verified", "ledger"] == 1
        assert_says_that_it_checks(server)
