"""Provide the driver half of the "cpu" backend, which is never active."""

from __future__ import annotations

from typing import Any

from triton.backends import driver as triton_driver


class InterpretedDriver(triton_driver.DriverBase):  # type: ignore[misc]
    """A driver of no device; it exists to be counted."""

    @classmethod
    def is_active(cls) -> bool:
        """Stay out of Triton's choice of a driver."""
        return False

    def map_python_to_cpp_type(self, ty: str) -> str:
        """Refuse: there is no launcher to generate."""
        raise NotImplementedError(
            "the rig's Triton driver launches nothing; set TRITON_INTERPRET=1"
        )

    def get_current_target(self) -> Any:
        """Refuse: there is no device."""
        raise NotImplementedError(
            "the rig's Triton driver has no device; set TRITON_INTERPRET=1"
        )

    def get_active_torch_device(self) -> Any:
        """Refuse: there is no device."""
        raise NotImplementedError(
            "the rig's Triton driver has no device; set TRITON_INTERPRET=1"
        )

    def get_benchmarker(self) -> Any:
        """Refuse: nothing is measured in the interpreter."""
        raise NotImplementedError(
            "the rig's Triton driver measures nothing; set TRITON_INTERPRET=1"
        )
