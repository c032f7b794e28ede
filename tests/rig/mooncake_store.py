"""Run a real ``mooncake_master`` over TCP, instances that store in it, and a client that looks into it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rig import processes
from rig.servers import ENVIRONMENT, HOST, Server, free_port

SEGMENT = 48 << 20
"""Bytes that a client of the store lends to it."""


class MooncakeStore:
    """One master and a client of it; use as a context manager.

    Keys are built as vLLM builds them: `key` of a model, a rank and a block hash.

    Args:
        log_dir: where the master's log goes.
        flags: further flags of the master.
        lent: bytes that the client lends to the store.
        segment: bytes that every instance lends to it; with 0 they lend none.

    """

    def __init__(
        self,
        log_dir: Path,
        flags: Sequence[str] = (),
        lent: int = SEGMENT,
        segment: int = SEGMENT,
    ) -> None:
        self._flags, self._lent, self._segment = flags, lent, segment
        self._port, self._metrics_port = free_port(), free_port()
        self._log_dir = log_dir
        self._config = log_dir / "mooncake.json"
        self._client: Any = None

    def __enter__(self) -> MooncakeStore:
        self._log_dir.mkdir(parents=True, exist_ok=True)
        self._config.write_text(json.dumps(self._settings()))
        self.start_master()
        self._connect()
        return self

    def start_master(self) -> None:
        """Start the master; after `kill_master` it is another one at the same address, which knows of nothing."""
        with (self._log_dir / "mooncake_master.log").open("ab") as log:
            self._master = subprocess.Popen(
                [
                    str(Path(sys.executable).parent / "mooncake_master"),
                    f"-rpc_port={self._port}",
                    f"-rpc_address={HOST}",
                    f"-metrics_port={self._metrics_port}",
                    *self._flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._guard = processes.guard(self._master.pid)

    @property
    def address(self) -> str:
        """Return the host and port of the master."""
        return f"{HOST}:{self._port}"

    @property
    def environment(self) -> dict[str, str]:
        """Return what an instance's processes read of the store from their environment."""
        return {"MOONCAKE_CONFIG_PATH": str(self._config), "MC_FORCE_TCP": "1"}

    def kill_master(self) -> None:
        """End the master at once."""
        self._master.kill()
        self._master.wait(5)
        processes.dismiss(self._guard)

    def _settings(self) -> dict[str, Any]:
        """Return the settings of an instance's store."""
        return {
            "metadata_server": "P2PHANDSHAKE",
            "master_server_address": self.address,
            "protocol": "tcp",
            "device_name": "",
            "mode": "embedded" if self._segment else "standalone-store",
            "global_segment_size": self._segment,
            "local_buffer_size": SEGMENT,
        }

    def _connect(self, timeout: float = 15) -> None:
        """Connect a client that lends memory itself: what it puts outlives the instances."""
        os.environ |= {k: v for k, v in ENVIRONMENT.items() if k.startswith("MC_")}
        from mooncake.store import MooncakeDistributedStore

        until = time.monotonic() + timeout
        while True:
            client = MooncakeDistributedStore()
            status = client.setup(
                HOST, "P2PHANDSHAKE", self._lent, SEGMENT, "tcp", "", self.address
            )
            if status == 0:
                self._client = client
                return
            if time.monotonic() > until:
                raise RuntimeError(f"mooncake_master did not answer: {status}")
            time.sleep(0.2)

    def instance(
        self,
        name: str,
        role: str,
        *,
        model: Path,
        transfer: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
        env: Mapping[str, str] | None = None,
        **kwargs: Any,
    ) -> Server:
        """Return an instance that stores in, or loads from, this store (not started)."""
        # The lookup channel is named by port and host: one of its own each.
        options = {"lookup_rpc_port": free_port(), **(extra or {})}
        return Server(
            name,
            role,
            model=model,
            connector="MooncakeStoreConnector",
            transfer={"kv_connector_extra_config": options, **(transfer or {})},
            env={**self.environment, **(env or {})},
            **kwargs,
        )

    def exist(self, keys: Sequence[str]) -> list[bool]:
        """Tell which of the keys the store holds."""
        return [found == 1 for found in self._client.batch_is_exist(list(keys))]

    def wait_for(self, keys: Sequence[str], timeout: float = 15) -> None:
        """Wait until the store holds all of the keys: instances store after they answer."""
        until = time.monotonic() + timeout
        while not all(self.exist(keys)):
            if time.monotonic() > until:
                raise TimeoutError(f"{self.exist(keys)} of {list(keys)}")
            time.sleep(0.05)

    def get(self, key: str) -> bytes:
        """Return a value."""
        value: bytes = self._client.get(key)
        return value

    def replace(self, key: str, value: bytes) -> None:
        """Put another value in place of a key's."""
        self._client.remove(key, True)
        status = self._client.put(key, value)
        if status != 0:
            raise RuntimeError(f"Mooncake put failed: {status}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._client is not None:
            self._client.close()
        processes.end(self._master.pid, polite_s=3)
        self._master.wait(5)
        processes.dismiss(self._guard)


def key(model: Path, rank: int, block_hash: bytes, *, checksums: bool = True) -> str:
    """Return the key of one block and TP rank."""
    namespace = "@kv_checksums2" if checksums else ""
    ranks = f"@tp_rank:{rank}@pcp0@dcp0@pp_rank:0@group:0"
    return f"{model.name}{namespace}{ranks}@{block_hash.hex()}"
