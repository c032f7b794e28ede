"""Change vLLM and NIXL for the rig, each change with its reason.

vLLM calls ``apply`` in every process (its plugin group ``vllm.general_plugins``). Each adjustment waits for
the module it changes to be imported, so that nothing is loaded earlier than vLLM itself loads it.
``KV_CHECKSUM_RIG_ADJUST=0`` in the environment turns all of them off.

They lower the idle load of a small machine, answer a question about a device that is not there, keep async
scheduling where a server is started with ``KV_CHECKSUM_RIG_ASYNC_SCHEDULING=1``, and let every CPU behave as one
without AMX unless a process is started with ``KV_CHECKSUM_RIG_AMX=1``. Only host-memory offload gets another copy
engine (``offload_adjustments``).
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any

from kv_checksum_rig import (
    hybrid_adjustments,
    interpreter,
    loads,
    offload_adjustments,
    switch,
    tables,
)
from kv_checksum_rig.on_import import on_import

NIXL_PROGRESS_DELAY_US = 1000
BROADCAST_BUSY_LOOP_S = 0.0
BROADCAST_RECHECK_MS = 100


def apply() -> None:
    """Register every adjustment. Safe to call more than once."""
    if os.environ.get("KV_CHECKSUM_RIG_ADJUST") == "0":
        return
    switch.apply()
    tables.apply()
    loads.apply()
    offload_adjustments.apply()
    hybrid_adjustments.apply()
    on_import("triton.runtime.interpreter", interpreter.apply)
    on_import("vllm.platforms.cpu", async_scheduling)
    on_import("torch.cpu", no_amx)
    on_import(
        "vllm.distributed.kv_transfer.kv_checksum.worker.worker",
        skip_the_groups_of_one_rank,
    )
    on_import("nixl_cu12._api", slow_nixl_progress_thread)
    on_import(
        "vllm.distributed.device_communicators.shm_broadcast", no_broadcast_busy_loop
    )
    on_import(
        "vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector",
        device_zero_without_accelerator,
    )


def skip_the_groups_of_one_rank(worker: ModuleType) -> None:
    """Let the TP rank that ``KV_CHECKSUM_RIG_SKIP_RANK`` names skip its KV cache groups.

    No layout that a CPU can run is one that only some workers cannot sum.
    """
    stock: Any = worker.build_group  # type: ignore[attr-defined]

    @functools.wraps(stock)
    def build_group(*args: Any) -> Any:
        shard = next(arg for arg in args if hasattr(arg, "tp_rank"))
        # A forked server has its environment only now.
        if os.environ.get("KV_CHECKSUM_RIG_SKIP_RANK") == str(shard.tp_rank):
            raise worker.SkipGroup("for the test")  # type: ignore[attr-defined]
        return stock(*args)

    worker.build_group = build_group  # type: ignore[attr-defined]


def slow_nixl_progress_thread(api: ModuleType) -> None:
    """Let NIXL's progress thread sleep 1000 us between rounds.

    Its Python API sets ``pthrDelay = 0``, with which every agent burns one core: on two cores a request took
    14.7 s. With 1000 us it takes 1.3 to 1.9 s. The API builds the configuration and hands it to the binding's
    ``nixlAgent``; that constructor is wrapped.
    """
    bindings: Any = api.nixlBind  # type: ignore[attr-defined]
    stock = bindings.nixlAgent
    if getattr(stock, "kv_checksum_rig", False):
        return

    @functools.wraps(stock, updated=())
    def agent(name: str, config: Any) -> Any:
        config.pthrDelay = NIXL_PROGRESS_DELAY_US
        return stock(name, config)

    agent.kv_checksum_rig = True  # type: ignore[attr-defined]
    bindings.nixlAgent = agent


def no_broadcast_busy_loop(module: ModuleType) -> None:
    """Let readers of vLLM's shared-memory broadcast block at once instead of spinning for 1 s.

    The spin holds the interpreter lock; with more processes than cores it starves the process it waits for
    (push mode stalled in 3 of 3 runs at 1 s and passed in 3 of 3 at 0). A reader that blocks before its socket is
    connected misses the writer's notice and looks again only after vLLM's 5 s, twice at each start of a server with
    several workers: it looks every 100 ms instead.
    """
    if not hasattr(module, "SHM_READER_RECHECK_INTERVAL_MS"):
        raise RuntimeError(
            "kv-checksum-rig: shm_broadcast has no recheck interval; revise the adjustment"
        )
    module.SHM_READER_RECHECK_INTERVAL_MS = BROADCAST_RECHECK_MS  # type: ignore[attr-defined]
    init: Any = module.SpinCondition.__init__  # type: ignore[attr-defined]
    names = init.__code__.co_varnames[: init.__code__.co_argcount]
    if not init.__defaults__ or names[-1] != "busy_loop_s":
        raise RuntimeError(
            "kv-checksum-rig: SpinCondition no longer ends in busy_loop_s; revise the adjustment"
        )
    init.__defaults__ = (*init.__defaults__[:-1], BROADCAST_BUSY_LOOP_S)


def no_amx(cpu: ModuleType) -> None:
    """Let vLLM choose attention as on a CPU without AMX, so that tests do the same on every machine.

    With AMX it packs bf16 KV in another order and replaces its MLA backend by one that takes other block sizes.
    ``KV_CHECKSUM_RIG_AMX=1`` in the environment leaves it the choice: tests of AMX set it. The kernel wants to be
    asked for AMX once per process, which the older kernels here do not do: without it the engine dies of SIGILL.
    """
    module: Any = cpu
    if os.environ.get("KV_CHECKSUM_RIG_AMX") == "1":
        module._init_amx()
    else:
        module._is_amx_tile_supported = lambda: False


def async_scheduling(module: ModuleType) -> None:
    """Let ``--async-scheduling`` stand; vLLM drops it on CPU as "not required"."""
    platform: Any = module.CpuPlatform  # type: ignore[attr-defined]
    stock = platform.check_and_update_config.__func__
    if getattr(stock, "kv_checksum_rig", False):
        return

    @functools.wraps(stock)
    def check(cls: Any, vllm_config: Any) -> None:
        asked = vllm_config.scheduler_config.async_scheduling
        stock(cls, vllm_config)
        if os.environ.get("KV_CHECKSUM_RIG_ASYNC_SCHEDULING") == "1":
            vllm_config.scheduler_config.async_scheduling = asked

    check.kv_checksum_rig = True  # type: ignore[attr-defined]
    platform.check_and_update_config = classmethod(check)


def device_zero_without_accelerator(module: ModuleType) -> None:
    """Let Mooncake's connector ask for the current accelerator where there is none.

    Its worker calls ``torch.accelerator.current_device_index()`` first of all, which raises on a machine without
    an accelerator, and binds threads to the answer: 0 is what every CPU tensor says too.
    """
    torch: Any = module.torch  # type: ignore[attr-defined]
    if not torch.accelerator.is_available():
        torch.accelerator.current_device_index = lambda: 0
