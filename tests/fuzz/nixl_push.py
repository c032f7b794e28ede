# SPDX-License-Identifier: Apache-2.0
"""Fuzz NIXL push: completion notifs at the consumer, registrations at the producer.

Both go through vLLM's own functions with the feature's lines in them. What is fake: the
NIXL agent, the handshake and the topology.
"""

from binascii import a2b_base64
from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import msgspec
from kv_checksum.rig.receivers.nixl_push import PushConsumer

from vllm.distributed.kv_transfer.kv_checksum.connectors import nixl_push
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    PUSH_REG_NOTIF_PREFIX,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import (
    NixlPushConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec

from .base import Target
from .escapes import only_in_vllm

AWAITED = ("r", "s")


def tree_of(data: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(data)
    except Exception:
        return None


def state_of(consumer: PushConsumer) -> tuple[Any, ...]:
    """Return what a consumer's worker holds after a step."""
    return (
        sorted(consumer._recving_transfers),
        dict(consumer.consumer_notification_counts_by_req),
        consumer._pending_completion_notifs.qsize(),
    )


def received(consumer: PushConsumer) -> dict[str, bytes]:
    results = SimpleNamespace(finished_sending=set(), kv_checksums=None)
    consumer.kv_checksums.finish(results)
    return results.kv_checksums


class QuietConsumer(PushConsumer):
    def _handle_heartbeat(self, payload: str) -> None:
        pass


NAME = len(b"kv_checksums:")


def digits(text: bytes, value: int) -> bool:
    """Return whether 8 lower-case hexadecimal digits say `value`."""
    return text == format(value, "08x").encode()


def long_form(data: bytes) -> tuple[bytes, bytes] | None:
    """Return a long form's plain part and payload (b"" if that is damaged), read once more.

    None if the plain part did not come through.
    """
    number, _, rest = data[NAME:].partition(b":")
    if not number.isdigit() or len(number) > 6 or rest[8:9] != b":":
        return None
    end = 9 + int(number)
    plain, tail = rest[9:end], rest[end:]
    _, colon, ranks = plain.rpartition(b":")
    # A length that is too long says nothing against it: the CRC does.
    right = digits(rest[:8], crc32(plain)) and colon
    if not right or not ranks.isdigit() or not 0 < len(ranks.lstrip(b"0")) < 10:
        return None
    try:
        plain.decode()
    except UnicodeDecodeError:
        return None
    payload = b""
    if tail[:1] + tail[9:10] == b"::":
        try:
            payload = a2b_base64(tail[10:], strict_mode=True)
        except ValueError:
            return plain, b""
        if not digits(tail[1:9], crc32(payload)):
            payload = b""
    return plain, payload


class Notifs(Target):
    """The bytes behind the first two of a completion notif's long form."""

    name = "push_notif"
    max_len = 8192
    of_vllm = (NixlPushConnectorWorker._get_new_notifs,)

    def run(self, data: bytes) -> str:
        notif = nixl_push._PREFIX[:2] + data
        consumer, stock = QuietConsumer(AWAITED, 2), QuietConsumer(AWAITED, 2)
        asked: dict[str, Any] = {"request_id": "next"}
        nixl_push.ask(asked)
        found = long_form(data)
        if found is None:
            before = state_of(consumer)
            assert consumer.get(notif) == []
            assert state_of(consumer) == before and received(consumer) == {}
            # From now on, registrations are those of stock vLLM.
            assert consumer.kv_checksums.registration(asked) == {"request_id": "next"}
            return "dropped"
        # The long form is counted like the plain one.
        plain, payload = found
        for _ in range(3):
            consumer.get(notif)
            stock.get(plain)
            assert state_of(consumer) == state_of(stock)
        req_id = plain.decode().rpartition(":")[0]
        assert received(consumer) == ({req_id: payload} if req_id in AWAITED else {})
        assert received(consumer) == {}
        assert consumer.kv_checksums.registration(asked) is asked
        assert nixl_push.split_payload(notif) == found
        assert nixl_push.split_payload(nixl_push.add_payload(*found)) == found
        complete = "complete" if consumer._recving_transfers else "counted"
        return complete if payload else f"{complete}, no payload"

    def parse(self, data: bytes) -> Any:
        found = long_form(data)
        if found is None:
            raise ValueError("not a long form")
        return list(found)

    def unparse(self, tree: Any) -> bytes:
        plain, payload = tree
        return nixl_push.add_payload(plain, payload)[2:]

    def seeds(self) -> dict[str, bytes]:
        def form(plain: bytes, payload: bytes = b"x") -> bytes:
            return nixl_push.add_payload(plain, payload)[2:]

        right = form(b"r:2", bytes(range(256)))
        inner = form(b"x:1")
        return {
            "right": right,
            "more-ranks": form(b"s:8", b""),
            "not-awaited": form(b"expired:1"),
            "like-a-heartbeat": form(b"HB:r:1"),
            "like-a-registration": form(b"PUSH_REG:r:1"),
            "colons": form(b"a:b:c:1"),
            "no-id": form(b":1"),
            "id-not-utf8": form(b"\xfe:1"),
            "id-with-zero-byte": form(b"\0:1"),
            "id-is-a-long-form": form(inner + b":1"),
            "empty": b"",
            "ranks-0": form(b"r:0"),
            "ranks-negative": form(b"r:-1"),
            "ranks-2-64": form(b"r:%d" % (2**64)),
            "ranks-many-zeros": form(b"r:" + b"0" * 50 + b"2"),
            "ranks-missing": form(b"r:"),
            "no-colon": form(b"r"),
            "cut-in-the-name": right[:5],
            "cut-before-the-length": right[:NAME],
            "cut-in-the-id": right[: NAME + 12],
            "cut-behind-the-id": right[: NAME + 14],
            "cut-in-the-digits": right[: NAME + 18],
            "cut-before-the-payload": right[: NAME + 24],
            "cut-in-the-payload": right[:-4],
            "last-byte-missing": right[:-1],
            "zero-byte-after": right + b"\0",
            "more-after": right + b"AAAA",
            "one-bit-of-the-id": right.replace(b"r:2", b"s:2"),
            "one-bit-of-the-payload": right[:-9] + b"B" + right[-8:],
            "not-base64": right[:-9] + b"-" + right[-8:],
            "line-end-in-base64": right[:-9] + b"\n" + right[-8:],
            "upper-case-digits": right[:NAME] + right[NAME : NAME + 11].upper(),
            "length-with-zeros": right[:NAME] + b"00" + right[NAME:],
            "length-of-7-digits": right[:NAME] + b"000000" + right[NAME:],
            "promises-999999": right[:NAME] + b"999999:00000000:r:1",
            "the-form-before": b"\x93\xa1r\x02\xc4\x01x",
        }


class Producer:
    """A NIXL push worker of a producer that takes registrations."""

    _handle_push_reg_notif = NixlPushConnectorWorker._handle_push_reg_notif
    _pop_matching_finished_blocks = (
        NixlPushConnectorWorker._pop_matching_finished_blocks
    )
    _do_start_push_kv = NixlPushConnectorWorker._do_start_push_kv
    _as_grouped_block_ids = staticmethod(NixlPushConnectorWorker._as_grouped_block_ids)
    _xfer_blocks = NixlPushConnectorWorker._xfer_blocks

    HELD = {"r": b"sums of r", "s": b"sums of s"}

    def __init__(self) -> None:
        self.kv_checksums = nixl_push.NixlPushChecksums()
        self.kv_checksums.hold(dict(self.HELD))
        self._push_finished_blocks = {r: ([1],) for r in self.HELD}
        self._pending_d_registrations: dict[str, Any] = {}
        self._engine_last_active: dict[Any, float] = {}
        self._physical_blocks_per_logical_kv_block = 1
        self.world_size, self.engine_id = 1, "p"
        info = SimpleNamespace(
            remote_block_size=16, remote_physical_blocks_per_logical=1
        )
        self.transfer_topo = SimpleNamespace(
            get_engine_info=lambda engine: info, block_size_ratio=lambda size: 1
        )
        self.region_group_ids = self._uses_region_group_mapping = None
        for table in (
            "dst_num_blocks",
            "dst_region_num_blocks",
            "dst_region_group_ids",
            "dst_uses_region_group_mapping",
        ):
            setattr(self, table, defaultdict(int))
        self.written: list[tuple[str, bytes]] = []
        self.nixl_wrapper = self

    def _ensure_handshake(self, *remote: Any) -> None:
        pass

    def _logical_to_kernel_block_ids(self, block_ids: Any, ratio: int) -> Any:
        return block_ids

    def _apply_prefix_caching(self, **blocks: Any) -> Any:
        return [], []

    def _compute_desc_ids(self, **_: Any) -> list[int]:
        return []

    def _xfer_blocks_for_req(self, req_id: str, meta: Any) -> None:
        spec = ReadSpec(0, meta.local_block_ids, meta.remote.block_ids)
        remote = meta.remote
        for _ in range(2):  # as to two ranks
            self._writing = req_id
            self._xfer_blocks(spec, remote.engine_id, req_id, remote.request_id, 0, 0)

    def make_prepped_xfer(self, *args: Any, notif_msg: bytes) -> int:
        self.written.append((self._writing, notif_msg))
        return 0

    def transfer(self, handle: int) -> None:
        pass


class Registrations(Target):
    """The bytes behind PUSH_REG's prefix."""

    name = "push_registration"
    of_vllm = (
        NixlPushConnectorWorker._handle_push_reg_notif,
        NixlPushConnectorWorker._do_start_push_kv,
        NixlPushConnectorWorker._xfer_blocks,
    )

    def run(self, data: bytes) -> str:
        producer, registration = Producer(), tree_of(data)
        # The writer thread goes on after what its own lines raise.
        raised = only_in_vllm(
            producer._handle_push_reg_notif, PUSH_REG_NOTIF_PREFIX + data
        )
        outgoing = producer.kv_checksums._outgoing
        if not producer.written:
            assert outgoing == Producer.HELD
            return "raised" if raised else "not-written"
        ((req_id, notif),) = set(producer.written)
        plain = f"{registration['request_id']}:1".encode()
        form = registration.get("kv_checksums")
        if type(form) is int and form == 2:
            assert notif == nixl_push.add_payload(plain, Producer.HELD[req_id])
            assert outgoing == Producer.HELD
            return "asked"
        assert notif == plain
        assert outgoing == {k: v for k, v in Producer.HELD.items() if k != req_id}
        return "plain"

    def seeds(self) -> dict[str, bytes]:
        encode = msgspec.msgpack.encode
        stock = {
            "request_id": "r",
            "decode_engine_id": "d",
            "decode_host": "h",
            "decode_port": 1,
            "decode_tp_size": 1,
            "local_block_ids": [[1]],
        }
        asked = dict(stock)
        nixl_push.ask(asked)
        key = nixl_push._ASKED
        return {
            "asked": encode(asked),
            "stock": encode(stock),
            "other-suffix": encode(asked | {"request_id": "s-0123abcd"}),
            "unknown": encode(asked | {"request_id": "x"}),
            "id-like-a-notif": encode(asked | {"request_id": "r:1"}),
            **{
                f"flag-{name}": encode(asked | {key: value})
                for name, value in {
                    "false": False,
                    "the-form-before": True,
                    "1": 1,
                    "2-point-0": 2.0,
                    "later": 3,
                    "text": "true",
                    "nil": None,
                    "list": [True],
                }.items()
            },
            "no-engine": encode({"request_id": "r", key: 2}),
            "no-map": encode([True]),
            "number-keys": encode({1: 2, **asked}),
            "id-number": encode(asked | {"request_id": 1}),
            "blocks-flat": encode(asked | {"local_block_ids": [1]}),
            "nested": b"\x91" * 3000,
            "empty": b"",
            "counts": encode(Counter("aab")),
        }
