"""Import what vLLM imports of other packages, as a fork server's preload."""

import contextlib
import gc
import importlib
import json
import os
import subprocess
import sys
import warnings

_OWN = ("vllm", "vllm_kv_checksum", "kv_checksum_rig")
_LIST = f"""
import json, sys
import pytest, vllm.v1.engine.core, vllm.v1.worker.gpu.kv_connector
import vllm.distributed.kv_transfer.kv_connector.v1.nixl
import vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector
names = [x for x in sys.modules if x.partition(".")[0] not in {_OWN} and x != "__main__"]
print(json.dumps(names))
"""

import torch  # noqa: E402

if not torch.cuda.is_available():
    # Triton asks when it is imported (tests/conftest.py).
    os.environ.setdefault("TRITON_INTERPRET", "1")
_listed = subprocess.run(
    [sys.executable, "-c", _LIST], stdout=subprocess.PIPE, text=True, check=True
)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    for _name in json.loads(_listed.stdout.splitlines()[-1]):
        # Some names are made by others at import, and cannot be asked for.
        with contextlib.suppress(Exception):
            importlib.import_module(_name)
gc.collect()
gc.freeze()
