# SPDX-License-Identifier: Apache-2.0
"""Replay the corpus, and every input that once broke something, under the fuzzer's oracle."""

import gc
from collections import Counter
from random import Random

import pytest
from kv_checksum.rig import reference

from fuzz.base import check, quiet
from fuzz.loads import LONG, PROMPT, Load, prompt_digest
from fuzz.payloads import FEWER, RIGHT, Longest, Payloads
from fuzz.targets import CORPUS, TARGETS, read_corpus, write_corpus
from vllm.distributed.kv_transfer.kv_checksum import payload as wire


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage():
    """Freeze what was imported, as vLLM's engine does: it takes 0.4 s of CPU to look through."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    return TARGETS[request.param]()


def test_every_kept_input(target):
    inputs = read_corpus()[target.name] | target.long_seeds()
    assert len(inputs) > 5
    for name, data in inputs.items():
        with quiet() as lines:
            try:
                check(target, data, lines, memory=False)
                check(target, data, lines, memory=True)
            except Exception as error:
                error.add_note(f"input {name}")
                raise


@pytest.mark.parametrize("number", [0, 1, 2, 99, 100, LONG - 1, LONG])
def test_digests_by_added_up_terms(number):
    assert prompt_digest(number) == reference.prompt_digest(PROMPT[:number])


@pytest.mark.parametrize("seed", range(4))
def test_invented_payloads(seed):
    random, target, outcomes = Random(seed), Payloads(), Counter()
    for _ in range(200):
        data = target.invent(random)
        assert wire.decode(data)
        with quiet() as lines:
            outcome, _ = check(target, data, lines, memory=False)
        outcomes.update(outcome.split("+"))
    assert min(outcomes[name] for name in ("verified", "mismatch")) > 20


@pytest.mark.parametrize(("name", "data"), Longest().seeds().items())
def test_the_longest_payloads_are_decoded_and_compared_within_the_bounds(name, data):
    target = Longest()
    assert len(data) <= wire.MAX_PAYLOAD_BYTES and wire.decode(data)
    for memory in (False, True):
        with quiet() as lines:
            outcome, _ = check(target, data, lines, memory=memory)
    assert outcome == ("unverified" if "groups" in name else "verified")


@pytest.mark.parametrize("by_params", [False, True])
def test_right_payloads_are_verified(by_params):
    """The oracle would agree with a consumer that verifies nothing else."""
    for case, data in RIGHT.items():
        params = {wire.KV_TRANSFER_PARAMS_KEY: wire.encode_text(wire.decode(data))}
        load = Load(case, by_params)
        arguments = (params,) if by_params else ({}, data)
        assert load.run(*arguments).outcome == "verified"
    for case, data in FEWER.items():
        params = {wire.KV_TRANSFER_PARAMS_KEY: wire.encode_text(wire.decode(data))}
        load = Load(case, by_params)
        arguments = (params,) if by_params else ({}, data)
        assert (load.run(*arguments).outcome == "verified") == by_params


def test_the_corpus_holds_what_the_encoders_say_now(target):
    kept = read_corpus()[target.name]
    for name, data in target.seeds().items():
        assert kept.get(name) == data, f"{name}: run make_corpus.py"


def test_the_corpus_is_small():
    assert CORPUS.stat().st_size < 250_000


def test_the_corpus_written_again_is_the_same():
    before = CORPUS.read_bytes()
    write_corpus(read_corpus())
    assert CORPUS.read_bytes() == before
