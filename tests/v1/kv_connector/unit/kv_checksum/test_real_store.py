# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test instances that store in and load from a real Mooncake store or host memory.

Real: schedulers, both sides of vLLM's connectors with their threads and lookup channel,
`ActiveKVConnector`, the store. What is fake: the forward, and the events of a device.
"""

import time
from contextlib import ExitStack
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
import zmq
from rig.mooncake_store import MooncakeStore, key

from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.data import ReqMeta
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    MooncakeStoreConnectorMetadata,
)

from .rig import caches as u
from .rig import instances as rig
from .rig import real_workers as real
from .rig import reference
from .rig.instances import tokens

SIZE = real.BLOCK_SIZE
_numbers = count()


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    with MooncakeStore(tmp_path_factory.mktemp("mooncake")) as store:
        yield store


@pytest.fixture(scope="module")
def pair(store, model):
    """Yield two instances that share the store, both with checksums on."""
    with ExitStack() as stack:
        stack.enter_context(real.without_a_device())
        yield [real.storing_instance(stack, model, store) for _ in range(2)]


@pytest.fixture(autouse=True)
def fresh(pair):
    for instance in pair:
        instance.stats.clear()


def run(instance, request):
    """Step until the request ended and what it stores is stored; its last output."""
    end = time.monotonic() + 20
    while not request.is_finished():
        assert time.monotonic() < end, request.status
        instance.step()
        time.sleep(0.001)
    worker_of(instance).kv_send_thread.request_queue.join()
    return instance.results[request.request_id][-1]


def worker_of(instance):
    return instance.transport.worker.connector_worker


def ask(instance, prompt):
    request = instance.add(f"r{next(_numbers)}", prompt, None, max_tokens=2)
    run(instance, request)
    return request


def keys_of(instance, request):
    (db,) = worker_of(instance).token_dbs
    return [db.key_for(block_hash) for block_hash in request.block_hashes]


def entry_of(value: bytes, instance, block_hash: bytes) -> int:
    """Return the sum that a value ends with, without its tag."""
    entry, tag = (
        int.from_bytes(x, "little") for x in (value[-8:], bytes(block_hash[:8]))
    )
    return entry ^ tag ^ instance.workers[0].groups[0].fingerprint


def sums_of(prompt) -> list[int]:
    """Return the sums of a prompt's full blocks, from what a forward writes."""
    number = len(prompt) // SIZE
    at = torch.arange(number * SIZE)
    ids = torch.tensor(prompt)[at]
    layers = {}
    for n in range(rig.LAYERS):
        cells = rig.token_kv(n, at, ids).reshape(number, SIZE, rig.HEADS, -1)
        layers[n] = cells.transpose(1, 2)
    units = u.expected_sums(layers, range(number), 0, number * SIZE)
    return reference.by_blocks(units, SIZE)


def assert_stored(store, instance, keys, hashes, prompt, number):
    """Check that each block's value is there, and ends with the block's sum."""
    assert store.exist(keys) == [True] * number
    found = [
        entry_of(store.get(k), instance, h) for k, h in zip(keys, hashes, strict=True)
    ]
    assert found == sums_of(prompt)


def test_every_value_ends_with_the_sum_of_its_block(pair, store, model):
    a, b = pair
    prompt = tokens(3 * SIZE + 5, 1)
    request = ask(a, prompt)
    keys = keys_of(a, request)
    hashes = request.block_hashes
    assert keys == [key(Path(model), 0, h) for h in hashes]
    assert_stored(store, a, keys, hashes, prompt, 3)
    ask(b, prompt)
    assert b.loads("verified") == 1 and b.stats["blocks_compared"] == 3


def test_a_prompt_that_goes_on_from_a_loaded_one_is_stored_behind_it(pair, store):
    """One instance loads a beginning and stores the rest; another loads all."""
    a, b = pair
    prompt = tokens(5 * SIZE + 5, 2)
    ask(a, prompt[: 2 * SIZE + 5])
    request = ask(b, prompt)
    assert b.loads("verified") == 1 and b.stats["blocks_compared"] == 2
    keys, hashes = keys_of(b, request), request.block_hashes
    assert_stored(store, b, keys, hashes, prompt, 5)
    ask(a, prompt)
    assert a.loads("verified") == 1 and a.stats["blocks_compared"] == 3


def test_a_damaged_value_is_removed_and_the_lookups_behind_it_are_answered(pair, store):
    a, b = pair
    prompt, other = tokens(3 * SIZE + 5, 3), tokens(4 * SIZE + 5, 4)
    keys = keys_of(a, ask(a, prompt))
    ask(a, other)
    # A question that is not answered fails the test, and does not stop it.
    channel = b.scheduler.connector.connector_scheduler.client.socket
    channel.setsockopt(zmq.RCVTIMEO, 20_000)
    value = bytearray(store.get(keys[1]))
    value[0] ^= 1
    store.replace(keys[1], bytes(value))
    ask(b, prompt)
    assert b.loads("mismatch") == b.stats["stored_blocks_dropped"] == 1
    # The channel is one of questions and answers in turn.
    ask(b, other)
    assert b.loads("verified") == 1 and b.stats["blocks_compared"] == 3 + 4
    assert store.exist(keys) == [True, False, True]


def test_what_is_only_loaded_keeps_the_entries_that_came_with_it(pair):
    """Load in a step that also stores: only what is stored gets its entries."""
    a, _ = pair
    worker, sums = worker_of(a), a.workers[0]
    entries = sums.init_block_checksums([0])
    loads, saves, behind = [150, 151], [152, 153, 154], [153, 154]
    mark = torch.arange(1, 6)
    entries[loads + saves] = mark
    hashes = [np.random.default_rng(i).bytes(32) for i in range(3)]
    requests = [
        ReqMeta("load", 2 * SIZE, (loads,), hashes[:2], can_save=False),
        ReqMeta(
            "save",
            3 * SIZE,
            (saves,),
            hashes,
            can_save=True,
            token_ids_start=SIZE,
            store_job_id=10**6,
        ),
    ]
    metadata = MooncakeStoreConnectorMetadata(set(), set())
    metadata.requests = requests
    worker.wait_for_save(metadata)
    worker.kv_send_thread.request_queue.join()
    kept = loads + saves[:1]
    assert entries[kept].tolist() == mark[:3].tolist()
    cells = {n: cache for n, cache in a.kv.items()}
    units = u.expected_sums(cells, behind, 1, 3 * SIZE)
    found = [
        int(entry) % 2**64
        ^ int.from_bytes(h[:8], "little")
        ^ sums.groups[0].fingerprint
        for entry, h in zip(entries[behind], hashes[1:], strict=True)
    ]
    assert found == reference.by_blocks(units, SIZE)


def test_blocks_without_a_hash_yet_are_not_filled_in(pair):
    a, _ = pair
    entries = a.workers[0].init_block_checksums([0])
    ids = [160, 161, 162]
    entries[ids] = 7
    hashes = [bytes([i]) * 32 for i in (1, 2)]
    request = ReqMeta("r", 3 * SIZE, (ids,), hashes, can_save=True)
    worker_of(a).kv_checksums.save([request])
    assert [entry == 7 for entry in entries[ids].tolist()] == [False, False, True]


# ---- host memory


@pytest.fixture(scope="module")
def offloading(model):
    if torch.cuda.is_available():
        pytest.skip("with a device, vLLM has it copy the blocks")
    with ExitStack() as stack:
        stack.enter_context(real.without_a_device())
        yield real.offloading_instance(stack, model)


def host_copies(instance):
    return instance.transport.worker.worker_handler.cpu_kv_caches


def offload(instance, prompt):
    """Compute a prompt and step until it is in host memory alone."""
    ask_offloaded(instance, prompt)
    end = time.monotonic() + 20
    while not instance.scheduler.reset_prefix_cache():
        assert time.monotonic() < end
        instance.step()
    instance.stats.clear()


def ask_offloaded(instance, prompt):
    request = instance.add(f"r{next(_numbers)}", prompt, None, max_tokens=2)
    end = time.monotonic() + 20
    while not request.is_finished():
        assert time.monotonic() < end, request.status
        instance.step()
        time.sleep(0.001)


def test_loads_from_host_memory_verify(offloading):
    prompt = tokens(3 * SIZE + 5, 11)
    offload(offloading, prompt)
    ask_offloaded(offloading, prompt)
    assert offloading.loads("verified") == offloading.stats["loads_started"] == 1
    assert offloading.stats["blocks_compared"] == 3


def test_a_damaged_copy_in_host_memory_is_a_mismatch_and_dropped(offloading):
    prompt = tokens(3 * SIZE + 5, 12)
    offload(offloading, prompt)
    name = next(n for n in host_copies(offloading) if "kv_checksums" not in n)
    host_copies(offloading)[name] ^= 1
    ask_offloaded(offloading, prompt)
    host_copies(offloading)[name] ^= 1
    assert offloading.loads("mismatch") == 1
    assert offloading.stats["stored_blocks_dropped"] == 3
