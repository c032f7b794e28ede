"""Let a hybrid of states, a sliding window and full attention run on a CPU with its prefix cache on.

No tiny model has all three as transformers writes it, so Nemotron-H gets windows; and the CPU kernel of Mamba2 hands
out no states from within a prefill, so vLLM is told so.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from types import ModuleType
from typing import Any

from kv_checksum_rig.on_import import on_import


def apply() -> None:
    """Register the adjustments. Safe to call more than once."""
    on_import(
        "transformers.models.nemotron_h.configuration_nemotron_h", windows_of_layers
    )
    on_import(
        "vllm.model_executor.layers.mamba.mamba_mixer2", no_states_within_a_prefill
    )


def windows_of_layers(module: ModuleType) -> None:
    """Give attention layers the windows that ``"windows": {"LAYER": TOKENS}`` in ``config.json`` names.

    vLLM asks a Nemotron-H configuration for that of each layer, if it has such a method. Published models bring it in
    code of their own; transformers' class has none.
    """

    def config_for_layer(self: Any, index: int) -> Any:
        window = (getattr(self, "windows", None) or {}).get(str(index))
        if window is None:
            return self
        own = copy.copy(self)
        own.sliding_window = window
        return own

    config: Any = module.NemotronHConfig  # type: ignore[attr-defined]
    config.get_nemotron_h_config_for_layer = config_for_layer


def no_states_within_a_prefill(module: ModuleType) -> None:
    """Let vLLM end a prefill where it wants to cache a state, as it does for kernels that give the last one alone.

    Mamba2's CPU kernel is one of these, and is asked for states at every chunk all the same: an IndexError.
    """
    mixer: Any = module.MambaMixer2  # type: ignore[attr-defined]
    stock = mixer.get_kv_cache_spec
    if getattr(stock, "kv_checksum_rig", False):
        return

    @functools.wraps(stock)
    def spec(self: Any, vllm_config: Any) -> Any:
        return dataclasses.replace(
            stock(self, vllm_config),
            num_prefill_checkpoint_blocks=0,
            prefill_checkpoint_alignment=None,
        )

    spec.kv_checksum_rig = True  # type: ignore[attr-defined]
    mixer.get_kv_cache_spec = spec
