"""Subscribe to the KV events that a server publishes, as a router does that follows prefix caches."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
from zmq.constants import SocketOption, SocketType
from zmq.sugar.context import Context
from zmq.sugar.socket import Socket

from rig.servers import HOST, free_port

Event = dict[str, Any]


class Subscriber:
    """Receives a server's events about blocks in its prefix cache.

    Attributes:
        args: command line of the server.

    """

    def __init__(self, socket: Socket, port: int) -> None:
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": f"tcp://*:{port}",
        }
        self.args = ("--kv-events-config", json.dumps(config))
        self._socket = socket
        self._events: list[Event] = []

    def history(self, block: Sequence[int]) -> list[str]:
        """Return what was told of the block of these tokens so far: kinds of events, in order."""
        self._receive()
        told, hashes = [], set()
        for event in self._events:
            if event.get("medium") != "GPU":
                continue
            kind, at = event["type"], event["block_hashes"]
            if kind == "BlockStored":
                size, tokens = event["block_size"], event["token_ids"]
                runs = [tokens[i * size : (i + 1) * size] for i in range(len(at))]
                found = {x for x, run in zip(at, runs, strict=True) if run == [*block]}
                hashes |= found
                told += [kind] * len(found)
            elif kind == "BlockRemoved":
                told += [kind] * len(hashes & {*at})
        return told

    def wait_for(
        self, block: Sequence[int], ending: Sequence[str], timeout: float = 10
    ) -> bool:
        """Wait until what was told of a block ends so; return whether it does."""
        ends = time.monotonic() + timeout
        while self.history(block)[-len(ending) :] != [*ending]:
            if time.monotonic() > ends:
                return False
        return True

    def _receive(self) -> None:
        while self._socket.poll(100):
            *_, payload = self._socket.recv_multipart()
            _, events, *_ = msgspec.msgpack.decode(payload)
            self._events += events


@contextmanager
def subscribed() -> Iterator[Subscriber]:
    """Yield a subscriber to a server that has not started yet."""
    port = free_port()
    with Context() as context, context.socket(SocketType.SUB) as socket:
        socket.setsockopt(SocketOption.SUBSCRIBE, b"")
        socket.setsockopt(SocketOption.LINGER, 0)
        socket.connect(f"tcp://{HOST}:{port}")
        yield Subscriber(socket, port)
