"""Route payloads to the sub-connector that serves the request.

Sub-connectors get both checksum settings from the outer configuration, and their
received payloads are merged.
"""

from ..edits import Module, assign

multi = Module("distributed/kv_transfer/kv_connector/v1/multi_connector.py")
multi.imports(
    """
    from collections.abc import Collection

    from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier, support
    from vllm.distributed.kv_transfer.kv_checksum.connectors import multi_connector
    """
)
with multi.function("MultiConnector._get_connector_classes_and_configs") as f:
    f.after(
        assign("temp_config.kv_transfer_config"),
        """
        multi_connector.inherit_settings(
            vllm_config.kv_transfer_config, temp_config.kv_transfer_config
        )
        """,
    )
with multi.function("MultiConnector.get_transfer_results") as f:
    f.after(
        "results.failed_recving.update(child_results.failed_recving)",
        "results.kv_checksums.update(child_results.kv_checksums)",
    )
with multi.cls("MultiConnector") as c:
    c.method(
        """
        def kv_checksum_carrier(
            self, request: "Request", receiving: bool
        ) -> KVChecksumCarrier | None:
            if receiving:
                return multi_connector.load_carrier(self, request)
            return multi_connector.send_route(self._connectors, request)[1]

        def send_kv_checksums(self, request: "Request", checksums: bytes) -> None:
            connector, _ = multi_connector.send_route(self._connectors, request)
            assert connector is not None
            connector.send_kv_checksums(request, checksums)

        """
    )
# Stored checksums: every sub-connector gets the worker, the one that loads is asked.
with multi.cls("MultiConnector") as c:
    c.method(
        """
        def set_kv_checksum_worker(self, worker: Any) -> None:
            for connector in self._connectors:
                connector.set_kv_checksum_worker(worker)

        def get_kv_checksum_sources(self, request: "Request") -> Collection[Any]:
            connector = support.serving_connector(self, request)
            if connector is self:
                return ()
            return connector.get_kv_checksum_sources(request)

        def limit_matched_tokens(
            self, request: "Request", num_computed_tokens: int, max_num_new_tokens: int
        ) -> tuple[int | None, bool]:
            connector = support.serving_connector(self, request)
            if connector is self:
                return 0, False
            return connector.limit_matched_tokens(
                request, num_computed_tokens, max_num_new_tokens
            )

        def set_kv_checksum_ledger(self, ledger: Any) -> None:
            for connector in self._connectors:
                connector.set_kv_checksum_ledger(ledger)

        def on_kv_checksum_failure(
            self, request: "Request", mismatches: dict[int, list[int]]
        ) -> None:
            connector = support.serving_connector(self, request)
            if connector is not self:
                connector.on_kv_checksum_failure(request, mismatches)

        """
    )

MODULES = [multi]
