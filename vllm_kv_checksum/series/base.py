"""Give connectors their methods for checksums, which by default do nothing.

A connector declares the carrier of a request's payload. Where that is the connector
itself, it takes opaque bytes on the producer's scheduler and gives them back with the
transfer results of the consumer's workers. A connector that stores KV may store
checksums with it: the worker fills them in, the connector moves them.
"""

from ..edits import Module, assign

SENT_BY_CONNECTOR = """
    def send_kv_checksums(self, request: "Request", checksums: bytes) -> None:
        assert self.connector_scheduler is not None
        self.connector_scheduler.send_kv_checksums(request, checksums)
    """
# The method of a connector that carries payloads itself, by way of its scheduler side.

NOT_STORED_YET = """
    _kv_checksums_not_stored: str | None = "the connector is not set up"

    """
# The attribute of a connector that can store checksums: why it does not store them.

STORED_BY_CONNECTOR = """
    @classmethod
    def _why_kv_checksums_not_stored(
        cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig | None"
    ) -> str | None:
        return kv_checksums.why_not_stored(vllm_config, kv_cache_config)

    def get_kv_checksum_sources(self, request: "Request") -> set[Any]:
        if self._kv_checksums_not_stored is not None:
            return set()
        return {self._cache_hit_source}

    """
# The methods of such a connector; `kv_checksums` is its module.

base = Module("distributed/kv_transfer/kv_connector/v1/base.py")
base.imports(
    """
    from collections.abc import Collection

    from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier
    if TYPE_CHECKING:
        from vllm.distributed.kv_transfer.kv_checksum import KVChecksumWorker
    """
)
with base.cls("KVConnectorTransferResults") as c:
    c.after(
        assign("failed_recving"),
        """
        # KV checksums received, by request id; no later than the load finishes.
        kv_checksums: dict[str, bytes] = field(default_factory=dict)
        """,
    )
with base.cls("KVConnectorBase_V1") as c:
    c.method(
        '''
        def kv_checksum_carrier(
            self, request: "Request", receiving: bool
        ) -> KVChecksumCarrier | None:
            """Return the carrier of a request's KV checksums; None if it has none.

            For a load, this is called before update_state_after_alloc.

            Args:
                request: the request that is sent or loaded.
                receiving: whether this instance loads the request's KV.

            """
            return None

        def send_kv_checksums(self, request: "Request", checksums: bytes) -> None:
            """Carry a finished request's KV checksums beside its KV.

            This is called after request_finished for a request whose carrier is
            KVChecksumCarrier.CONNECTOR. The worker that loads the request returns
            the bytes in KVConnectorTransferResults.kv_checksums.

            Args:
                request: the request that finished.
                checksums: opaque bytes.

            """
            raise NotImplementedError

        # Whether it transfers each rank's own tokens under context parallelism.
        _kv_checksums_follow_context: bool = False

        @classmethod
        def _why_kv_checksums_not_stored(
            cls, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig | None"
        ) -> str | None:
            """Return why a connector that can store KV checksums does not, or None.

            Args:
                vllm_config: vLLM's configuration.
                kv_cache_config: the KV cache groups; None if not planned yet.

            """
            return None

        def set_kv_checksum_worker(self, worker: "KVChecksumWorker") -> None:
            """Set the worker that sums KV blocks, before register_kv_caches.

            A connector that stores KV checksums calls its init_block_checksums, and
            its save_block_checksums before it reads the blocks it stores.

            Args:
                worker: sums this rank's KV blocks.

            """
            return

        def get_kv_checksum_sources(self, request: "Request") -> Collection[Any]:
            """Return the cache tiers whose loads bring stored KV checksums back.

            These are keys of get_external_cache_hit_sources. This is called before
            update_state_after_alloc.

            Args:
                request: the request whose load starts.

            """
            return ()

        def limit_matched_tokens(
            self, request: "Request", num_computed_tokens: int, max_num_new_tokens: int
        ) -> tuple[int | None, bool]:
            """Offer fewer tokens than get_num_new_matched_tokens just did.

            A connector that cannot load the beginning of what it found offers none.

            Args:
                request: the request that is scheduled.
                num_computed_tokens: tokens that it has already.
                max_num_new_tokens: the most tokens that may be loaded.

            Returns:
                As get_num_new_matched_tokens.

            """
            return 0, False

        def set_kv_checksum_ledger(self, ledger: Any) -> None:
            """Set the ledger, which wants to know which blocks are stored anew.

            A connector that knows calls its allow_stored.

            Args:
                ledger: LedgerLoads; keeps bad blocks from being loaded again.

            """
            return

        def on_kv_checksum_failure(
            self, request: "Request", mismatches: dict[int, list[int]]
        ) -> None:
            """Drop stored blocks that must not be loaded again.

            Args:
                request: the request whose load failed.
                mismatches: per KV cache group id, positions of blocks whose stored
                    KV checksums differ, or that the connector failed to load.

            """
            return

        ''',
    )
# Older connectors do not name the tiers that they load from: each has one, without a name.
with base.cls("KVConnectorBase_V1", below="0.32.0") as c:
    c.method(
        '''
        _cache_hit_source = "external"

        def get_external_cache_hit_sources(
            self, request: "Request", num_external_tokens: int
        ) -> dict[str, int]:
            """Return how many tokens of a load come from each cache tier."""
            return {self._cache_hit_source: num_external_tokens}

        ''',
    )

MODULES = [base]
