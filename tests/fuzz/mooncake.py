# SPDX-License-Identifier: Apache-2.0
"""Fuzz Mooncake: a producer's response, and requests to remove blocks from the store.

Both go through vLLM's own functions with the feature's lines in them. What is fake:
sockets, and the store (it records what it is asked to remove).
"""

import queue
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import zmq
from kv_checksum.rig.receivers.mooncake import pull

from vllm.distributed.kv_transfer.kv_checksum.connectors.mooncake import (
    MooncakeChecksums,
)
from vllm.distributed.kv_transfer.kv_checksum.connectors.mooncake_store import (
    REMOVE_MSG,
    MooncakeStoreChecksums,
)
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake import mooncake_connector
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    MooncakeConnectorWorker,
    MooncakeXferResponse,
    MooncakeXferResponseStatus,
)
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.store import (
    worker as store_worker,
)

from .base import Target
from .untyped import Map, Other, Text, TooDeepError, read

PULLED = ("r", "s")


class Closed(Exception):
    """The peer went away."""


class Socket:
    """Brings one message, then closes."""

    def __init__(self, message: bytes) -> None:
        self.messages = [message]

    def __enter__(self) -> "Socket":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def setsockopt(self, *option: int) -> None:
        pass

    async def send(self, data: bytes) -> None:
        pass

    async def recv(self) -> bytes:
        if not self.messages:
            raise Closed
        return self.messages.pop()


class Receiver:
    """A Mooncake worker of a consumer that pulls two requests from one peer."""

    receive = MooncakeConnectorWorker.receive_kv_from_single_worker
    process_pulling_result = MooncakeConnectorWorker.process_pulling_result
    _complete_pull_task = MooncakeConnectorWorker._complete_pull_task
    _handle_failed_recv = MooncakeConnectorWorker._handle_failed_recv

    def __init__(self, response: type) -> None:
        on = response is MooncakeXferResponse
        self.kv_checksums = MooncakeChecksums() if on else None
        self._kv_layout_id, self._acked_layout_peers = 0, set()
        self._encoder = msgspec.msgpack.Encoder()
        self._xfer_resp_decoder = msgspec.msgpack.Decoder(response)
        self.async_zmq_ctx = None
        self.finished_recving_reqs: set[str] = set()
        self._is_hma_required = True
        self._failed_recv_reqs: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.xfer_stats = SimpleNamespace(record_failed_recv=list)

    def _build_pull_metadata(self, pull_metas: Any, include_layout: bool) -> list[str]:
        return list(pull_metas)

    def run(self, data: bytes) -> tuple[set[str], set[str]]:
        """Return the loads that ended, and those that failed, after one response."""
        socket = Socket(data)
        with mock.patch.object(
            mooncake_connector, "make_zmq_socket", lambda *_, **__: socket
        ):
            running = self.receive("addr", pull(*PULLED))
            try:
                running.send(None)
            except StopIteration:
                pass
            else:
                raise AssertionError("the receiver waits for something else")
        failed = set()
        while not self._failed_recv_reqs.empty():
            failed.add(self._failed_recv_reqs.get())
        return self.finished_recving_reqs, failed


# As vLLM has it without this feature.
StockResponse = msgspec.defstruct(
    "StockResponse",
    [
        (field.name, field.type, field.default)
        if field.default is not msgspec.NODEFAULT
        else (field.name, field.type)
        for field in msgspec.structs.fields(MooncakeXferResponse)
        if field.name != "kv_checksums"
    ],
)


def sent(data: bytes) -> dict[str, bytes]:
    """Return the payloads of a response, b"" for what is none, of a map no key of which
    stands twice."""
    (field,) = [v for k, v in read(data).pairs if k == Text(b"kv_checksums")][-1:] or [
        Map([])
    ]
    if field == Other(0xC0, b""):
        return {}
    damaged = dict.fromkeys(PULLED, b"")
    if not isinstance(field, Map):
        return damaged
    found: dict[str, bytes] = {}
    for key, value in field.pairs:
        if not isinstance(key, Text):
            return damaged
        try:
            found[key.data.decode()] = value if isinstance(value, bytes) else b""
        except UnicodeDecodeError:
            return damaged
    return found if len(found) == len(field.pairs) else damaged


class Responses(Target):
    """A producer's response to a pull."""

    name = "mooncake_response"
    max_len = 8192
    of_vllm = (
        MooncakeConnectorWorker.receive_kv_from_single_worker,
        MooncakeConnectorWorker.process_pulling_result,
    )

    def run(self, data: bytes) -> str:
        receiver, without = Receiver(MooncakeXferResponse), Receiver(StockResponse)
        ended, failed = receiver.run(data)
        assert (ended, failed) == without.run(data) and ended == set(PULLED)
        results = KVConnectorTransferResults()
        receiver.kv_checksums.finish(results)
        found = results.kv_checksums
        assert receiver.kv_checksums._received.empty()
        if failed == set(PULLED):
            return "failed"
        try:
            expected = sent(data)
        except TooDeepError:
            return "nested too deep to check"
        loaded = ended - failed
        assert found == {r: expected[r] for r in loaded if r in expected}
        intact = sum(map(bool, found.values()))
        return f"{len(loaded)} loaded, {intact} of {len(found)} payloads"

    def seeds(self) -> dict[str, bytes]:
        encode, finish = msgspec.msgpack.encode, MooncakeXferResponseStatus.FINISH
        payloads = {"r": b"sums of r", "s": b"sums of s"}
        right = MooncakeXferResponse(finish, ["r", "s"])
        right.kv_checksums = msgspec.Raw(encode(payloads))
        tree = msgspec.msgpack.decode(encode(right))
        return {
            "right": encode(right),
            "stock": encode(MooncakeXferResponse(finish, ["r", "s"])),
            "continue": encode(tree | {"status": 1, "ok_reqs": ["r"]}),
            "ok-and-failed": encode(tree | {"err_reqs": ["r"]}),
            "one-payload": encode(tree | {"kv_checksums": {"r": b"sums of r"}}),
            "ok-twice": encode(tree | {"ok_reqs": ["r"] * 50}),
            "none-ok": encode({k: v for k, v in tree.items() if k != "ok_reqs"}),
            "of-others": encode(tree | {"ok_reqs": ["x"], "kv_checksums": {"x": b""}}),
            "error": encode(tree | {"status": 2, "err_msg": "why"}),
            "layout-miss": encode(tree | {"status": 3}),
            "status-9": encode(tree | {"status": 9}),
            "payload-text": encode(tree | {"kv_checksums": {"r": "text"}}),
            "payloads-list": encode(tree | {"kv_checksums": [b"x"]}),
            "payloads-text": encode(tree | {"kv_checksums": "x"}),
            "payloads-number": encode(tree | {"kv_checksums": 1}),
            "payload-nil": encode(tree | {"kv_checksums": {"r": None, "s": b"x"}}),
            "payload-empty": encode(tree | {"kv_checksums": {"r": b""}}),
            "payload-twice": encode(tree | {"kv_checksums": {}})[:-1]
            + b"\x82\xa1r\xc4\x01x\xd9\x01r\xc4\x01y",
            "payloads-twice": b"\x84"
            + encode(tree)[1:]
            + encode({"kv_checksums": {"r": b"x"}})[1:],
            "payload-for-no-utf8": encode(tree | {"kv_checksums": {}})[:-1]
            + b"\x81\xa1\xff\xc4\x01x",
            "payload-extension": encode(tree | {"kv_checksums": {}})[:-1]
            + b"\x81\xa1r\xd4\x01x",
            "payloads-nil": encode(tree | {"kv_checksums": None}),
            "payloads-number-keys": encode(tree | {"kv_checksums": {1: b"x"}}),
            "unknown-field": encode(tree | {"later": [1, {"a": b""}]}),
            "unknown-name-no-utf8": encode(tree | {"later": 1})[:-2] + b"\xff\x01",
            "unknown-field-no-utf8": encode(tree | {"later": "x"})[:-1] + b"\xff",
            "empty": b"",
            "nested": b"\x91" * 3000,
            "promises-payloads": encode(tree)[:-30] + b"\xdf\xff\xff\xff\xff",
        }


class Store:
    """Remembers what it was to remove; answers as told."""

    def __init__(self) -> None:
        self.removed: list[str] = []
        self.statuses, self.missing = [0, 0], False

    def batch_remove(self, keys: list[str], force: bool) -> list[int]:
        assert force
        self.removed += keys
        number = len(keys) - self.missing
        return [self.statuses[i % 2] for i in range(number)]


class Channel:
    """The lookup channel: brings one request, then the server stops."""

    def __init__(self) -> None:
        self.server: Any = None
        self.frames: list[bytes] = []
        self.answers: list[bytes] = []

    def recv_multipart(self, copy: bool) -> list[zmq.Frame]:
        self.server.running = False
        return [zmq.Frame(frame) for frame in self.frames]

    def send(self, answer: bytes) -> None:
        self.answers.append(answer)


class Removals(Target):
    """A request to remove blocks, after its tag.

    Input is the second frame, and none if it is empty; another follows input of odd
    length. What the store answers depends on the length too.
    """

    name = "store_removal"
    of_vllm = (store_worker.LookupKeyServer.__init__,)
    memory_per_byte = 256  # two bytes may name a key on every rank

    PREFIXES = (("m@tp0", "m@tp1"), ("n@tp0",))

    def __init__(self) -> None:
        self.store, self.channel = Store(), Channel()
        checksums = object.__new__(MooncakeStoreChecksums)
        checksums._worker = SimpleNamespace(
            store=self.store, _lookup_key_prefixes=self.PREFIXES
        )
        worker = SimpleNamespace(kv_checksums=checksums)
        thread = mock.Mock()
        with (
            mock.patch.object(store_worker, "make_zmq_socket", lambda *_, **__: None),
            mock.patch.object(
                store_worker, "get_zmq_rpc_path_lookup", lambda config: "ipc:///none"
            ),
            mock.patch.object(store_worker.threading, "Thread", thread),
        ):
            server = store_worker.LookupKeyServer(worker, None)
        server.socket, self.channel.server = self.channel, server
        self.server, self.serve = server, thread.call_args.kwargs["target"]

    def run(self, data: bytes) -> str:
        self.store.removed, self.channel.answers = [], []
        self.store.statuses = [0, -704] if len(data) % 3 else [0, -1]
        self.store.missing = len(data) % 5 == 4
        self.channel.frames = [REMOVE_MSG, *([data] if data else [])]
        self.channel.frames += [b"more"] if len(data) % 2 else []
        self.server.running = True
        self.serve()
        (answer,) = self.channel.answers
        wanted = self._wanted(data)
        if wanted is None:
            assert answer == b"\x00" and not self.store.removed
            return "refused"
        assert self.store.removed == wanted
        failed = len(wanted) > 1 and -1 in self.store.statuses
        failed |= bool(wanted and self.store.missing)
        assert answer == (b"\x00" if failed else b"\x01")
        return "failed" if failed else "removed"

    def _wanted(self, data: bytes) -> list[str] | None:
        """Return the keys that a well-formed message names."""
        try:
            tree = read(data)
        except ValueError:
            return None
        if not isinstance(tree, Map):
            return None
        keys, known = [], [index for index, _ in tree.pairs]
        if any(known.count(index) > 1 for index in known):
            return None
        for index, hashes in tree.pairs:
            if type(index) is not int or index not in range(len(self.PREFIXES)):
                return None
            if not isinstance(hashes, list):
                return None
            if not all(isinstance(h, bytes) for h in hashes):
                return None
            for prefix in self.PREFIXES[index]:
                keys += [f"{prefix}@{h.hex()}" for h in hashes]
        return keys

    def seeds(self) -> dict[str, bytes]:
        encode = msgspec.msgpack.encode
        hashes = [bytes([i]) * 32 for i in range(3)]
        return {
            "right": encode({0: hashes[:2], 1: hashes[2:]}),
            "fails": encode({0: [hashes[0][:30]], 1: [hashes[1], b"x"]}),
            "answer-too-short": encode({0: [b"x" * 28]}),
            "one": encode({1: hashes[:1]}),
            "nothing": encode({}),
            "no-hashes": encode({0: []}),
            "empty-hashes": encode({0: [b""] * 1000}),
            "unknown-group": encode({0: hashes, 2: hashes}),
            "negative-group": encode({-1: hashes}),
            "group-text": encode({"0": hashes}),
            "group-true": encode({True: hashes}),
            "group-2-64": encode({2**64 - 1: hashes}),
            "group-twice": b"\x82\x00\x00\x00\x91\xc4\x01x",
            "group-twice-in-two-forms": b"\x82\x01\x91\xc4\x01y\xcc\x01\x91\xc4\x01x",
            "hash-text": encode({0: ["x"]}),
            "hashes-bytes": encode({0: b"x" * 32}),
            "list": encode([[0, hashes]]),
            "empty": b"",
            "nested": b"\x91" * 2900,
            "promises-hashes": b"\x81\x00\xdd\xff\xff\xff\xff",
        }
