"""Ships the feature's modules inside the installer package."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithFeature(build_py):
    """Copies ``vllm/distributed/kv_transfer/kv_checksum`` to ``_feature``."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        target = Path(self.build_lib) / "vllm_kv_checksum" / "_feature"
        source = Path(__file__).parent / "vllm/distributed/kv_transfer/kv_checksum"
        for module in source.rglob("*.py"):
            copy = target / module.relative_to(source)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(module, copy)


setup(cmdclass={"build_py": BuildWithFeature})
