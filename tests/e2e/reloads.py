"""Prompts that a server computes, forgets and loads again from what its connector kept."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from rig import tampering, verdicts
from rig.servers import Server

from e2e import pairs

LENGTH, BLOCK = 200, 32
LOADED = 192
"""Tokens of a prompt of `LENGTH` that can be loaded: whole blocks without its last token."""

MAX_TOKENS = 8

OFFLOADING = {
    "spec_name": "HostOffloading",
    "spec_module_path": "kv_checksum_rig.offloading",
    "cpu_bytes_to_use": 32 << 20,
}
"""OffloadingConnector's own settings on a machine without a GPU."""

HOST_STORE = {"kv_connector_module_path": "kv_checksum_rig.host_store"}
"""Where vLLM finds the rig's connectors that load in the step."""

DAMAGE: dict[str, dict[str, Any]] = {
    "bit_flip": {"block": 2, "layer": 1, "byte": 777, "bit": 3},
    "other_prefix": {"block": 1},
    "stale": {"block": -1},
    "swapped": {"block": 0, "other": 3},
    "half_written": {"block": 4},
}
"""Damage to single blocks of a load, with its settings."""


SMALL = ("--max-model-len", "512", "--num-gpu-blocks-override", "32")
"""Arguments of a server whose cache two long prompts fill."""


def instance(
    name: str,
    connector: str,
    *,
    mode: str = "fail-open",
    extra: dict[str, Any] | None = None,
    transfer: dict[str, Any] | None = None,
    **options: Any,
) -> Server:
    """Make a server that stores what it computes and loads it again, with checksums on and a small cache."""
    options["args"] = (*tampering.AT_REST, *SMALL, *options.get("args", ()))
    options["env"] = {**tampering.DEV, **options.get("env", {})}
    return Server(
        name,
        "kv_both",
        connector=connector,
        transfer={
            "enable_kv_checksum": True,
            **pairs.MODES[mode],
            "kv_connector_extra_config": extra or {},
            **(transfer or {}),
        },
        block_size=BLOCK,
        **options,
    )


@dataclass(frozen=True)
class Answer:
    """What came of one request that nobody else's overlapped.

    Attributes:
        response: the server's answer.
        external: prompt tokens that a connector brought.
        local: prompt tokens that were found in the server's own prefix cache.
        judged: by how much the counts of verdicts grew, by verdict and carrier.
        blocks: the blocks that were loaded, by KV cache group, as the connector told its workers.

    """

    response: httpx.Response
    external: int
    local: int
    judged: dict[tuple[str, str], int]
    blocks: dict[int, list[int]]

    @property
    def text(self) -> str:
        """The completion."""
        return pairs.text_of(self.response)


_asked: Counter[str] = Counter()
_computed: Counter[str] = Counter()
_evicted: Counter[str] = Counter()


def ask(server: Server, prompt: Sequence[int], max_tokens: int = MAX_TOKENS) -> Answer:
    """Ask for a prompt.

    Raises:
        AssertionError: what was loaded has not exactly one verdict.

    """
    _asked[server.name] += 1
    name = f"asked-{_asked[server.name]}-"
    before, external = verdicts.settled(server), pairs.external_tokens(server)
    local = server.metric("vllm:prefix_cache_hits_total")
    response = server.completions(prompt, max_tokens, request_id=name)
    after = verdicts.settled(server)
    judged = {k: n - before.judged.get(k, 0) for k, n in after.judged.items()}
    judged = {k: n for k, n in judged.items() if n}
    loads = [
        groups
        for req_id, groups in tampering.loaded_blocks(server).items()
        if name in req_id
    ]
    judged_loads = [n for (_, by), n in judged.items() if by != verdicts.LOCAL]
    assert sum(judged_loads) == len(loads), (judged, loads)
    return Answer(
        response,
        pairs.external_tokens(server) - external,
        int(server.metric("vllm:prefix_cache_hits_total") - local),
        judged,
        loads[0] if loads else {},
    )


def evict(server: Server) -> None:
    """Fill the cache with prompts that nobody asks for again.

    A reset of the prefix cache would not do: the ledger forgets everything with it, because weights may be others then.
    """
    for _ in range(2):
        _evicted[server.name] += 1
        prompt = pairs.prompt_of(505, _evicted[server.name])
        server.completions(prompt, 1).raise_for_status()


def load_again(server: Server, prompt: Sequence[int]) -> Answer:
    """Ask for a prompt with nothing of it in the server's own prefix cache."""
    evict(server)
    return ask(server, prompt)


@dataclass(frozen=True)
class Computed:
    """A prompt that a server computed once and loaded again unharmed.

    Attributes:
        prompt: its tokens.
        text: the completion.
        contents: what the blocks hold that can be loaded, by KV cache group, in order.

    """

    prompt: list[int]
    text: str
    contents: dict[int, list[tuple[str, ...]]]

    def differing(self, server: Server, answer: Answer) -> dict[int, list[int]]:
        """Return the positions, within the load, of blocks that hold other bytes now, by group."""
        digests = tampering.block_digests(server)
        found = {}
        for group, blocks in answer.blocks.items():
            whole = self.contents[group][-len(blocks) :]
            now = [tampering.contents(digests, block) for block in blocks]
            bad = [n for n, (x, y) in enumerate(zip(now, whole, strict=True)) if x != y]
            if bad:
                found[group] = bad
        return found


def computed(server: Server) -> Computed:
    """Let a server compute a prompt that it has not seen, and load it again.

    A prompt that was once loaded damaged is not used again: what becomes of its blocks is up to whoever saw the damage.

    Raises:
        AssertionError: the load did not bring back, byte by byte, what was computed.

    """
    _computed[server.name] += 1
    prompt = pairs.prompt_of(LENGTH, _computed[server.name])
    empty = tampering.block_digests(server)
    first = ask(server, prompt)
    assert (first.external, first.local) == (0, 0)
    after = tampering.block_digests(server)
    made = {
        tampering.contents(after, block)
        for block in tampering.changed_blocks(empty, after)
    }
    again = load_again(server, prompt)
    assert (again.external, again.local) == (LOADED, 0)
    details = again.response.json()["usage"]["prompt_tokens_details"]
    assert details["cached_tokens"] == LOADED
    assert again.text == first.text
    digests = tampering.block_digests(server)
    contents = {
        group: [tampering.contents(digests, block) for block in blocks]
        for group, blocks in again.blocks.items()
    }
    assert max(map(len, contents.values())) == LOADED // BLOCK
    assert {c for of_group in contents.values() for c in of_group} <= made
    return Computed(prompt, first.text, contents)


def damaged(
    server: Server, kind: str, options: dict[str, Any] | None = None
) -> tuple[Computed, Answer, dict[str, Any]]:
    """Let a server compute a prompt, and load it damaged on its way: what is kept stays as it was.

    Returns:
        The prompt, the answer to the damaged load, and what was damaged.

    """
    known = computed(server)
    settings = {**(options or DAMAGE[kind]), "lasting": False}
    with tampering.damaged_load(server, kind, **settings) as report:
        answer = load_again(server, known.prompt)
    # A request that fails is not counted as one that loaded tokens.
    assert max(map(len, answer.blocks.values())) == LOADED // BLOCK
    return known, answer, report


def block_hashes(prompt: Sequence[int]) -> list[bytes]:
    """Return a prompt's block hashes, as the servers compute them."""
    from vllm.sampling_params import SamplingParams
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
    from vllm.v1.request import Request

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        init_none_hash(sha256)
    hasher = get_request_block_hasher(BLOCK, sha256)
    params = SamplingParams(max_tokens=1)
    request = Request("r", list(prompt), params, None, block_hasher=hasher)
    return list(request.block_hashes)
