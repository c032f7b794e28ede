"""Load one module with one line changed, in every process that has this folder on ``PYTHONPATH``.

``KV_CHECKSUM_MUTANT`` names a JSON file: the module, the function, the text before and after. The module's file
stays as it is; who asks for its source (Triton does) gets the changed one, too.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, ModuleType

sys.path.append(str(Path(__file__).parent))

from change import changed_source  # noqa: E402


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        path = str(self.path)
        source = changed_source(Path(path).read_text(), **_MUTANT["change"])
        lines = source.splitlines(keepends=True)
        linecache.cache[path] = (len(source), None, lines, path)
        code: CodeType = compile(source, path, "exec", dont_inherit=True)
        return code


class _Finder(importlib.abc.MetaPathFinder):
    searching = False

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _MUTANT["module"] or self.searching:
            return None
        self.searching = True
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self.searching = False
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(fullname, spec.origin)
        return spec


if "KV_CHECKSUM_MUTANT" in os.environ:
    _MUTANT = json.loads(Path(os.environ["KV_CHECKSUM_MUTANT"]).read_text())
    sys.meta_path.insert(0, _Finder())
