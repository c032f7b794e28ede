"""What each reason that ``/metrics`` tells means: the tables of the operators' guide."""

UNVERIFIED = {
    "no_payload": "P has checksums off, or is stock vLLM; or the proxy drops the key kv_checksums; or P says not sent. "
    "On P, of what D sends back: the same of D",
    "payload_version": "P and D run different versions of this feature: finish the rollout",
    "bad_payload": "something between P and D changes kv_transfer_params",
    "workers_missing": "not every worker of D (on P: of P) reported its sums: look for errors of single workers",
    "other_blocks": "a worker summed other blocks than asked: report it as a bug",
    "one_side_only": "one side skips a KV cache group: compare the startup lines of both",
    "fingerprint": "P and D have different layers or KV dtypes in a group: not the same model or settings",
    "replica_missing": "a copy of replicated KV heads was not summed: see workers_missing",
    "block_sizes": "the block sizes of the two sides do not fit: make both multiples of 16, or one a multiple of the other",
    "unaligned_start": "D's local prefix hit ends inside a larger P block of a size that is no multiple of 16",
    "nothing_in_common": "no block that both sides hold, or none of any group",
    "num_tokens": "P summed another number of tokens than D loaded: the last block, or a Mamba state, cannot be compared. A proxy that changes the prompt between P and D does this; one appended token alone does not with NIXL pull, where P's count is known when the load starts (D computes that token all the same, and only P's tokens are compared; not with Mamba states)",
    "inputs": "P and D name other multi-modal inputs or another LoRA adapter for the same prompt, or one of them got embeddings",
    "no_carrier": "the connector that loaded it neither carries nor stores checksums, and there is no ledger: the startup lines name it",
    "sync_load": "it was loaded in the step that used it, and there is no ledger; fail-closed such loads are declined and computed instead",
    "from_decode": "a decode instance sent it, through a connector that carries checksums, but not back to P; NIXL pull does",
    "not_in_ledger": "this instance did not compute it, or not since its last start, or too long ago: the ledger",
    "quarantined": "it was not loaded at all: KV from that engine differed again and again, see kv_checksum_quarantine",
}

LEFT_OUT = {
    "missing_blocks": "the group: blocks inside the request are missing (a retained window)",
    "tp_sizes": "the group: it is not known how TP splits its states, and P and D have different TP sizes",
    "partial_blocks": "the first block of a sliding window: D's block is larger than P's and begins with tokens that had left P's window",
    "states": "the group, in a load from a cache tier: the ledger remembers no states (Mamba), and no tier brings a ring back",
}

SKIPPED = {
    "spec_class": "has blocks that are not numbered by token position (encoder caches), or a class that is not known",
    "compressed": "holds one entry for several tokens, in a layout that is not known",
    "packed_heads": "packs KV heads into head slots",
    "packed_cells": "packs a token's bytes in a format that is not known (some quantized caches)",
    "host_resident": "lies in host memory (HiSparse)",
    "states_and_tokens": "mixes Mamba states, rings and attention",
    "rings": "keeps the last tokens of requests in rings that differ from layer to layer",
    "state_split": "has states whose split over TP ranks is not understood",
    "replicas": "has heads of which it is not known how many ranks hold them",
    "too_many_heads": "has more than 65536 heads or state rows per layer",
    "layer_names": "has layers whose names do not number them once, as those of a draft model beside the model's own do (speculative method draft_model)",
    "backend": "is kept by an attention backend, or for it in a way, of which the order of bytes was not seen; the startup line names it",
    "no_cache": "names a layer that has no cache on the worker: report it",
    "memory_layout": "has strides, blocks or tokens that cannot be read as whole pieces",
    "other": "has another reason; the startup line tells it",
}
