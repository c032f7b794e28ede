"""Do a router's part between P and D, per connector: whom it asks when, and with which parameters."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import Any

import httpx

from rig.servers import HOST, Server

Prompt = str | Sequence[int]
Params = dict[str, Any]
Ranks = tuple[int | None, int | None]


def prefill(p: Server, prompt: Prompt, *, request_id: str, **body: Any) -> Params:
    """Do the prefill half of a NIXL request; return the transfer parameters for the decode half."""
    remote = dict.fromkeys(
        ("remote_engine_id", "remote_block_ids", "remote_host", "remote_port")
    )
    params = {"do_remote_decode": True, "do_remote_prefill": False, **remote}
    answer = (
        p.completions(prompt, 1, params, request_id=request_id, **body)
        .raise_for_status()
        .json()
    )
    received: Params = answer["kv_transfer_params"]
    return received


def prefill_decode(
    p: Server,
    d: Server,
    prompt: Prompt,
    max_tokens: int,
    *,
    request_id: str | None = None,
    merged: Params | None = None,
    p_prompt: Prompt | None = None,
    ranks: Ranks = (None, None),
    **body: Any,
) -> httpx.Response:
    """Prefill on ``p``, decode on ``d`` as ``p``'s connector wants it; return ``d``'s response, whatever its status.

    ``merged`` is added to the parameters that ``d`` gets, as a router may do that merges parameters. ``p_prompt``
    is what ``p`` is asked instead, as by a router that mixes requests up. ``ranks`` are the data parallel ranks
    that are asked.
    """
    shared = request_id or str(uuid.uuid4())
    route = _at_once if p.connector == "MooncakeConnector" else _one_by_one
    prompts = (prompt if p_prompt is None else p_prompt, prompt)
    return route(p, d, prompts, ranks, max_tokens, shared, merged or {}, body)


def _one_by_one(
    p: Server,
    d: Server,
    prompts: tuple[Prompt, Prompt],
    ranks: Ranks,
    max_tokens: int,
    shared: str,
    merged: Params,
    body: Params,
) -> httpx.Response:
    """Hand everything that P returned to D (NIXL). Push mode matches the two by their equal X-Request-Id."""
    answer = prefill(p, prompts[0], request_id=shared, dp_rank=ranks[0])
    return d.completions(
        prompts[1],
        max_tokens,
        {**answer, **merged},
        request_id=shared,
        dp_rank=ranks[1],
        **body,
    )


def _at_once(
    p: Server,
    d: Server,
    prompts: tuple[Prompt, Prompt],
    ranks: Ranks,
    max_tokens: int,
    shared: str,
    merged: Params,
    body: Params,
) -> httpx.Response:
    """Ask P and D at the same time, with one transfer id (Mooncake); P's bootstrap server tells its engine id."""
    ask_p, ask_d = mooncake_params(p, ranks[0])
    answers: list[httpx.Response] = []
    prefilling = threading.Thread(
        target=lambda: answers.append(
            p.completions(prompts[0], 1, ask_p, request_id=shared, dp_rank=ranks[0])
        )
    )
    ask_d |= merged
    prefilling.start()
    try:
        answer = d.completions(
            prompts[1],
            max_tokens,
            ask_d,
            request_id=shared,
            dp_rank=ranks[1],
            **body,
        )
    finally:
        prefilling.join()
    for answered in answers:
        answered.raise_for_status()
    return answer


def mooncake_params(p: Server, rank: int | None = None) -> tuple[Params, Params]:
    """Return the transfer parameters of P's and of D's half of one Mooncake request, in whatever order they are asked."""
    # P remembers a transfer for a while: its id must not come from a client.
    transfer = {"transfer_id": f"xfer-{uuid.uuid4()}"}
    ask_p = {"do_remote_decode": True, "do_remote_prefill": False, **transfer}
    ask_d = {
        "do_remote_decode": False,
        "do_remote_prefill": True,
        "remote_bootstrap_addr": f"http://{HOST}:{p.bootstrap_port}",
        "remote_engine_id": mooncake_engine_id(p, rank or 0),
        **transfer,
    }
    return ask_p, ask_d


def mooncake_engine_id(p: Server, rank: int = 0) -> str:
    """Return the engine id under which a rank's Mooncake workers are registered with P's bootstrap server."""
    url = f"http://{HOST}:{p.bootstrap_port}/query"
    page = httpx.get(url, trust_env=False, timeout=10).raise_for_status().json()
    found: str = page[str(rank)]["engine_id"]
    return found
