"""Make the servers and prompts of the end-to-end tests and the demo, and read what the servers tell."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx
from kv_checksum.rig.versions import needs, older_than
from rig.metrics import Samples, total
from rig.routing import prefill_decode
from rig.servers import Server

DRILL = "vllm.distributed.kv_transfer.kv_checksum.fault_drill"

CONNECTORS = {
    "nixl_pull": "NixlConnector",
    "nixl_push": "NixlPushConnector",
    "mooncake": "MooncakeConnector",
}
"""By the names under which tests and the demo know them."""

FAULTS = {"flip-": "bit_flip", "lost-": "lost_payload"}
"""Which loads a drilled consumer damages, by the beginning of the request id."""

LATE_FAULT = {"late-": {"kind": "bit_flip", "skip": 9}}
"""A flipped bit in the tenth block of a load."""

UNVERIFIED = {
    "lost_payload": "no_payload",
    "other_version_payload": "payload_version",
    "cut_payload": "bad_payload",
}
"""What payload damage leads to; everything else is a mismatch."""

MODES: dict[str, dict[str, Any]] = {
    "fail-open": {},
    "fail": {"kv_checksum_fail_closed": True, "kv_load_failure_policy": "fail"},
    "recompute": {
        "kv_checksum_fail_closed": True,
        "kv_load_failure_policy": "recompute",
    },
}

VERDICTS = ("verified", "mismatch", "unverified")

TELLS_WHY = not older_than("0.33.0")
"""Whether the client of a failed request reads the reason. Older releases answer every one with their general error."""

GENERAL_ERROR = "Internal server error"

FAILED_STATUS = 503 if TELLS_WHY else 500
"""The HTTP status of a request that fails because of its checksums."""

STREAMS_TELL = not older_than("0.32.0")
"""Whether vLLM ends the stream of a completion that failed with an error, and not without one."""

PUSHES_END_BY_LEASE = older_than("0.31.0")
"""Whether P hears of no NIXL push that is done: it keeps the KV, and its checksums, until the lease ends."""

needs_conv_states = needs(
    "0.31.0", "layout of conv states that NIXL transfers, on a CPU with bf16"
)

MAMBA_IN_FLOAT32 = not older_than("0.32.0")
"""Whether vLLM's CPU kernels run Mamba2 in float32. In bfloat16 their rounding changes the text."""

SAID = {
    "kv_checksum_mismatch": "KV checksum mismatch: ",
    "kv_checksum_unverified": "KV checksums not verified: ",
}
"""How the text begins that such a client reads, by reason."""

LENGTHS = (1, 2, 5, 17, 31, 32, 33, 63, 64, 65, 96, 100, 128, 200, 256, 300, 400)
LENGTHS += (512, 700, 900, 1024, 1200, 1500)


def producer(name: str, model: Any, *, on: bool = True, **kwargs: Any) -> Server:
    """Return a prefill instance, with checksums unless switched off."""
    transfer = {"enable_kv_checksum": True} if on else {}
    return Server(name, "kv_producer", model=model, transfer=transfer, **kwargs)


def consumer(
    name: str,
    model: Any,
    mode: str,
    *,
    drill: bool = True,
    faults: Mapping[str, Any] = FAULTS,
    role: str = "kv_consumer",
    settings: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Server:
    """Return a decode instance with checksums on, in one of `MODES`.

    With `drill`, its connector damages the loads that `faults` names. With the role
    "kv_both" it prefills for others, too. `settings` come on top of the mode's.
    """
    connector = kwargs.setdefault("connector", CONNECTORS["nixl_pull"])
    transfer: dict[str, Any] = {"enable_kv_checksum": True, **MODES[mode]}
    transfer |= settings or {}
    if drill:
        options = {
            "damage_kv_on_purpose": True,
            "connector": connector,
            "faults": dict(faults),
        }
        transfer["kv_connector"] = "KVChecksumFaultDrill"
        transfer["kv_connector_module_path"] = DRILL
        transfer["kv_connector_extra_config"] = {"kv_checksum_fault_drill": options}
    return Server(name, role, model=model, transfer=transfer, **kwargs)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Return a prompt of token ids that repeats nothing of another seed's."""
    draw = random.Random(1000 * length + seed)
    return [draw.randrange(2, 512) for _ in range(length)]


def shared_prefix(length: int, shared: int = 320) -> list[int]:
    """Return a prompt that begins with the same `shared` tokens for every length."""
    return prompt_of(shared, 77) + prompt_of(length - shared, 78)


def every_fault() -> dict[str, str]:
    """Return faults of every kind of damage, by the beginning of the request id."""
    from vllm.distributed.kv_transfer.kv_checksum.fault_drill.damage import (
        KINDS,
        PAYLOAD_KINDS,
    )

    return {f"{kind}-": kind for kind in (*KINDS, *PAYLOAD_KINDS)}


def text_of(response: httpx.Response) -> str:
    """Return the completion's text.

    Raises:
        httpx.HTTPStatusError: the server answered with an error.

    """
    return str(response.raise_for_status().json()["choices"][0]["text"])


def loads(server: Server) -> dict[str, int]:
    """Return how many loads had each verdict, as ``/metrics`` tells."""
    return _loads(server.metrics())


def _loads(page: Samples) -> dict[str, int]:
    name = "vllm:kv_checksum_loads_total"
    return {verdict: int(total(page, name, verdict=verdict)) for verdict in VERDICTS}


def unverified(server: Server, reason: str) -> int:
    """Return how many loads were unverified for this reason."""
    name = "vllm:kv_checksum_unverified_loads_total"
    return int(server.metric(name, reason=reason))


def skipped_groups(server: Server) -> dict[str, int]:
    """Return how many KV cache groups are not checked, by reason; reasons of none left out."""
    return {
        dict(labels)["reason"]: int(value)
        for (name, labels), value in server.metrics().items()
        if name == "vllm:kv_checksum_skipped_groups" and value
    }


def error_object_of(response: httpx.Response) -> dict[str, Any]:
    """Return the error that a failed request's client receives, plain or in a stream."""
    if "text/event-stream" not in response.headers["content-type"]:
        error = response.json()["error"]
        assert response.status_code == error["code"]
    else:
        events = [x.removeprefix("data: ") for x in response.text.splitlines() if x]
        assert response.status_code == 200 and events[-1] == "[DONE]"
        error = json.loads(events[-2])["error"]
        # Below vLLM 0.33.0 a chat begins with an empty content.
        choices = [c for x in events[:-2] for c in json.loads(x).get("choices", ())]
        assert not [
            c for c in choices if c.get("text") or c.get("delta", {}).get("content")
        ]
    assert isinstance(error, dict)
    return error


def error_of(response: httpx.Response) -> str:
    """Return the text that a failed request's client reads, plain or in a stream."""
    return str(error_object_of(response)["message"])


def assert_failed(
    response: httpx.Response, reason: str = "kv_checksum_mismatch", detail: str = ""
) -> None:
    """Check that a client received vLLM's error for failures that are safe to retry.

    It has vLLM's own fields and the reason, and nothing of the hosts or the load. Where vLLM has no place for a reason, it
    is the general error.
    """
    error = error_object_of(response)
    message = error.pop("message")
    if TELLS_WHY:
        assert message.startswith(SAID[reason]) and detail in message
        assert not set(message) & set("0123456789/{[")
        kind = {"type": "ServiceUnavailableError", "reason": reason}
    else:
        assert message == GENERAL_ERROR
        kind = {"type": "InternalServerError"}
    assert error == {**kind, "param": None, "code": FAILED_STATUS}


def reference_texts(
    server: Server, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[str]:
    """Return what a single instance answers, without any transfer."""
    return [text_of(server.completions(p, max_tokens)) for p in prompts]


@dataclass(frozen=True)
class Asked:
    """The outcome of one request that was prefilled on P and decoded on D.

    Attributes:
        answer: D's answer.
        counted: by how much D's counts of verdicts grew, those that did.
        gave_up: whether Mooncake gave the load up by itself.
        external_tokens: prompt tokens that D counted as brought by its connector.
        local_tokens: prompt tokens that D found in its own prefix cache.

    """

    answer: httpx.Response
    counted: dict[str, int]
    gave_up: bool
    external_tokens: int
    local_tokens: int


def ask(
    p: Server,
    d: Server,
    prompt: Sequence[int],
    max_tokens: int,
    request_id: str | None = None,
    route: Callable[..., httpx.Response] = prefill_decode,
    **options: Any,
) -> Asked:
    """Ask for one prompt while nobody else asks, and hold D's counters together.

    What vLLM counts as brought by a connector was a load, and a load that ended
    without a verdict is one that the connector itself reports as failed.
    """
    before = _counters(d)
    answer = route(p, d, prompt, max_tokens, request_id=request_id, **options)
    grown = {k: v - before[k] for k, v in _counters(d).items()}
    counted = {k: grown[k] for k in VERDICTS if grown[k]}
    gave_up = bool(grown["given up"])
    if d.checks_loads:
        assert grown["failed"] == grown["given up"], grown
        assert grown["started"] == sum(counted.values()) + grown["failed"], grown
        assert grown["started"] == 1 or not grown["external"], grown
    return Asked(answer, counted, gave_up, grown["external"], grown["local"])


def _counters(d: Server) -> dict[str, int]:
    page = d.metrics()
    return {
        **_loads(page),
        "started": int(total(page, "vllm:kv_checksum_loads_started_total")),
        "failed": int(total(page, "vllm:kv_checksum_loads_failed_total")),
        "external": _external_tokens(page),
        "local": int(total(page, "vllm:prefix_cache_hits_total")),
        "given up": given_up(d),
    }


def given_up(d: Server) -> int:
    """Return how many loads Mooncake gave up, as D's log tells.

    On a busy machine its engine fails a transfer now and then (it returns -1). Then
    vLLM fails or recomputes the load, and nothing is there to be judged.
    """
    lines = re.findall(r"pulling kv_caches for \[(.*)\] failed", d.log_text())
    return sum(line.count(",") + 1 for line in lines)


def ask_anew(
    p: Server,
    d: Server,
    prompts: Iterable[Sequence[int]],
    max_tokens: int,
    request_id: str | None = None,
    **options: Any,
) -> tuple[Asked, str]:
    """Ask for the first of the prompts, and for the next while Mooncake gives loads up.

    Returns:
        What came of the last, and the text that a single instance answers.

    """
    for prompt in prompts:
        (expected,) = reference_texts(p, [prompt], max_tokens)
        asked = ask(p, d, prompt, max_tokens, request_id, **options)
        if not asked.gave_up:
            return asked, expected
    raise AssertionError(f"{d.name}: Mooncake gave up every load")


def prompts_of(length: int, seed: int) -> list[list[int]]:
    """Return prompts for `ask_anew` where what was recomputed must not be found again."""
    return [prompt_of(length, seed + 1_000_003 * n) for n in range(5)]


def assert_late_fault_is_recomputed(p: Server, d: Server, max_tokens: int) -> None:
    """Check a load that `LATE_FAULT` damages, then the same prompt's second turn."""
    for attempt, prompt in enumerate(prompts_of(450, 61)):
        second = prompt + prompt_of(90, 62)
        request_id = f"late-{attempt}"
        expected = reference_texts(p, [prompt, second], max_tokens)
        asked = [
            ask(p, d, prompt, max_tokens, request_id),
            ask(p, d, second, max_tokens),
        ]
        assert [text_of(a.answer) for a in asked] == expected
        if not any(a.gave_up for a in asked):
            break
    assert [a.counted for a in asked] == [{"mismatch": 1}, {"verified": 1}]
    (line,) = [
        x
        for x in d.log_text().splitlines()
        if "KV checksum mismatch" in x and request_id in x
    ]
    assert f"recomputing from token {9 * d.block_size}" in line


def assert_followers_are_right(
    p: Server, d: Server, request_id: str, seed: int, max_tokens: int, good: int = 0
) -> None:
    """Check a load that D damages and serves, then five requests that share its prefix.

    D is fail-open. Of the damaged load, the next request may find the first `good`
    tokens in D's prefix cache, and nobody may answer from the others.
    """
    shared = prompt_of(112, seed)

    def asked_for(
        prompt: list[int], request_id: str | None = None
    ) -> tuple[Asked, bool]:
        """Return what came of a request, and whether the answer is that of a single instance."""
        right = likelihoods(p.completions(prompt, max_tokens, logprobs=1))
        asked, text = ask_anew(p, d, [prompt] * 5, max_tokens, request_id, logprobs=1)
        found = likelihoods(asked.answer)
        near = all(abs(x - y) < 0.1 for x, y in zip(found, right, strict=True))
        return asked, near and text_of(asked.answer) == text

    damaged, is_right = asked_for(shared, request_id)
    assert damaged.counted == {"mismatch": 1}
    assert not is_right, "the damage does not show: another seed"
    for n in range(5):
        asked, is_right = asked_for(shared + prompt_of(30 * n, seed + 1))
        assert asked.counted == {"verified": 1}, n
        assert is_right, n
        assert n or asked.local_tokens <= good


def likelihoods(response: httpx.Response) -> list[float]:
    """Return the log-probability of each token of a completion."""
    choice = response.raise_for_status().json()["choices"][0]
    return [float(x) for x in choice["logprobs"]["token_logprobs"]]


def pending_loads(server: Server) -> int:
    """Return how many loads wait for their end."""
    sizes = server.checksum_tables().items()
    return sum(n for name, n in sizes if name.endswith("KVChecksumScheduler._recvs"))


def wait(holds: Callable[[], bool], what: str, timeout: float = 60) -> None:
    """Wait until something holds, or fail."""
    until = time.monotonic() + timeout
    while not holds():
        assert time.monotonic() < until, f"{what}: not within {timeout} s"
        time.sleep(0.2)


def external_tokens(server: Server) -> int:
    """Return how many prompt tokens came from another instance, as vLLM counts them."""
    return _external_tokens(server.metrics())


def _external_tokens(page: Samples) -> int:
    name = "vllm:prompt_tokens_by_source_total"
    return int(total(page, name, source="external_kv_transfer"))
