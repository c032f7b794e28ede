"""Show the counts of KV checksums on ``/metrics``."""

from ..edits import Module, assign

loggers = Module("v1/metrics/loggers.py")
loggers.imports(
    """
    from vllm.distributed.kv_transfer.kv_checksum import (
        KVChecksumProm,
        export_kv_checksum_info,
    )
    """
)
with loggers.cls("PrometheusStatLogger") as c:
    c.prepend("kv_checksum_prom: KVChecksumProm | None = None\n\n")
with loggers.function("PrometheusStatLogger.__init__") as f:
    f.after(
        assign("self.kv_connector_prom"),
        """
        kv_transfer_config = vllm_config.kv_transfer_config
        if kv_transfer_config and kv_transfer_config.enable_kv_checksum:
            self.kv_checksum_prom = KVChecksumProm(
                self._counter_cls, self._gauge_cls, labelnames, per_engine_labelvalues
            )
            export_kv_checksum_info(
                vllm_config, self._gauge_cls, labelnames, per_engine_labelvalues
            )
        """,
    )
with loggers.function("PrometheusStatLogger.record") as f:
    f.before(
        "if scheduler_stats.kv_connector_stats is not None:",
        """
        if self.kv_checksum_prom and scheduler_stats.kv_checksum_stats:
            self.kv_checksum_prom.observe(
                scheduler_stats.kv_checksum_stats, engine_idx
            )

        """,
    )

MODULES = [loggers]
