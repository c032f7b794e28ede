"""Provide the compiler half of the "cpu" backend, which Triton wants and nobody uses."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from triton.backends import compiler as triton_compiler


class InterpretedBackend(triton_compiler.BaseBackend):  # type: ignore[misc]
    """Accepts no target; every kernel of the rig runs in the interpreter."""

    @staticmethod
    def supports_target(target: Any) -> bool:
        """Say no to every target, so that Triton never picks this compiler."""
        return False

    def hash(self) -> str:
        """Name the backend in cache keys."""
        return "kv-checksum-rig-interpreter"

    def parse_options(self, options: dict[str, Any]) -> object:
        """Refuse: nothing is compiled here."""
        raise NotImplementedError(
            "the rig's Triton backend compiles nothing; set TRITON_INTERPRET=1"
        )

    def add_stages(
        self, stages: dict[str, Any], options: object, language: Any
    ) -> None:
        """Refuse: nothing is compiled here."""
        raise NotImplementedError(
            "the rig's Triton backend compiles nothing; set TRITON_INTERPRET=1"
        )

    def load_dialects(self, context: Any) -> None:
        """Load no dialect."""

    def get_module_map(self) -> dict[str, ModuleType]:
        """Map no module."""
        return {}
