# SPDX-License-Identifier: Apache-2.0
"""The log lines of a consumer's scheduler: bounded, and fit to act on."""

from typing import Any

from vllm.logger import init_logger

from .verdict import LoadVerdict

logger = init_logger(__name__)

_MAX_GROUPS = 4
_MAX_VALUE_CHARS = 64


class Reporter:
    """Says what was found wrong; each fixed reason once as a warning."""

    def __init__(self) -> None:
        self._warned: set[str] = set()

    def warn_once(self, key: str, message: str, *args: object) -> None:
        """Log a warning unless one was logged under `key`."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning(message, *args)

    def load(self, req_id: str, verdict: LoadVerdict, source: str, action: str) -> None:
        """A load that is not verified.

        Args:
            source: where it came from.
            action: what is done about it.
        """
        if verdict.mismatched:
            logger.error(
                "KV checksum mismatch: request %s, %s, %s; %s",
                req_id,
                source,
                _differences(verdict),
                action,
            )
            return
        reason = verdict.reason
        assert reason is not None
        logger.debug("KV load of request %s not verified: %s", req_id, reason.value)
        self.warn_once(
            f"load:{reason.value}",
            "KV checksums not verified: %s (first for request %s; %s)",
            reason.value,
            req_id,
            action,
        )


def remote_engine(params: dict[str, Any]) -> str:
    """The engine that a load's ``kv_transfer_params`` name."""
    engine, address = _short(params.get("remote_engine_id")), _short(_address(params))
    return f"remote engine {engine} at {address}"


def _differences(verdict: LoadVerdict) -> str:
    return "; ".join(
        f"group {group_id}: {len(group.positions)} of {group.compared} blocks differ, "
        + ", ".join(
            f"position {d.position} sent {d.expected:016x} loaded {d.found:016x}"
            for d in group.samples
        )
        for group_id, group in list(verdict.groups.items())[:_MAX_GROUPS]
        if group.positions
    )


def _address(params: dict[str, Any]) -> object:
    """Where the remote engine listens: NIXL names host and port, Mooncake a URL."""
    if "remote_bootstrap_addr" in params:
        return params["remote_bootstrap_addr"]
    return f"{params.get('remote_host')}:{params.get('remote_port')}"


def _short(value: object) -> str:
    """A client's value, bounded for the log."""
    return str(value)[:_MAX_VALUE_CHARS]
