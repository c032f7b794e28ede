"""Servers of the end-to-end tests and the demo, prompts, and what is read of them."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import httpx
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

LENGTHS = (1, 2, 5, 17, 31, 32, 33, 63, 64, 65, 96, 100, 128, 200, 256, 300, 400)
LENGTHS += (512, 700, 900, 1024, 1200, 1500)


def producer(name: str, model: Any, *, on: bool = True, **kwargs: Any) -> Server:
    """A prefill instance, with checksums unless switched off."""
    transfer = {"enable_kv_checksum": True} if on else {}
    return Server(name, "kv_producer", model=model, transfer=transfer, **kwargs)


def consumer(
    name: str,
    model: Any,
    mode: str,
    *,
    drill: bool = True,
    faults: Mapping[str, Any] = FAULTS,
    **kwargs: Any,
) -> Server:
    """A decode instance with checksums on, in one of `MODES`.

    With `drill`, its connector damages the loads that `faults` names.
    """
    connector = kwargs.setdefault("connector", CONNECTORS["nixl_pull"])
    transfer: dict[str, Any] = {"enable_kv_checksum": True, **MODES[mode]}
    if drill:
        options = {
            "damage_kv_on_purpose": True,
            "connector": connector,
            "faults": dict(faults),
        }
        transfer["kv_connector"] = "KVChecksumFaultDrill"
        transfer["kv_connector_module_path"] = DRILL
        transfer["kv_connector_extra_config"] = {"kv_checksum_fault_drill": options}
    return Server(name, "kv_consumer", model=model, transfer=transfer, **kwargs)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """A prompt of token ids that repeats nothing of another seed's."""
    draw = random.Random(1000 * length + seed)
    return [draw.randrange(2, 512) for _ in range(length)]


def shared_prefix(length: int, shared: int = 320) -> list[int]:
    """A prompt that begins with the same `shared` tokens for every length."""
    return prompt_of(shared, 77) + prompt_of(length - shared, 78)


def every_fault() -> dict[str, str]:
    """Faults of every kind of damage, by the beginning of the request id."""
    from vllm.distributed.kv_transfer.kv_checksum.fault_damage import (
        KINDS,
        PAYLOAD_KINDS,
    )

    return {f"{kind}-": kind for kind in (*KINDS, *PAYLOAD_KINDS)}


def text_of(response: httpx.Response) -> str:
    """The completion's text.

    Raises:
        httpx.HTTPStatusError: the server answered with an error.
    """
    return str(response.raise_for_status().json()["choices"][0]["text"])


def loads(server: Server) -> dict[str, int]:
    """How many loads had each verdict, as ``/metrics`` tells."""
    return {
        verdict: int(server.metric("vllm:kv_checksum_loads_total", verdict=verdict))
        for verdict in ("verified", "mismatch", "unverified")
    }


def unverified(server: Server, reason: str) -> int:
    """How many loads were unverified for this reason."""
    name = "vllm:kv_checksum_unverified_loads_total"
    return int(server.metric(name, reason=reason))


def skipped_groups(server: Server) -> dict[str, int]:
    """How many KV cache groups are not checked, by reason; reasons of none left out."""
    return {
        dict(labels)["reason"]: int(value)
        for (name, labels), value in server.metrics().items()
        if name == "vllm:kv_checksum_skipped_groups" and value
    }


def error_of(response: httpx.Response) -> str:
    """What a failed request's client reads, plain or in a stream."""
    if "text/event-stream" not in response.headers["content-type"]:
        return str(response.json()["error"]["message"])
    events = [x.removeprefix("data: ") for x in response.text.splitlines() if x]
    assert events[-1] == "[DONE]"
    return str(json.loads(events[-2])["error"]["message"])


def reference_texts(
    server: Server, prompts: Sequence[Sequence[int]], max_tokens: int
) -> list[str]:
    """What a single instance answers, without any transfer."""
    return [text_of(server.completions(p, max_tokens)) for p in prompts]


def assert_late_fault_is_recomputed(p: Server, d: Server, max_tokens: int) -> None:
    """A load that `LATE_FAULT` damages, then the same prompt's second turn."""
    prompt = prompt_of(450, 61)
    second = prompt + prompt_of(90, 62)
    expected = reference_texts(p, [prompt, second], max_tokens)
    before = loads(d)
    answers = [
        prefill_decode(p, d, prompt, max_tokens, request_id="late-1"),
        prefill_decode(p, d, second, max_tokens, request_id="second-1"),
    ]
    assert [text_of(answer) for answer in answers] == expected
    counted = {k: v - before[k] for k, v in loads(d).items()}
    assert counted == {"verified": 1, "mismatch": 1, "unverified": 0}
    (line,) = [
        x
        for x in d.log_text().splitlines()
        if "KV checksum mismatch" in x and "late-1" in x
    ]
    assert f"recomputing from token {9 * d.block_size}" in line


def external_tokens(server: Server) -> int:
    """How many prompt tokens came from another instance, as vLLM counts them."""
    name = "vllm:prompt_tokens_by_source_total"
    return int(server.metric(name, source="external_kv_transfer"))
