"""Add settings for KV checksums, and fields that carry them.

`enable_kv_checksum` and `kv_checksum_fail_closed` stand in vLLM's own class, because
pydantic rejects unknown keys; their docstrings document them. Model Runner V1 has a list
of what it does not support: checksums join it.
"""

from ..edits import Module, assign

kv_transfer = Module("config/kv_transfer.py")
kv_transfer.imports(
    """
    import os

    from pydantic import Field
    """
)
with kv_transfer.cls("KVTransferConfig") as c:
    c.after(
        assign("kv_load_failure_policy"),
        '''
        enable_kv_checksum: bool = False
        """Verify every KV block that is loaded from another instance against its
        producer's checksum before the request runs. Enable it on both sides."""

        kv_checksum_fail_closed: bool = False
        """Treat loads whose KV checksums differ or cannot be verified as failed, so
        that kv_load_failure_policy decides. Off: they are logged and counted."""

        kv_checksum_ledger_blocks: int = Field(default=2**20, ge=0, le=2**28)
        """Number of KV blocks whose checksums the scheduler remembers, to verify loads
        through connectors that bring no checksums; about 45 bytes each. 0: none."""

        kv_checksum_scrub: float = Field(default=0.0, ge=0.0, le=1.0)
        """Share of the blocks found in the local prefix cache that is summed again and
        compared with the remembered checksums."""

        kv_checksum_evidence_dir: str | None = None
        """Directory to which mismatches of KV checksums are written, as JSON lines; it
        holds at most 64 files of 4 MiB. None: they are only logged and counted."""

        kv_checksum_quarantine: int = Field(default=0, ge=0, le=10_000)
        """Number of loads from one instance whose KV checksums differ within 60 s, after
        which nothing is loaded from it for a time that grows from 60 s to 1 h. 0: off."""

        kv_checksum_quarantine_from_requests: bool = False
        """Let loads count for kv_checksum_quarantine whose checksums came in
        kv_transfer_params. Set it only if trusted routers alone can set these."""
        ''',
        past_docstring=True,
    )
with kv_transfer.function("KVTransferConfig.__post_init__") as f:
    f.prepend(
        """
        if self.kv_checksum_fail_closed and not self.enable_kv_checksum:
            raise ValueError(
                "kv_checksum_fail_closed needs enable_kv_checksum: set "
                "enable_kv_checksum to true in --kv-transfer-config as well"
            )
        if self.kv_checksum_quarantine and not self.enable_kv_checksum:
            raise ValueError(
                "kv_checksum_quarantine needs enable_kv_checksum: set "
                "enable_kv_checksum to true in --kv-transfer-config as well"
            )
        if (
            self.kv_checksum_quarantine_from_requests
            and not self.kv_checksum_quarantine
        ):
            raise ValueError(
                "kv_checksum_quarantine_from_requests needs kv_checksum_quarantine: "
                "set that to a number of mismatches in --kv-transfer-config as well"
            )
        if (evidence := self.kv_checksum_evidence_dir) is not None:
            if not self.enable_kv_checksum:
                raise ValueError(
                    "kv_checksum_evidence_dir needs enable_kv_checksum: set "
                    "enable_kv_checksum to true in --kv-transfer-config as well"
                )
            if not (os.path.isdir(evidence) and os.access(evidence, os.W_OK | os.X_OK)):
                raise ValueError(
                    f"kv_checksum_evidence_dir: {evidence!r} is no directory that this "
                    "process can write to; create it, or give it to vLLM's user"
                )
        """
    )

vllm_config = Module("config/vllm.py")
with vllm_config.function("VllmConfig._get_v1_model_runner_unsupported_features") as f:
    f.before(
        "return unsupported",
        """
        transfer = getattr(self, "kv_transfer_config", None)
        if transfer and transfer.enable_kv_checksum:
            unsupported.append("KV checksums (enable_kv_checksum)")
        """,
    )

MODULES = [kv_transfer, vllm_config]
