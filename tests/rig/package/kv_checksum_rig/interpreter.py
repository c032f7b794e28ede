"""Make Triton's interpreter cheaper: it runs the kernels of vLLM's model runner, most of a server's work here.

A decode step of the rig's model costs half as much without what is dropped here, and computes the same.
"""

from __future__ import annotations

import dataclasses
import functools
from types import ModuleType
from typing import Any


def apply(module: ModuleType) -> None:
    """Change ``triton.runtime.interpreter``. Safe to call more than once."""
    interpreter: Any = module
    if not getattr(interpreter._patch_lang, "kv_checksum_rig", False):
        keep_language_patched(interpreter)
        leave_overflows_alone(interpreter)


def keep_language_patched(interpreter: Any) -> None:
    """Let the interpreter change the language once instead of at each launch and each call of a device function.

    It goes through every name of the language and wraps the builtins, and takes the wrappers off at a launch's end.
    Only a compiler would mind them, and a process that interprets compiles nothing.
    """
    stock = interpreter._patch_lang
    patched: set[tuple[bool, ...]] = set()

    @functools.wraps(stock)
    def patch_lang(fn: Any) -> Any:
        seen = tuple(
            any(value is language for value in fn.__globals__.values())
            for language in (interpreter.tl, interpreter.tl.core)
        )
        if seen not in patched:
            stock(fn)
            patched.add(seen)
        return interpreter._LangPatchScope()  # nothing to put back

    patch_lang.kv_checksum_rig = True  # type: ignore[attr-defined]
    interpreter._patch_lang = patch_lang


def leave_overflows_alone(interpreter: Any) -> None:
    """Do not check integer arithmetic for overflows, as compiled kernels do not unless one debugs them."""
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
