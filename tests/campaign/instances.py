# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Draw the pairs of instances of depth *loads*, and read D's caches.

How caches lie in memory is what the instances themselves write them by: ``[block,
head, slot, K and V]`` for tokens, a page of bytes for states.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from kv_checksum.rig import caches as u
from kv_checksum.rig import compressing, hybrid
from kv_checksum.rig import instances as rig

from vllm.distributed.kv_transfer.kv_checksum.fault_drill.damage import LayerCache
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, MLAAttentionSpec

from .models import Generator, Kept, Part
from .strike import Target, Worker


class Mla(rig.Instance):
    """One latent vector per token, of which every TP rank has a copy of its own."""

    def token_specs(self, window: int | None) -> list[Any]:
        return [
            MLAAttentionSpec(
                block_size=self.block_size,
                num_kv_heads=1,
                head_size=2 * rig.HEAD_SIZE,
                dtype=torch.bfloat16,
            )
        ]

    def local_spec(self, spec: Any) -> Any:
        return spec

    def make_kv_config(self, groups: Any) -> Any:
        self.copies: dict[tuple[int, int], torch.Tensor] = {}
        return super().make_kv_config(groups)

    def caches_of(self, stage: int, rank: int) -> dict[str, torch.Tensor]:
        layers = [n for n in self.kv if n % rig.LAYERS * self.pp // rig.LAYERS == stage]
        for n in layers:
            if (n, rank) not in self.copies:
                self.copies[n, rank] = self.kv[n].clone() if rank else self.kv[n]
        return {rig.u.names(n)[0]: self.copies[n, rank] for n in layers}

    def _copy(self, block_ids: list[int]) -> None:
        for (n, rank), copy in self.copies.items():
            if rank:
                copy[block_ids] = self.kv[n][block_ids]

    def write(self, request: Any, first: int, last: int) -> None:
        super().write(request, first, last)
        manager = self.scheduler.kv_cache_manager
        ids = manager.get_block_ids(request.request_id)[0]
        self._copy(ids[first // self.block_size :][: last - first + 1])

    def copy_states(self, producer: Any, ours: Any, theirs: Any) -> None:
        self._copy(list(ours[0]))


class Chunked(rig.Instance):
    """A group of chunked-local attention beside full attention."""

    CHUNK = 64

    def token_specs(self, window: int | None) -> list[Any]:
        return [
            u.full_spec(rig.HEADS, self.block_size, rig.HEAD_SIZE),
            ChunkedLocalAttentionSpec(
                block_size=self.block_size,
                num_kv_heads=rig.HEADS,
                head_size=rig.HEAD_SIZE,
                dtype=torch.bfloat16,
                attention_chunk_size=self.CHUNK,
            ),
        ]


class WithDraft(hybrid.Hybrid):
    """A drafter with KV of its own spec, whose group lags a block behind local hits."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        coordinator = self.scheduler.kv_cache_manager.coordinator
        # What `is_eagle_group` of the group does where there is a drafter.
        coordinator.attention_groups = [
            g._replace(use_eagle=g.group_ids == [1])
            for g in coordinator.attention_groups
        ]
        coordinator.single_type_managers[1].use_eagle = True

    def token_specs(self, window: int | None) -> list[Any]:
        full = u.full_spec(rig.HEADS, self.block_size, rig.HEAD_SIZE)
        return [full, replace(full, sliding_window=4096)]


@cache
def model_folder() -> str:
    return rig.write_model(Path(tempfile.mkdtemp(prefix="kv-checksum-campaign-")))


FAMILIES = (
    "GQA",
    "window",
    "chunked",
    "MLA",
    "states",
    "states alone",
    "window and states",
    "draft and states",
    "latents with a ring",
)
"""Of those with an "and", groups lag behind one another at local prefix hits."""


def draw_instances(
    random: Generator, settings: dict[str, Any], only: str = "all"
) -> tuple[Any, Any]:
    """Return P and D; `settings` are D's, `only` is a key of `drawing.FAMILIES`."""
    family = str(random.choice(FAMILIES if only == "all" else FAMILIES[-1:]))
    lags = " and " in family
    # With Mooncake, local hits end where the group ends that holds least.
    transport = str(random.choice(["pull", "push"] * (1 + lags) + ["mooncake"]))
    sizes = [(16, 16), (16, 32), (32, 16)][random.integers(3)]
    # With few blocks, those of a prefix are soon given to others. There are enough
    # for all loads of a wave: vLLM waits forever if a load that failed needs more
    # blocks than are free, and all others are held by loads behind it.
    few = 15 + 100 * (2 if "window" in family or "draft" in family else 1)
    few += 100 * (family == "chunked") + 20 * ("states" in family)
    d_blocks = 300 if random.random() < 0.5 else few
    both: dict[str, Any] = dict(transport=transport)
    make: Any = rig.Instance
    if family == "MLA":
        make = Mla
    elif family == "chunked":
        make = Chunked
    elif family == "latents with a ring":
        make = compressing.Compressing
        sizes = [(64, 64), (64, 128), (128, 64)][random.integers(3)]
        both["ring"] = int(random.choice([8, 16]))
    elif family not in ("GQA", "window"):
        make = WithDraft if family == "draft and states" else hybrid.Hybrid
        sizes = (16, 16)
        both |= dict(
            mode="align" if lags else str(random.choice(["none", "align"])),
            scratch=int(random.integers(0, 3)),
            family=str(random.choice(list(hybrid.FAMILIES))),
            tokens=family != "states alone",
        )
    if "window" in family:
        both["window"] = int(random.integers(60 if lags else 20, 200))

    def draw(role: str, block_size: int, **settings: Any) -> Any:
        return make(
            model_folder(),
            role,
            tp=int(2 ** random.integers(3)),
            pp=int(random.integers(1, 3)),
            block_size=block_size,
            **both,
            **settings,
        )

    ahead = bool(random.random() < 0.3)
    return (
        draw("kv_producer", sizes[0], num_blocks=300),
        draw(
            "kv_consumer",
            sizes[1],
            num_blocks=d_blocks,
            async_scheduling=ahead,
            **settings,
        ),
    )


def describe(instance: Any) -> str:
    """Return the KV cache groups of an instance."""
    groups = [type(spec).__name__ for spec in instance.specs]
    if isinstance(instance, WithDraft):
        groups[1] += " (draft)"
    if isinstance(instance, compressing.Compressing):
        groups += [f"latents of {sorted(compressing.LATENTS.values())}", "ring"]
    if isinstance(instance, hybrid.Hybrid):
        groups = groups if instance.tokens else []
        groups.append(f"MambaSpec ({instance.family_name}, {instance.mode})")
    return " + ".join(groups)


def evict_some(instance: Any, random: Generator) -> None:
    """Evict some blocks that nobody uses from the prefix cache.

    As when others need them; vLLM takes those that were used longest ago. Here it is
    all or some of a group's, so that it lags behind the others.
    """
    groups = len(instance.kv_config.kv_cache_groups)
    pool = instance.scheduler.kv_cache_manager.block_pool
    group, share = int(random.integers(groups)), random.choice([0.4, 1.0])
    free = [
        block.block_id
        for block in pool.blocks
        if block.block_hash is not None
        and not block.ref_cnt
        and get_group_id(block.block_hash) == group
    ]
    pool.evict_blocks({i for i in free if random.random() < share})


def first_token_kept(spec: Any, num_tokens: int) -> int:
    """Return the first token whose KV vLLM keeps of a group after so many tokens."""
    if (window := getattr(spec, "sliding_window", None)) is not None:
        return max(0, num_tokens - window + 1)
    chunk = getattr(spec, "attention_chunk_size", None)
    return num_tokens // chunk * chunk if chunk else 0


def prompt_kv_is_right(d: Any, request: Any) -> bool | None:
    """Return whether all KV of the prompt that is still needed is a forward's.

    None if the request holds none now. States are left out: those that were loaded
    are not kept.
    """
    rows = d.scheduler.kv_cache_manager.get_block_ids(request.request_id)
    number, size = request.num_prompt_tokens, d.block_size
    if request.status != rig.RequestStatus.RUNNING or len(rows[0]) * size < number:
        return None
    tokens = torch.tensor(list(request.prompt_token_ids))
    for group, numbers in enumerate(d.layers):
        first = first_token_kept(d.specs[group], number + 2)
        at = torch.arange(min(first, number), number)
        blocks = torch.tensor(rows[group])[at // size]
        for n in numbers:
            expected = rig.token_kv(n, at, tokens[at])[:, : d.kv[n].shape[1]]
            copies = [c for (m, _), c in getattr(d, "copies", {}).items() if m == n]
            for kv in (d.kv[n], *copies):
                found = kv[blocks, :, at % size].view(torch.uint8)
                if not torch.equal(found, expected.view(torch.uint8)):
                    return False
    return True


def holds_of(d: Any, group: int) -> str:
    """Return what the blocks of one of D's groups hold, a key of `strike.KINDS_OF`."""
    if group < len(d.layers):
        return "tokens"
    if not isinstance(d, compressing.Compressing):
        return "state"
    return "latents" if group == len(d.layers) else "ring"


def kept_of(d: Any, name: str) -> Kept:
    """Return what the slots of one of D's layers hold."""
    if not isinstance(d, compressing.Compressing):
        return Kept()
    number = int(name.split(".")[2])
    if number == compressing.RING_LAYER:
        return Kept(ring=(d.ring, compressing.RING_GROUP))
    return Kept(compressing.LATENTS.get(number, 1))


def covered(cache: torch.Tensor, num_blocks: int) -> Any:
    """Return a view ``(blocks, kernel blocks, heads, tokens, cell)`` of what counts."""
    return cache.view(torch.uint8).unflatten(0, (num_blocks, -1)).numpy()


def target_of(d: Any) -> Target:
    """Return D's caches, per KV cache group and worker."""
    # The scheduler's configuration names the first worker's layers alone.
    groups = d.model_kv_config.kv_cache_groups
    target = Target([[] for _ in groups], [[] for _ in groups])
    for stage in range(d.pp):
        for rank in range(d.tp):
            caches = d.caches_of(stage, rank)
            for group, workers in zip(groups, target.workers, strict=True):
                own = [caches[n] for n in group.layer_names if n in caches]
                counts = [
                    Part(covered(caches[n], d.num_blocks), kept_of(d, n), n)
                    for n in group.layer_names
                    if n in caches
                ]
                # How the fault drill's damage gets at them.
                layers = [LayerCache(c, d.num_blocks) for c in own]
                workers.append(Worker(layers, counts, rank))
    # Block ids of a load long gone: what stale bytes come from.
    target.others = [[d.num_blocks - 1, d.num_blocks - 2] for _ in groups]
    return target
