"""List the edits to vLLM, one module per integration, in order."""

from importlib import import_module

from ..edits import Module

ORDER = (
    "config",
    "worker",
    "scheduler",
    "base",
    "nixl_pull",
    "nixl_push",
    "mooncake",
    "multi_connector",
    "mamba",
    "models",
    "mooncake_store",
    "simple_cpu_offload",
    "metrics",
    "errors",
)


def load_series() -> list[Module]:
    """Return the modules to edit; edits of one file are merged in series order."""
    merged: dict[str, Module] = {}
    for name in ORDER:
        for module in import_module(f"{__name__}.{name}").MODULES:
            target = merged.setdefault(module.path, Module(module.path))
            target.import_code += module.import_code
            target.edits += module.edits
    return list(merged.values())
