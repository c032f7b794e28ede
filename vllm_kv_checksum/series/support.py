"""Refuse set-ups that fail-closed checksums cannot cover.

What `kv_checksum_fail_closed` refuses is refused before any connector starts a thread, so
that the process ends: from the configuration, and, where it depends on the KV cache
groups, before the workers get theirs. Which groups the workers skip they are asked once
they have theirs.
"""

from ..edits import Module, assign

vllm_config = Module("config/vllm.py")
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

MODULES = [vllm_config, engine_core]
