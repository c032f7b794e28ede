# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test failed loads from a real Mooncake store: what is removed, and what stays.

Real: the master, two clients of it in processes of their own, vLLM's loading thread
with the feature's line in it. What is fake: the cache that is loaded into.
"""

import ctypes
import os
import queue
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from rig.mooncake_store import HOST, SEGMENT, MooncakeStore

from vllm.distributed.kv_transfer.kv_checksum.connectors.mooncake_store import (
    MooncakeStoreChecksums,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store.worker import (
    KVCacheStoreRecvingThread,
)

KV, ENTRY = 4088, 8
RIGHT = KV + ENTRY
VALUES = {"right": RIGHT, "short": KV, "long": RIGHT + 8, "lost": RIGHT}

# Puts one value in memory that it lends itself, then waits to be killed.
STORING = """
import sys, time
from mooncake.store import MooncakeDistributedStore, ReplicateConfig
master, host, segment, size = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:])
client = MooncakeDistributedStore()
assert client.setup(host, "P2PHANDSHAKE", segment, segment, "tcp", "", master) == 0
where = ReplicateConfig()
where.preferred_segment = client.get_hostname()
assert client.put("lost", bytes(size), where) == 0
print("stored", flush=True)
time.sleep(1000)
"""


class Blocks:
    """The cache of one group, and its keys: one block of each key."""

    block_size, hash_block_size = 16, 16

    def __init__(self, keys):
        self.keys = keys
        self.memory = (ctypes.c_char * (len(keys) * RIGHT))()
        self.store_layout = self
        self.local_shard_ids = [0]

    def process_tokens(self, token_len, block_hashes, mask_num):
        return [(16 * i, 16 * i + 16, key) for i, key in enumerate(block_hashes)]

    def key_for(self, shard_id, block_hash):
        return block_hash

    def prepare_values(self, chunks, block_ids, shard_ids):
        at = [ctypes.addressof(self.memory) + i * RIGHT for i in block_ids]
        return [[a, a + KV] for a in at], [[KV, ENTRY] for _ in at], block_ids


class Worker:
    """A store worker, as far as `MooncakeStoreChecksums` asks it."""

    def __init__(self, store):
        self.store, self.counted = store, []

    def _record_kv_connector_operation(self, **operation):
        self.counted.append(operation)


def load(client, keys, **changed):
    """Load the keys' blocks with vLLM's own thread; it, and the worker."""
    blocks, worker = Blocks(keys), Worker(client)
    assert (
        client.register_buffer(ctypes.addressof(blocks.memory), len(blocks.memory)) == 0
    )
    coord = SimpleNamespace(load_mask=lambda hashes, length: [[True] * len(keys)])
    thread = KVCacheStoreRecvingThread(
        client, coord, [blocks], 16, 0, None, request_queue=queue.Queue()
    )
    thread.kv_checksums = object.__new__(MooncakeStoreChecksums)
    thread.kv_checksums._worker = worker
    for name, value in changed.items():
        setattr(thread, name, value)
    spec = SimpleNamespace(
        token_len=16 * len(keys), vllm_cached_tokens=0, tail_key_boundaries=[]
    )
    request = SimpleNamespace(
        req_id="r", load_spec=spec, block_hashes=keys, block_ids=[range(len(keys))]
    )
    thread.request_queue.put(request)
    thread._handle_request(thread.request_queue.get())
    client.unregister_buffer(ctypes.addressof(blocks.memory))
    assert thread.get_and_clear_finished_requests() == {"r"}
    failed = thread.get_and_clear_block_ids_with_load_errors()
    return {keys[i] for i in failed}, worker.counted


@contextmanager
def running_store(folder):
    os.environ["MC_FORCE_TCP"] = "1"
    # The values of a dead client stay known for a minute.
    with MooncakeStore(folder, ("-client_ttl=60",)) as store:
        put_values(store)
        yield store


def put_values(store):
    for name in ("right", "short", "long"):
        store.replace(name, bytes(VALUES[name]))


@pytest.fixture(scope="module")
def shared_store(tmp_path_factory):
    with running_store(tmp_path_factory.mktemp("mooncake")) as store:
        yield store


@pytest.fixture
def own_store(tmp_path):
    """Yield a store for tests that kill a part of it."""
    with running_store(tmp_path) as store:
        yield store


@pytest.fixture
def store(shared_store):
    put_values(shared_store)
    return shared_store


def kill_a_client(store):
    """Let a client store "lost" in its own memory, and kill it."""
    command = [sys.executable, "-c", STORING, store.address, HOST, str(SEGMENT)]
    with subprocess.Popen(
        [*command, str(RIGHT)], stdout=subprocess.PIPE, text=True
    ) as child:
        assert "stored\n" in child.stdout
        child.kill()


@contextmanager
def connected(store):
    """Yield a client that lends no memory."""
    from mooncake.store import MooncakeDistributedStore

    client = MooncakeDistributedStore()
    status = client.setup(HOST, "P2PHANDSHAKE", 0, SEGMENT, "tcp", "", store.address)
    assert status == 0
    yield client
    client.close()


@pytest.fixture(scope="module")
def client(shared_store):
    with connected(shared_store) as client:
        yield client


def test_only_values_of_another_size_are_removed(own_store, log):
    kill_a_client(own_store)
    keys = ["right", "short", "missing", "lost", "long"]
    with connected(own_store) as client:
        # Its transfer fails, with the same status as the short value's.
        assert load(client, ["right", "lost"]) == ({"lost"}, [])
        assert not [x for x in log if "size" in x]
        failed, counted = load(client, keys)
    assert failed == set(keys) - {"right"}
    assert dict(zip(keys, own_store.exist(keys), strict=True)) == {
        "right": True,
        "short": False,
        "missing": False,
        "lost": True,
        "long": False,
    }
    (line,) = [x for x in log if "of another size" in x]
    assert line.startswith("ERROR Load of request r: 2 of 5 values")
    (operation,) = counted
    assert operation["operation"] == "kv_checksum_remove_malformed"
    assert (operation["num_keys"], operation["status"]) == (2, "ok")


def test_a_good_value_takes_the_place_of_a_malformed_one(store, client):
    failed, _ = load(client, ["right", "short"])
    assert failed == {"short"} and store.exist(["right", "short"]) == [True, False]
    store.replace("short", bytes(RIGHT))
    assert load(client, ["right", "short"]) == (set(), [])


def test_a_dead_master_costs_no_further_wait(own_store):
    asked: list[str] = []
    with connected(own_store) as client:
        own_store.kill_master()
        failed, counted = load(Watched(client, asked), ["right", "short"])
    assert failed == {"right", "short"} and counted == []
    assert "batch_get_replica_desc" not in asked and "batch_remove" not in asked


class Watched:
    """A client, and the calls to it."""

    def __init__(self, client, calls):
        self._client, self._calls = client, calls

    def __getattr__(self, name):
        self._calls.append(name)
        return getattr(self._client, name)


class Raising(Watched):
    """Answers loads; fails at all else, or at one call."""

    at = "batch_get_into_multi_buffers"

    def __getattr__(self, name):
        if name == self.at:
            raise RuntimeError("connection lost")
        return super().__getattr__(name)


@pytest.mark.parametrize(
    "at", ["batch_get_into_multi_buffers", "batch_get_replica_desc", "batch_remove"]
)
def test_an_exception_removes_nothing_and_ends_the_load(store, client, at, log):
    watched = Raising(client, [])
    watched.at = at
    keys = ["right", "short"]
    failed, counted = load(watched, keys)
    whole = at == "batch_get_into_multi_buffers"
    assert failed == (set(keys) if whole else {"short"}) and counted == []
    assert store.exist(keys) == [True, True]
    assert any("connection lost" in x for x in log)


def test_without_checksums_nothing_is_removed(store, client):
    """Keep stock behaviour."""
    failed, _ = load(client, ["right", "short"], kv_checksums=None)
    assert failed == {"short"} and store.exist(["short"]) == [True]
