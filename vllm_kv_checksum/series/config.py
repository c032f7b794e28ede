"""Add two settings to ``--kv-transfer-config``, and refuse what they cannot cover.

pydantic rejects unknown keys, so the fields must stand in vLLM's own class; their
docstrings document them. Model Runner V1 has a list of what it does not support:
checksums join it. What fail-closed refuses is refused before any connector starts a
thread, so that the process ends: from the configuration, and, where it depends on the
KV cache groups, before the workers get their caches. Once they have them, the workers
are asked which groups they skip.
"""

from ..edits import Module, assign

kv_transfer = Module("config/kv_transfer.py")
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

with vllm_config.function("VllmConfig.__post_init__") as f:
    f.after(
        "self._post_init_kv_transfer_config()",
        """
        if self.kv_transfer_config and self.kv_transfer_config.kv_checksum_fail_closed:
            from vllm.distributed.kv_transfer.kv_checksum import support

            support.refuse_unchecked(self)
        """,
    )

engine_core = Module("v1/engine/core.py")
engine_core.imports("from vllm.distributed.kv_transfer.kv_checksum import support")
with engine_core.function("EngineCore._initialize_kv_caches") as f:
    f.after(
        assign("scheduler_kv_cache_config"),
        "support.refuse_unchecked(vllm_config, scheduler_kv_cache_config)",
    )
    f.after(
        "self.model_executor.initialize_from_config(kv_cache_configs)",
        """
        support.ask_workers(vllm_config, scheduler_kv_cache_config, self.model_executor)
        """,
    )

MODULES = [kv_transfer, vllm_config, engine_core]
