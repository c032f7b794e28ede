# SPDX-License-Identifier: Apache-2.0
"""NIXL push: completion notifs at the consumer, registrations at the producer.

Both go through vLLM's own functions with the feature's lines in them. What is fake: the
NIXL agent, the handshake and the topology.
"""

from collections import Counter, defaultdict
from types import SimpleNamespace
from typing import Any

import msgspec
from kv_checksum_receivers import PushConsumer
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import (
    PUSH_REG_NOTIF_PREFIX,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import (
    NixlPushConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import ReadSpec

from vllm.distributed.kv_transfer.kv_checksum import nixl_push

from .base import Target
from .escapes import only_in_vllm

AWAITED = ("r", "s")


def tree_of(data: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(data)
    except Exception:
        return None


def state_of(consumer: PushConsumer) -> tuple[Any, ...]:
    """What a consumer's worker holds after a step."""
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


class Notifs(Target):
    """What stands behind the prefix of a completion notif's long form."""

    name = "push_notif"
    max_len = 8192
    of_vllm = (NixlPushConnectorWorker._get_new_notifs,)

    def run(self, data: bytes) -> str:
        notif = nixl_push._PREFIX + data
        consumer, stock = QuietConsumer(AWAITED, 2), QuietConsumer(AWAITED, 2)
        match tree_of(data):
            case [str(req_id), int(tp_size), bytes(payload)] if tp_size >= 1:
                good = not isinstance(tp_size, bool)
            case _:
                good = False
        if not good:
            before = state_of(consumer)
            assert consumer.get(notif) == []
            assert state_of(consumer) == before and received(consumer) == {}
            return "dropped"
        # The long form is counted like the plain one.
        plain = f"{req_id}:{tp_size}".encode()
        for _ in range(3):
            consumer.get(notif)
            stock.get(plain)
            assert state_of(consumer) == state_of(stock)
        assert received(consumer) == ({req_id: payload} if req_id in AWAITED else {})
        assert received(consumer) == {}
        split = nixl_push.split_payload(notif)
        assert split == (req_id, tp_size, payload)
        again = nixl_push.add_payload(plain, payload)
        assert nixl_push.split_payload(again) == split
        return "complete" if consumer._recving_transfers else "counted"

    def seeds(self) -> dict[str, bytes]:
        encode = msgspec.msgpack.encode
        prefix = len(nixl_push._PREFIX)
        right = nixl_push.add_payload(b"r:2", b"payload")[prefix:]
        return {
            "right": right,
            "more-ranks": nixl_push.add_payload(b"s:8", b"")[prefix:],
            "not-awaited": nixl_push.add_payload(b"expired:1", b"x")[prefix:],
            "like-a-heartbeat": nixl_push.add_payload(b"HB:r:1", b"x")[prefix:],
            "like-a-registration": encode(("PUSH_REG:r", 1, b"")),
            "colons": nixl_push.add_payload(b"a:b:c:1", b"x")[prefix:],
            "no-id": encode(("", 1, b"")),
            "empty": b"",
            "no-msgpack": b"\xc1",
            "ranks-0": encode(("r", 0, b"")),
            "ranks-negative": encode(("r", -1, b"")),
            "ranks-2-64": encode(("r", 2**64 - 1, b"")),
            "ranks-true": encode(("r", True, b"")),
            "ranks-float": encode(("r", 1.0, b"")),
            "two-fields": encode(("r", 1)),
            "four-fields": encode(("r", 1, b"", b"")),
            "payload-text": encode(("r", 1, "text")),
            "id-bytes": encode((b"r", 1, b"")),
            "id-not-utf8": b"\x93\xa1\xff\x01\xc4\x00",
            "more-after": right + b"\x00",
            "nested": b"\x91" * 3000,
            "promises-4-GB": b"\x93\xa1r\x01\xc6\xff\xff\xff\xff",
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
    """What stands behind PUSH_REG's prefix."""

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
        if registration.get("kv_checksums") is True:
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
                    "1": 1,
                    "text": "true",
                    "nil": None,
                    "list": [True],
                }.items()
            },
            "no-engine": encode({"request_id": "r", key: True}),
            "no-map": encode([True]),
            "number-keys": encode({1: 2, **asked}),
            "id-number": encode(asked | {"request_id": 1}),
            "blocks-flat": encode(asked | {"local_block_ids": [1]}),
            "nested": b"\x91" * 3000,
            "empty": b"",
            "counts": encode(Counter("aab")),
        }
