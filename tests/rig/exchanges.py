"""Replay what routers ask of P and of D, from exchanges that are written down (``tests/e2e/data/routers.json``)."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from typing import Any

import httpx
from kv_checksum.rig.versions import older_than
from pydantic import BaseModel, ConfigDict, Field

from rig.model import CACHE
from rig.routing import Params, Prompt, mooncake_engine_id
from rig.servers import HOST, SERVED_NAME, Server

FILE = CACHE.parent / "tests" / "e2e" / "data" / "routers.json"

CLIENT = {"min_tokens": 2, "stream_options": {"include_usage": True}}
"""What the client asked for beyond the prompt and the number of tokens; routers take it apart."""


STREAMS_HOLD_PARAMS = not older_than("0.33.0")
"""Whether the stream of a completion holds P's parameters. What asks its engine without HTTP has them on every release."""


class Strict(BaseModel):
    """Refuse keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Half(Strict):
    """What a router asks of one side.

    Attributes:
        without: keys of the client's request that it takes out.
        with_: keys that it sets.
        headers: what it sends beside the request id.
        keeps_answer: whether the parameters that P returned are kept; or those of them that are.
        written_as_go_does: whether they pass through Go's JSON.
        kv_transfer_params: what it sets, on top of those.

    """

    without: tuple[str, ...] = ()
    with_: dict[str, Any] = Field(default={}, alias="with")
    headers: dict[str, str] = {}
    keeps_answer: bool | tuple[str, ...] = False
    written_as_go_does: bool = False
    kv_transfer_params: Params = {}

    def params(
        self, answer: Mapping[str, Any], names: Mapping[str, Any]
    ) -> Params | None:
        """Return the transfer parameters; None if there are none."""
        kept = answer if self.keeps_answer else {}
        if isinstance(self.keeps_answer, tuple):
            kept = {key: answer[key] for key in self.keeps_answer if key in answer}
        if self.written_as_go_does:
            kept = as_go(kept)
        return {**kept, **_filled(self.kv_transfer_params, names)} or None


class Exchange(Strict):
    """One request through one router; ``becomes`` is what D counts it as, or "no load"."""

    router: str
    source: str
    connector: str
    at_once: bool = False
    asks_p: Half
    asks_d: Half
    becomes: str


def read() -> list[Exchange]:
    """Return the exchanges that are written down; a key that means nothing is an error."""
    return [Exchange.model_validate(entry) for entry in json.loads(FILE.read_text())]


def as_go(value: Mapping[str, Any]) -> Params:
    """Return what a Go program makes of a JSON object: keys sorted, numbers through float64."""
    text = json.dumps(value)
    as_floats = json.loads(text, parse_int=lambda digits: int(float(digits)))
    result: Params = json.loads(json.dumps(as_floats, sort_keys=True))
    return result


def replay(
    exchange: Exchange,
    p: Server,
    d: Server,
    prompt: Prompt,
    max_tokens: int,
    *,
    request_id: str,
) -> httpx.Response:
    """Do as the router did; return D's answer, streamed or not (`text_of`). Raises ``httpx.HTTPStatusError``."""
    names = _names(p, request_id)
    request = prompt, max_tokens, request_id
    told: list[Params] = []

    def prefill() -> None:
        asks = exchange.asks_p
        if not STREAMS_HOLD_PARAMS:
            asks = asks.model_copy(update={"with_": {**asks.with_, "stream": False}})
        answer = _ask(p, asks, *request, asks.params({}, names))
        told.extend(part.get("kv_transfer_params") or {} for part in _parts(answer))

    prefilling = threading.Thread(target=prefill)
    prefilling.start()
    if not exchange.at_once:
        prefilling.join()
    known = told[-1] if told else {}
    try:
        params = exchange.asks_d.params(known, names)
        return _ask(d, exchange.asks_d, *request, params)
    finally:
        prefilling.join()
        assert told, f"{p.name} gave no answer"


def text_of(answer: httpx.Response) -> str:
    """Return the text of a completion, streamed or not."""
    parts = _parts(answer)
    return "".join(choice["text"] for part in parts for choice in part["choices"])


def _names(p: Server, request_id: str) -> dict[str, Any]:
    """Return what stands for the names that begin with a dollar."""
    mooncake = p.connector == "MooncakeConnector"
    return {
        "$request_id": request_id,
        "$p.host": HOST,
        "$p.side_channel_port": int(p.env.get("VLLM_NIXL_SIDE_CHANNEL_PORT", 0)),
        "$p.bootstrap": f"http://{HOST}:{p.bootstrap_port}",
        "$p.engine_id": mooncake_engine_id(p)
        if mooncake
        else p.transfer.get("engine_id"),
    }


def _filled(params: Params, names: Mapping[str, Any]) -> Params:
    filled = {}
    for key, value in params.items():
        if isinstance(value, str) and "$" in value:
            before, _, name = value.partition("$")
            value = f"{before}{names['$' + name]}" if before else names[value]
        filled[key] = value
    return filled


def _ask(
    server: Server,
    ask: Half,
    prompt: Prompt,
    max_tokens: int,
    request_id: str,
    params: Params | None,
) -> httpx.Response:
    """Ask one server as a router does whose client asked for `CLIENT`."""
    body = {"max_tokens": max_tokens, "stream": False, **CLIENT}
    body = {k: v for k, v in body.items() if k not in ask.without} | ask.with_
    if not body["stream"]:  # Then the client did not ask for them.
        body.pop("stream_options", None)
    if params is not None:
        body["kv_transfer_params"] = params
    return server.post(
        "/v1/completions",
        headers={"X-Request-Id": request_id, **ask.headers},
        model=SERVED_NAME,
        prompt=prompt,
        temperature=0,
        **body,
    ).raise_for_status()


def _parts(answer: httpx.Response) -> list[dict[str, Any]]:
    """Return the answer, or the events of it in a stream."""
    if "text/event-stream" not in answer.headers["content-type"]:
        return [answer.json()]
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert lines[-1] == "[DONE]", lines[-1]
    return [json.loads(line) for line in lines[:-1]]
