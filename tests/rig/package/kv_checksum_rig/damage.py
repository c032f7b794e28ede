"""Damage what a connector of the rig keeps, in a running server, when a test asks for it.

With ``KV_CHECKSUM_RIG_DAMAGE=FOLDER`` in the environment, every ``FOLDER/order-N.json`` is an order to damage one load. It
is carried out right before that load is copied into the KV cache, in the memory that the copy reads, so that the
connector itself takes no part in it and whoever loads the same block later gets the damage too. ``FOLDER/N-PID.json``
then tells what was done. ``rig.tampering`` writes orders and reads reports.

An order's keys, all but ``kind`` optional:

- ``kind``: one of ``KINDS``.
- ``skip``: number of loads that pass before the one that is damaged.
- ``block``: which block of the load, in its order (default 0; -1 is the last one).
- ``group``: the KV cache group, as the connector numbers those that it keeps (default: the first one loaded).
- ``whole_chunk``: damage the chunk that holds the block, where chunks are larger than blocks.
- ``other``: for "swapped", the block that it is exchanged with (default: the next block or chunk).
- ``lasting``: false puts the memory back after the load, as if the damage had happened on the way.
- ``layer``, ``byte``, ``bit``: for "bit_flip" (default: the lowest bit of the first byte of the first layer).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

VARIABLE = "KV_CHECKSUM_RIG_DAMAGE"


class NotApplicable(ValueError):
    """Raised where a load cannot be damaged as ordered; the message says why."""


@dataclass(frozen=True)
class Page:
    """One block of one KV cache group where a connector keeps it.

    Attributes:
        group: the KV cache group, as the connector numbers them.
        position: the block's position in its request.
        chunk: what the connector moves as a whole; the same number for blocks of one chunk.
        layers: views of the block's bytes (uint8), one per layer, one-dimensional.

    """

    group: int
    position: int
    chunk: int
    layers: tuple[torch.Tensor, ...]

    @property
    def address(self) -> int:
        """Tell pages apart by where they lie."""
        return self.layers[0].data_ptr()

    def contents(self) -> list[torch.Tensor]:
        """Copy the bytes."""
        return [layer.clone() for layer in self.layers]

    def fill(self, contents: Sequence[torch.Tensor]) -> None:
        """Put bytes in the place of the present ones."""
        for layer, content in zip(self.layers, contents, strict=True):
            layer.copy_(content)


class Tampering:
    """Carries out the orders that a test gives to this process, on the loads of one connector."""

    def __init__(self) -> None:
        self._stored: dict[int, Page] = {}
        self._waiting: list[tuple[int, dict[str, Any]]] = []
        self._seen = 0

    def stored(self, pages: Iterable[Page]) -> None:
        """Note pages of which it is known what they hold; the bytes of other prefixes are taken from them."""
        for page in pages:
            self._stored.pop(page.address, None)
            self._stored[page.address] = page

    def before_load(self, pages: Sequence[Page]) -> Callable[[], None]:
        """Damage the pages of a load if it is ordered.

        Returns:
            What is to be called once they were copied.

        """
        self.stored(pages)
        undo: list[Callable[[], None]] = []
        still: list[tuple[int, dict[str, Any]]] = []
        for number, order in self._orders():
            if order.get("skip", 0) > 0:
                still.append((number, {**order, "skip": order["skip"] - 1}))
                continue
            try:
                report = self._carry_out(order, pages, undo)
            except NotApplicable as why:
                report = {"refused": str(why)}
            _tell(number, report)
        self._waiting = still

        def restore() -> None:
            for step in reversed(undo):
                step()

        return restore

    def _orders(self) -> list[tuple[int, dict[str, Any]]]:
        """Return the orders that wait for a load, with those that came since the last one."""
        folder = os.environ.get(VARIABLE)
        while folder and (order := Path(folder) / f"order-{self._seen}.json").exists():
            self._waiting.append((self._seen, json.loads(order.read_text())))
            self._seen += 1
        return self._waiting

    def _carry_out(
        self,
        order: dict[str, Any],
        load: Sequence[Page],
        undo: list[Callable[[], None]],
    ) -> dict[str, Any]:
        group = order.get("group", min(page.group for page in load))
        of_group = [page for page in load if page.group == group]
        targets = _targets(of_group, order.get("block", 0), order)
        touched = [*targets]
        if order["kind"] == "swapped":
            touched += _targets(of_group, _other(of_group, targets, order), order)
        before = [page.contents() for page in touched]
        others = touched[len(targets) :]
        KINDS[order["kind"]](Case(self, order, load, targets, others))
        changed = 0
        for page, old in zip(touched, before, strict=True):
            changed += sum(
                int((new != was).sum())
                for new, was in zip(page.layers, old, strict=True)
            )
            if not order.get("lasting", True):
                undo.append(lambda page=page, old=old: page.fill(old))  # type: ignore[misc]
        return {
            "kind": order["kind"],
            "group": group,
            "positions": sorted(page.position for page in touched),
            "bytes_changed": changed,
        }

    def other(self, page: Page, load: Sequence[Page], same_position: bool) -> Page:
        """Return a page of the same group that the load does not hold, written most recently.

        Raises:
            NotApplicable: there is none.

        """
        loaded = {other.address for other in load}
        for other in reversed(self._stored.values()):
            if (
                other.group == page.group
                and other.address not in loaded
                and (other.position == page.position) is same_position
            ):
                return other
        raise NotApplicable(
            f"nothing else was stored that fits position {page.position}"
        )

    def of_other_group(self, page: Page, load: Sequence[Page]) -> Page:
        """Return a page of another group, of the same position if there is one.

        Raises:
            NotApplicable: there is none of the same size.

        """
        fitting = [
            other
            for other in [*load, *reversed(self._stored.values())]
            if other.group != page.group
            and [x.numel() for x in other.layers] == [x.numel() for x in page.layers]
        ]
        fitting.sort(key=lambda other: other.position != page.position)
        if not fitting:
            raise NotApplicable("there is no block of another group")
        return fitting[0]


def _targets(of_group: list[Page], block: int, order: dict[str, Any]) -> list[Page]:
    if not -len(of_group) <= block < len(of_group):
        raise NotApplicable(f"the load has {len(of_group)} blocks of this group")
    page = of_group[block]
    if not order.get("whole_chunk"):
        return [page]
    return [other for other in of_group if other.chunk == page.chunk]


def _other(of_group: list[Page], targets: list[Page], order: dict[str, Any]) -> int:
    following = of_group.index(targets[-1]) + 1
    return int(order.get("other", following))


@dataclass(frozen=True)
class Case:
    """One order that is carried out on a load.

    Attributes:
        of: what the connector keeps.
        order: the settings of the damage.
        load: all pages of the load.
        targets: those that are damaged.
        others: those that they change places with, if they do.

    """

    of: Tampering
    order: dict[str, Any]
    load: Sequence[Page]
    targets: list[Page]
    others: list[Page]


def _flip(case: Case) -> None:
    """Flip one bit of each block."""
    for page in case.targets:
        layer = page.layers[case.order.get("layer", 0)]
        layer[case.order.get("byte", 0)] ^= 1 << case.order.get("bit", 0)


def _replace(same_position: bool) -> Kind:
    """Put the bytes of another stored block in the place of each block."""

    def kind(case: Case) -> None:
        of, load = case.of, case.load
        sources = [of.other(page, load, same_position) for page in case.targets]
        for page, source in zip(case.targets, sources, strict=True):
            page.fill(source.contents())

    return kind


def _swap(case: Case) -> None:
    """Exchange blocks, or chunks, of the load."""
    if len(case.targets) != len(case.others):
        raise NotApplicable("the two chunks are not of one size in this load")
    for page, other in zip(case.targets, case.others, strict=True):
        mine = page.contents()
        page.fill(other.contents())
        other.fill(mine)


def _half_write(case: Case) -> None:
    """Let the second half of each layer of a block be what lay there before: another block, or nothing."""
    for page in case.targets:
        try:
            old = case.of.other(page, case.load, same_position=False).contents()
        except NotApplicable:
            old = [torch.zeros_like(layer) for layer in page.layers]
        for layer, stale in zip(page.layers, old, strict=True):
            half = layer.numel() // 2
            layer[half:] = stale[half:]


def _replace_by_other_group(case: Case) -> None:
    """Put a block of another KV cache group in the place of each block."""
    for page in case.targets:
        page.fill(case.of.of_other_group(page, case.load).contents())


Kind = Callable[[Case], None]

KINDS: dict[str, Kind] = {
    "bit_flip": _flip,
    "other_prefix": _replace(same_position=True),
    "stale": _replace(same_position=False),
    "swapped": _swap,
    "half_written": _half_write,
    "other_group": _replace_by_other_group,
}


def _tell(number: int, report: dict[str, Any]) -> None:
    folder = Path(os.environ[VARIABLE])
    scratch = folder / f".{number}-{os.getpid()}"
    scratch.write_text(json.dumps(report))
    scratch.replace(folder / f"{number}-{os.getpid()}.json")
