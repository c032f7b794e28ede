# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Break the authors' connectors, each in one way, which its docstring tells."""

from collections import defaultdict

from vllm.distributed.kv_transfer.kv_checksum import KVChecksumCarrier
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorTransferResults,
)

from .folder import FolderConnector
from .memory import MemoryConnector, UnstoredConnector

QUEUES: dict = defaultdict(list)


class Raises(FolderConnector):
    """Raise where a step with a send is built."""

    def build_connector_meta(self, scheduler_output):
        assert not self.sends, "cannot send"
        return super().build_connector_meta(scheduler_output)


class FindsNothing(FolderConnector):
    """Find no KV."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False


class NeverReports(FolderConnector):
    """Load, and do not tell."""

    def receive(self, results, *load):
        super().receive(KVConnectorTransferResults(), *load)


class Fails(FolderConnector):
    """Report each load as failed."""

    def receive(self, results, *load):
        super().receive(results, *load)
        results.failed_recving |= results.finished_recving


class ReportsTwice(FolderConnector):
    """Report a load in the next step again."""

    again: set[str] = set()

    def get_transfer_results(self, finished_req_ids):
        results = super().get_transfer_results(finished_req_ids)
        again, self.again = self.again, set(results.finished_recving)
        results.finished_recving |= again
        return results


class ReportsEarly(FolderConnector):
    """Report a load, and write its blocks when the next step begins."""

    late: tuple | None = None

    def receive(self, results, req_id, name, block_ids):
        blocks = [cache[block_ids].clone() for cache in self.kv_caches.values()]
        super().receive(results, req_id, name, block_ids)
        self.late = block_ids, [c[block_ids] for c in self.kv_caches.values()]
        for cache, old in zip(self.kv_caches.values(), blocks, strict=True):
            cache[block_ids] = old

    def handle_preemptions(self, kv_connector_metadata):
        if self.late is not None:
            block_ids, blocks = self.late
            for cache, new in zip(self.kv_caches.values(), blocks, strict=True):
                cache[block_ids] = new
            self.late = None


class ShiftsABlock(FolderConnector):
    """Write each block to its successor's place."""

    def receive(self, results, req_id, name, block_ids):
        super().receive(results, req_id, name, [*block_ids[1:], block_ids[0]])


class WritesOtherBlocks(FolderConnector):
    """Write to the block behind the last one, too."""

    def receive(self, results, req_id, name, block_ids):
        super().receive(results, req_id, name, block_ids)
        for cache in self.kv_caches.values():
            cache[max(block_ids) + 1] = 0


class ReportsFromTheScheduler(FolderConnector):
    """Tell the scheduler of a load that no worker reports."""

    def __init__(self, vllm_config, role, kv_cache_config):
        super().__init__(vllm_config, role, kv_cache_config)
        self.started: set[str] = set()

    def receive(self, results, *load):
        super().receive(KVConnectorTransferResults(), *load)

    def build_connector_meta(self, scheduler_output):
        self.started |= self.loads.keys()
        return super().build_connector_meta(scheduler_output)

    def update_connector_output(self, connector_output):
        connector_output.finished_recving, self.started = self.started, set()


class DeclaresNoLoads(FolderConnector):
    """Name a carrier for what is sent, and none for loads."""

    def kv_checksum_carrier(self, request, receiving):
        return None if receiving else super().kv_checksum_carrier(request, receiving)


class DeclaresNoSends(FolderConnector):
    """Name a carrier for loads, and none for what is sent."""

    def kv_checksum_carrier(self, request, receiving):
        return super().kv_checksum_carrier(request, receiving) if receiving else None


class LosesChecksums(FolderConnector):
    """Take checksums and send none."""

    def send_kv_checksums(self, request, checksums): ...


class SendsLate(FolderConnector):
    """Return checksums one step behind their load."""

    late: dict[str, bytes] = {}

    def get_transfer_results(self, finished_req_ids):
        results = super().get_transfer_results(finished_req_ids)
        results.kv_checksums, self.late = self.late, results.kv_checksums
        return results


class CutsChecksums(FolderConnector):
    """End checksums at their first zero byte."""

    def send_kv_checksums(self, request, checksums):
        super().send_kv_checksums(request, checksums.split(b"\0")[0])


class KeepsChecksumsByOrder(FolderConnector):
    """Give each load the checksums that were sent first."""

    def send_kv_checksums(self, request, checksums):
        super().send_kv_checksums(request, checksums)
        QUEUES[self.folder].append(checksums)

    def receive(self, results, req_id, name, block_ids):
        super().receive(results, req_id, name, block_ids)
        results.kv_checksums[req_id] = QUEUES[self.folder].pop(0)


class NamesTheProducer(FolderConnector):
    """Return checksums under the producer's request id, too."""

    def receive(self, results, req_id, name, block_ids):
        super().receive(results, req_id, name, block_ids)
        results.kv_checksums[name] = results.kv_checksums.get(req_id, b"")


class WantsChecksums(FolderConnector):
    """Fail where the producer sends none."""

    def receive(self, results, req_id, name, block_ids):
        super().receive(results, req_id, name, block_ids)
        assert req_id in results.kv_checksums


class InParams(FolderConnector):
    """Right: let ``kv_transfer_params`` carry the checksums."""

    def kv_checksum_carrier(self, request, receiving):
        return KVChecksumCarrier.KV_TRANSFER_PARAMS.of_request(request, receiving)


class DropsParams(InParams):
    """Keep only the parameters that it knows."""

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        params = request.kv_transfer_params or {}
        request.kv_transfer_params = {
            k: params[k]
            for k in ("do_remote_prefill", "do_remote_decode", "file")
            if k in params
        }
        return super().get_num_new_matched_tokens(request, num_computed_tokens)


class LeavesEntries(MemoryConnector):
    """Load blocks without their checksums."""

    def load(self, run):
        entries, self.entries = self.entries, None
        super().load(run)
        self.entries = entries


class SumsAnew(MemoryConnector):
    """Make checksums of what was loaded."""

    def load(self, run):
        super().load(run)
        self.sums.save_block_checksums([run])


class KeepsBadValues(MemoryConnector):
    """Leave what is stored as it is."""

    def on_kv_checksum_failure(self, request, mismatches): ...


class IgnoresTheLimit(UnstoredConnector):
    """Offer again all that it has."""

    def limit_matched_tokens(self, request, num_computed_tokens, max_num_new_tokens):
        return self.get_num_new_matched_tokens(request, num_computed_tokens)
