# SPDX-License-Identifier: Apache-2.0
"""The corpus and every input that once broke something, with the fuzzer's oracle."""

import gc
from collections import Counter
from random import Random

import pytest
from kv_checksum.rig import reference

from fuzz.base import check, quiet
from fuzz.loads import LONG, PROMPT, Load, prompt_digest
from fuzz.payloads import FEWER, RIGHT, Longest, Payloads
from fuzz.targets import CORPUS, CRASHES, TARGETS
from vllm.distributed.kv_transfer.kv_checksum import payload as wire


@pytest.fixture(scope="module", autouse=True)
def imports_are_no_garbage():
    """As in vLLM's engine: what was imported takes 0.4 s of CPU to look through."""
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module", params=TARGETS)
def target(request):
    return TARGETS[request.param]()


def kept(target) -> dict[str, bytes]:
    folders = CORPUS / target.name, CRASHES / target.name
    files = [path for folder in folders for path in sorted(folder.glob("*"))]
    found = {f"{path.parent.parent.name}/{path.name}": path for path in files}
    return {name: path.read_bytes() for name, path in found.items()}


def test_every_kept_input(target):
    inputs = kept(target) | target.long_seeds()
    assert inputs
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
    on_disk = kept(target)
    for name, data in target.seeds().items():
        assert on_disk.get(f"corpus/{name}") == data, f"{name}: run make_corpus.py"


def test_the_corpus_is_small():
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 200_000
