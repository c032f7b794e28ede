"""Test that import statements go where isort's rules want them; ruff is the judge."""

import ast
import subprocess
import sys

import pytest

from vllm_kv_checksum.edits import AnchorError, Module
from vllm_kv_checksum.imports import add_imports, head_end

SOURCE = '''"""A module."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

import torch
from numpy import (
    array,
    zeros,
)

from vllm.logger import init_logger
from vllm.v1.outputs import A_CONSTANT, Output, make

if TYPE_CHECKING:
    from vllm.config import VllmConfig

logger = init_logger(__name__)
print(os, Any, torch, array, zeros, A_CONSTANT, Output, make)
x: "VllmConfig"
'''


def is_sorted(source: str) -> bool:
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "I"]
    command += ["--config", 'lint.isort.known-first-party=["vllm"]', "-"]
    return subprocess.run(command, input=source, text=True).returncode == 0


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("import ast", "\nimport ast\nimport os\nfrom typing"),
        ("import zlib", "import os\nimport zlib\nfrom typing"),
        ("from abc import ABC", "import os\nfrom abc import ABC\nfrom typing"),
        ("from zipfile import Path", "Any\nfrom zipfile import Path\n\nimport torch"),
        ("from typing import Protocol", "import TYPE_CHECKING, Any, Protocol\n"),
        ("from numpy import empty", "    array,\n    empty,\n    zeros,\n)"),
        ("import vllm.envs", "\n\nimport vllm.envs\nfrom vllm.logger"),
        ("from vllm.a import b", "\n\nfrom vllm.a import b\nfrom vllm.logger"),
        (
            "from vllm.v1.outputs import All, _x",
            "import A_CONSTANT, All, Output, _x, make\n",
        ),
        (
            "from vllm.v1.outputs import Output as Other",
            "Output, make\nfrom vllm.v1.outputs import Output as Other\n\nif",
        ),
        (
            "from vllm.logger import " + ", ".join(f"name_{n}" for n in range(9)),
            "from vllm.logger import (\n    init_logger,\n    name_0,\n",
        ),
        (
            "from vllm.b import " + ", ".join(f"long_name_{n}" for n in range(9)),
            "from vllm.b import (\n    long_name_0,\n",
        ),
        (
            "if TYPE_CHECKING:\n    from vllm.b import C",
            "CHECKING:\n    from vllm.b import C\n    from vllm.config",
        ),
        (
            "if TYPE_CHECKING:\n    from vllm.config import A",
            "CHECKING:\n    from vllm.config import A, VllmConfig\n",
        ),
    ],
)
def test_an_import_joins_its_section_in_order(code, expected):
    assert is_sorted(SOURCE)
    got = add_imports(SOURCE, code)
    assert expected in got
    assert is_sorted(got)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import vllm\n\nx = 1\n", "import os\n\nimport vllm\n\nx = 1\n"),
        ("import ast\n\nx = 1\n", "import ast\nimport os\n\nx = 1\n"),
        (
            "from __future__ import annotations\n\nx = 1\n",
            "from __future__ import annotations\n\nimport os\n\nx = 1\n",
        ),
        ("# first\nimport sys\n", "import os\n# first\nimport sys\n"),
    ],
)
def test_a_section_that_is_not_there_is_made(source, expected):
    assert add_imports(source, "import os") == expected


def test_the_head_ends_behind_its_last_import():
    assert head_end(ast.parse(SOURCE)) == 15
    assert head_end(ast.parse("x = 1\n")) == 0


@pytest.mark.parametrize(
    ("code", "told"),
    [
        ("x = 1", "not an import: x = 1"),
        ("if TYPE_CHECKING:\n    x = 1", "not an import: x = 1"),
        ("if TYPE_CHECKING:\n    import os", "no `if TYPE_CHECKING:`"),
    ],
)
def test_what_cannot_be_placed_is_said_with_the_file(code, told):
    module = Module("m.py")
    module.imports(code)
    with pytest.raises(AnchorError, match="m.py.*" + told):
        module.apply("import os\n")
