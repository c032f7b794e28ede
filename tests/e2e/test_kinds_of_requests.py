"""Load KV for requests of every kind that vLLM serves: each load has one end, and a client learns of a bad one.

NIXL pull; what other carriers do with plain requests is in ``test_carriers.py``. The servers are forked from one process
that imported vLLM (rig only).
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from rig import spans, verdicts
from rig.model import tiny_qwen3
from rig.routing import prefill
from rig.servers import SERVED_NAME, serving

from e2e import pairs

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
REASON = "kv_checksum_mismatch"
TEXT = "KV checksum mismatch: "

FAULTS = {
    "flip": "bit_flip",
    "generate-tokens-flip": "bit_flip",
    "1_cmpl-one-of-several": "bit_flip",
}
"""vLLM puts its own words in front of some requests' ids: of several answers to one request, their numbers."""


@pytest.fixture(scope="module")
def collector():
    with spans.collecting() as running:
        yield running


@pytest.fixture(scope="module")
def servers(forks, collector):
    """Yield P, and a D that fails requests with a bad load, by priority."""
    p = pairs.producer("kinds-p", tiny_qwen3(), fork_server=forks)
    d = pairs.consumer(
        "kinds-d",
        tiny_qwen3(),
        "fail",
        faults=FAULTS,
        fork_server=forks,
        env=spans.ENVIRONMENT,
        args=(
            *("--chat-template", TEMPLATE, "--scheduling-policy", "priority"),
            *("--otlp-traces-endpoint", collector.endpoint, "--enable-scale-out"),
        ),
    )
    with serving(p, d):
        yield p, d


def grown(d, before):
    """Return the verdicts that were counted since, of loads that have all ended."""
    after = verdicts.settled(d)
    judged = Counter(after.judged)
    judged.subtract(before.judged)
    assert after.under_way == 0
    ended = sum(judged.values()) + after.failed + after.aborted
    assert after.started - before.started == ended - before.failed - before.aborted
    return {verdict: n for (verdict, _), n in judged.items() if n}


def of_messages(prompt):
    return {"messages": [{"role": "user", "content": prompt}], "max_tokens": 4}


ENDPOINTS = {
    "/v1/chat/completions": of_messages,
    "/v1/chat/completions/batch": lambda prompt: (
        of_messages(prompt) | {"messages": [of_messages(prompt)["messages"]]}
    ),
    "/v1/messages": of_messages,
    "/v1/responses": lambda prompt: {"input": prompt, "max_output_tokens": 4},
    "/inference/v1/generate": lambda prompt: {
        "token_ids": prompt,
        "sampling_params": {"max_tokens": 4},
    },
}


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_endpoint_tells_a_client_that_it_may_retry(servers, path, stream):
    if stream and "batch" in path:
        pytest.skip("vLLM streams no batches")
    p, d = servers
    for kind, verdict in (("flip", "mismatch"), ("good", "verified")):
        request_id = f"{kind}{path.replace('/', '-')}-{stream}"
        prompt = f"{request_id} the quick brown fox jumps over the lazy dog" * 3
        if "generate" in path:
            prompt = d.post("/tokenize", model=SERVED_NAME, prompt=prompt)
            prompt = prompt.json()["tokens"]
        before = verdicts.settled(d)
        params = prefill(p, prompt, request_id=request_id)
        answer = d.post(
            path,
            headers={"X-Request-Id": request_id},
            model=SERVED_NAME,
            request_id=request_id,
            kv_transfer_params=params,
            **({"stream": True} if stream else {}),
            **ENDPOINTS[path](prompt),
        )
        assert grown(d, before) == {verdict: 1}
        if kind == "good":
            assert answer.status_code == 200 and TEXT not in answer.text
        else:
            assert_may_retry(answer, path, stream)


def assert_may_retry(answer, path, stream):
    """Check what the client reads: the endpoint's own form of an error that is safe to retry."""
    assert answer.status_code == (200 if stream else 503)
    data = [x.removeprefix("data: ") for x in answer.text.splitlines() if "{" in x]
    told = json.loads(data[-1])
    if path == "/v1/messages":
        assert told["type"] == "error"
        assert told["error"].pop("type") == "overloaded_error"
        assert set(told["error"]) == {"message"}
        told = told["error"]
    elif stream and path == "/v1/responses":
        assert "\nevent: error\n" in answer.text
        assert told["type"] == "error" and told["code"] == REASON
        assert told["sequence_number"] == 2
    else:
        told = told["error"]
        assert (told["code"], told["reason"]) == (503, REASON)
        assert told["type"] == "ServiceUnavailableError"
    assert told["message"].startswith(TEXT)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "streamed"])
def test_each_of_several_answers_has_its_own_load(servers, collector, stream):
    p, d = servers
    options = {"n": 2, "temperature": 1.0, "stream": stream, "ignore_eos": True}

    def ask(name, seed):
        prompt, request_id = pairs.prompt_of(100, seed + stream), f"{name}-{stream}"
        before = verdicts.settled(d)
        params = prefill(p, prompt, request_id=request_id)
        answer = d.completions(prompt, 3, params, request_id=request_id, **options)
        return answer, grown(d, before), f"cmpl-{request_id}"

    answer, found, name = ask("good", 20)
    assert answer.status_code == 200 and TEXT not in answer.text
    assert found == {"verified": 2}
    told = collector.request_spans(name, 2)
    assert [x["vllm.kv_checksum.verdict"] for x in told] == ["verified"] * 2

    # The second one's load is bad. vLLM ends the other, whose load may not have ended yet.
    answer, found, name = ask("one-of-several", 30)
    assert_may_retry(answer, "/v1/completions", stream)
    assert found["mismatch"] == 1 and found.get("verified", 0) <= 1
    assert set(found) <= {"mismatch", "verified"}
    spans_of = collector.request_spans(name, 2, timeout=5)
    told = [x.get("vllm.kv_checksum.verdict") for x in spans_of]
    assert told.count("mismatch") == 1


def test_requests_of_every_priority_and_those_that_clients_leave(servers):
    p, d = servers
    before = verdicts.settled(d)
    status = Counter()

    def ask(number):
        prompt = pairs.prompt_of(900, number)
        params = prefill(p, prompt, request_id=f"p-priority-{number}")
        name = f"{'flip' if number % 5 == 4 else 'good'}-priority-{number}"
        options = {"request_id": name, "priority": number % 3}
        if number % 4 != 3:
            status[d.completions(prompt, 20, params, **options).status_code] += 1
            return
        with contextlib.suppress(httpx.ReadTimeout):
            options |= {"patience_s": 0.05}
            with d.streamed(prompt, 40, params, **options) as answer:
                for _ in answer.iter_lines():
                    pass

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    counted = grown(d, before)
    assert status == {200: 9, 503: 3}
    assert counted["verified"] >= 9 and counted["mismatch"] == 3
    assert verdicts.settled(d).started - before.started <= 16


def test_beam_search_loads_nothing(servers):
    """Know it if vLLM passes parameters on to beams one day: it drops them, and computes the prompt."""
    p, d = servers
    prompt, before = pairs.prompt_of(100, 30), verdicts.settled(d)
    params = prefill(p, prompt, request_id="beams")
    options = {"use_beam_search": True, "n": 2}
    answer = d.completions(prompt, 3, params, request_id="flip-beams", **options)
    assert answer.status_code == 200 and grown(d, before) == {}


def test_ten_thousand_invented_peers_have_sixty_four_names(servers):
    p, d = servers
    prompt = pairs.prompt_of(20, 40)  # shorter than a block, so that it is loaded again
    params = prefill(p, prompt, request_id="invented")
    del params["kv_checksums"]
    assert d.completions(prompt, 1, params).status_code == 503  # now they are connected

    def invent(number):
        invented = {**params, "remote_host": f"host-{number}"}
        return d.completions(prompt, 1, invented).status_code

    before = verdicts.settled(d)
    with ThreadPoolExecutor(8) as clients:
        assert set(clients.map(invent, range(10_000))) == {503}
    assert grown(d, before) == {"unverified": 10_000}
    name = "vllm:kv_checksum_peer_loads_total"
    shown = {labels: n for (x, labels), n in d.metrics().items() if x == name}
    peers = {(dict(x)["peer_engine"], dict(x)["peer_host"]) for x in shown}
    assert len(peers) == 65 and ("other", "other") in peers
    assert d.metric(name, verdict="unverified") == 10_001
    assert d.log_text().count("peers sent loads that were not verified") == 1
