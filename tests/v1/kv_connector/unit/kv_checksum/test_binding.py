# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test that a payload counts for one prompt, its inputs and its embeddings alone."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from vllm.distributed.kv_transfer.kv_checksum.scheduler.binding import (
    inputs_digest,
    prompt_digests,
)
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.engine import FinishReason

from .rig import caches as u
from .rig import instances as rig
from .rig import reference
from .rig.instances import MODES, load, pair, tokens


def digest(ids, number=None):
    request = u.Request(prompt_token_ids=ids)
    return prompt_digests(request, len(ids) if number is None else number).whole


# ---- digests


@pytest.mark.parametrize("number", [1, 2, 3, 16, 16_383, 16_384, 16_385, 50_001])
def test_the_digest_of_a_prompt(number):
    ids = [(i * 7919) % 151_000 for i in range(number)]
    assert digest(ids) == reference.prompt_digest(ids)
    request = u.Request(prompt_token_ids=ids)
    assert prompt_digests(request, number) == reference.prompt_digests(ids)
    assert digest([*ids, 3, 4], number) == digest(ids)
    assert 0 < digest(ids) < 2**64


def test_it_tells_prompts_apart():
    base = tokens(64)
    others = [base[:63], base[1:], base[::-1], [*base[:63], base[63] + 1], [*base, 0]]
    others += [[0] * n for n in range(1, 8)] + [[*base[:20], 0, *base[20:63]]]
    assert len({digest(ids) for ids in [base, *others]}) == len(others) + 1


def test_a_shorter_prompt_is_another_one_whatever_the_rest_is():
    """Tokens 0 add nothing to the sum."""
    assert digest([5, 6], 4) != digest([5, 6, 0, 0], 4)


@pytest.mark.parametrize("token", [-1, -(2**63), 2**32, 2**70])
def test_numbers_that_are_no_token_ids_raise_nothing(token):
    """No instance computes KV of them; the scheduler must outlive them."""
    ids = [*range(40), token]
    low = [*range(40), token % 2**32]
    assert digest(ids) == reference.prompt_digest(low)
    assert digest(ids, 40) == reference.prompt_digest(low[:40])


def test_it_is_the_same_in_every_process():
    code = (
        "from types import SimpleNamespace as N\n"
        "from vllm.distributed.kv_transfer.kv_checksum.scheduler.binding import *\n"
        "r = N(prompt_embeds=None, prompt_token_ids=list(range(99)),\n"
        "      mm_features=[], lora_request=N(lora_name='a'))\n"
        "print(*prompt_digests(r, 99), inputs_digest(r, 99))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            capture_output=True,
            text=True,
            check=True,
            env={"PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    whole, beginning = reference.prompt_digests(list(range(99)))
    assert found == {f"{whole} {beginning} {LORA_A}\n"}


LORA_A = inputs_digest(u.Request(lora_request=SimpleNamespace(lora_name="a")), 99)


def image(identifier, offset, length=4):
    return MultiModalFeatureSpec(
        data=None,
        modality="image",
        identifier=identifier,
        mm_position=PlaceholderRange(offset=offset, length=length),
    )


def test_the_digest_of_other_inputs():
    def of(*images, lora=None, number=50):
        lora = lora and LoRARequest(lora, 1, "/x")
        request = u.Request(mm_features=list(images), lora_request=lora)
        return inputs_digest(request, number)

    assert of() == 0
    assert of(image("a", 60)) == 0, "behind what was computed"
    kinds = [
        of(image("a", 3)),
        of(image("b", 3)),
        of(image("a", 4)),
        of(image("a", 3, 5)),
        of(image("a", 3), image("b", 9)),
        of(lora="one"),
        of(lora="two"),
        of(image("a", 3), lora="one"),
    ]
    assert len(set(kinds)) == len(kinds) and 0 not in kinds
    assert of(image("a", 3)) == of(image("a", 3), image("b", 60))


# ---- loads


def answer_with(p, d, p_prompt, d_prompt, req_id="r", **changes):
    """Load D's request with what P answered for another prompt."""
    params = rig.prefill(p, f"p-{req_id}", p_prompt)
    request = d.add(req_id, d_prompt, params, max_tokens=2)
    for name, value in changes.items():
        setattr(request, name, value)
    return request, d.run(request, p)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("p_number", "d_number"), [(100, 100), (98, 100), (100, 98)])
def test_another_prompt_is_a_mismatch_of_the_whole_load(
    model, transport, mode, p_number, d_number, log
):
    p, d = pair(model, None, MODES[mode], transport=transport)
    params = rig.prefill(p, "p", tokens(p_number, 1))
    request = d.add("r", tokens(d_number, 2), params, max_tokens=2)
    while not request.num_output_tokens and not request.is_finished():
        p.step()
        d.step(p)
    if mode != "fail":
        assert d.answer_kv_is_right(request) == (mode == "recompute")
    out = d.run(request, p) if mode != "fail" else d.results["r"][-1]
    assert d.loads("mismatch") == d.stats["other_prompts"] == 1
    assert sum(n for k, n in d.stats.items() if k.startswith("loads:")) == 1
    (line,) = [x for x in log if x.startswith("ERROR KV checksum mismatch")]
    assert "another request's KV" in line and "request r," in line
    expected = FinishReason.ERROR if mode == "fail" else FinishReason.LENGTH
    assert out.finish_reason == expected


@pytest.mark.parametrize(
    ("number", "outcome"),
    [(100, "verified"), (99, "unverified"), (97, "unverified"), (95, "mismatch")],
)
def test_a_prompt_that_ends_earlier_is_the_beginning_of_the_producer_s(
    model, transport, number, outcome
):
    """Of its last unit, P holds more tokens; a whole unit less is another prompt."""
    p, d = pair(model, transport=transport)
    prompt = tokens(100)
    answer_with(p, d, prompt, prompt[:number])
    assert d.loads(outcome) == 1
    assert d.stats.get("unverified:num_tokens", 0) == (outcome == "unverified")


def test_its_kv_is_kept_from_later_requests(model, transport):
    p, d = pair(model, transport=transport)
    prompt = tokens(100, 2)
    answer_with(p, d, tokens(100, 1), prompt)
    right = []
    d.loaded = lambda req_id, ids: right.append(
        d.answer_kv_is_right(d.scheduler.requests[req_id])
    )
    for i in range(3):
        answer_with(p, d, prompt, prompt, f"later{i}")
    # The first of them loads it all, and the others find that.
    assert (d.loads("mismatch"), d.loads("verified")) == (1, 3) and all(right)
    assert d.stats["blocks_compared"] == 7 + 1 + 1


def test_local_blocks_of_such_a_load_stay(model, transport):
    """What was found locally is right; what was loaded behind it is not."""
    p, d = pair(model, transport=transport)
    prompt = tokens(100, 2)
    load(p, d, 48, "warm", prompt=prompt[:48])
    answer_with(p, d, [*prompt[:48], *tokens(52, 3)], prompt)
    d.stats.clear()
    load(p, d, 100, "again", prompt=prompt)
    assert d.loads("verified") == 1 and d.stats["blocks_compared"] == 7 - 3


def test_two_prompts_of_one_request_share_one_answer(model, transport):
    """A batch request of two prompts, of which P answers for one alone."""
    p, d = pair(model, transport=transport)
    first, second = tokens(100, 1), tokens(100, 2)
    params = rig.prefill(p, "p", first)
    d.add("r0", second, dict(params))
    d.add("r1", first, dict(params))
    for _ in range(9):
        p.step()
        d.step(p)
    assert d.loads("mismatch") == 1


@pytest.mark.parametrize(
    ("theirs", "ours", "verified"),
    [
        (dict(mm_features=[image("a", 3)]), dict(mm_features=[image("a", 3)]), True),
        (dict(mm_features=[image("a", 3)]), dict(mm_features=[image("b", 3)]), False),
        (dict(mm_features=[image("a", 3)]), {}, False),
        (
            dict(lora_request=LoRARequest("one", 1, "/x")),
            dict(lora_request=LoRARequest("one", 2, "/y")),
            True,
        ),
        (
            dict(lora_request=LoRARequest("one", 1, "/x")),
            dict(lora_request=LoRARequest("two", 1, "/x")),
            False,
        ),
        (dict(prompt_embeds="embeddings"), {}, False),
        ({}, dict(prompt_embeds="embeddings"), False),
        (dict(prompt_embeds="embeddings"), dict(prompt_embeds="embeddings"), True),
    ],
)
def test_other_inputs_are_unverified(
    model, transport, theirs, ours, verified, log, monkeypatch
):
    """Give inputs as requests hold them when payloads are made and compared."""
    p, d = pair(model, transport=transport)
    for instance, changes in ((p, theirs), (d, ours)):
        comparison = instance.scheduler.kv_checksum._judging.comparison
        for name in ("make_payload", "judge"):
            set_before(monkeypatch, comparison, name, changes)
    load(p, d, 100)
    assert d.loads("verified" if verified else "unverified") == 1
    assert d.stats.get("unverified:inputs", 0) == (not verified)
    unbound = verified and "prompt_embeds" in ours
    assert d.stats.get("prompts_not_bound", 0) == unbound
    warned = [x for x in log if x.startswith("WARNING KV checksums cannot tell")]
    assert len(warned) == unbound


def set_before(monkeypatch, comparison, name, changes):
    call = getattr(type(comparison), name)

    def changed(self, request, *args):
        for field, value in changes.items() if self is comparison else ():
            monkeypatch.setattr(request, field, value)
        return call(self, request, *args)

    monkeypatch.setattr(type(comparison), name, changed)
