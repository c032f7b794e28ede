"""Let the scheduler ask for sums, add them up and judge loads.

Everything hangs on `Scheduler.kv_checksum`, None when checksums are off. The
verdict falls behind the connector's own failure reports and before the loop that
finishes requests, so a bad load takes vLLM's path for failed loads.
"""

from ..edits import Module, assign

scheduler = Module("v1/core/sched/scheduler.py")
scheduler.imports(
    "from vllm.distributed.kv_transfer.kv_checksum import create_kv_checksum_scheduler"
)
with scheduler.cls("Scheduler") as c:
    c.prepend("kv_checksum = None\n\n")
with scheduler.function("Scheduler.__init__") as f:
    f.after(
        "self.connector.bind_kv_cache_manager(self.kv_cache_manager)",
        """
        self.kv_checksum = create_kv_checksum_scheduler(
            vllm_config, self.connector, self.kv_cache_manager, kv_cache_config
        )
        """,
    )
with scheduler.function("Scheduler.schedule") as f:
    f.before(
        "if ext_tokens is None:",
        """
        if self.kv_checksum is not None:
            ext_tokens, load_kv_async = self.kv_checksum.admit(
                request, block_aligned_local, ext_tokens, load_kv_async
            )
        """,
    )
    f.after(
        assign("new_blocks", keyword="new_computed_blocks"),
        """
        if self.kv_checksum is not None and new_blocks is not None:
            if num_new_local_computed_tokens > 0:
                self.kv_checksum.add_local_hit(
                    request, num_new_local_computed_tokens
                )
            if num_external_computed_tokens > 0:
                self.kv_checksum.add_recv(
                    request,
                    num_new_local_computed_tokens,
                    num_computed_tokens,
                    load_kv_async,
                )
        """,
    )
with scheduler.function("Scheduler._update_after_schedule") as f:
    f.before(
        "self.finished_req_ids = set()",
        """
        if self.kv_checksum is not None:
            self.kv_checksum.after_schedule(scheduler_output, self.requests)
        """,
    )
with scheduler.function("Scheduler.update_from_output") as f:
    f.after(
        "cudagraph_stats = model_runner_output.cudagraph_stats",
        """
        if self.kv_checksum is not None:
            self.kv_checksum.collect(kv_connector_output)
        """,
    )
    f.before(
        "stopped_running_reqs: set[Request] = set()",
        """
        if self.kv_checksum is not None:
            bad_kv_loads = self.kv_checksum.verify(
                kv_connector_output,
                self.requests,
                failed_kv_load_req_ids | self.failed_recving_kv_req_ids,
                scheduler_output.kv_checksum_scheduled,
            )
            failed_kv_load_req_ids.update(
                self._handle_failed_recving(set(bad_kv_loads))
            )
            self.kv_checksum.keep_verified(bad_kv_loads, self.requests)
            failed_kv_load_req_ids.update(self.kv_checksum.stop_users(self))
        """,
    )
    f.before(
        "if self.ec_connector is not None:",
        """
        if self.kv_checksum is not None:
            error_req_ids.update(self.kv_checksum.take_failed())
        """,
    )
    f.before(
        "eco.scheduler_stats = stats",
        """
        if self.kv_checksum is not None:
            stats.kv_checksum_stats = self.kv_checksum.take_stats()
        """,
    )
with scheduler.function("Scheduler._free_request") as f:
    f.after(
        "connector_delay_free_blocks, kv_xfer_params = "
        "self._connector_finished(request)",
        """
        if self.kv_checksum is not None:
            kv_xfer_params = self.kv_checksum.request_finished(request, kv_xfer_params)
        """,
    )

MODULES = [scheduler]
