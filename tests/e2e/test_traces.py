"""Let real servers export their spans, and read on them what came of each request's load.

The servers are forked from one process that imported vLLM (rig only).
"""

from __future__ import annotations

import pytest
from rig import spans
from rig.model import tiny_qwen3
from rig.routing import prefill
from rig.servers import serving

from e2e import pairs

pytestmark = pytest.mark.e2e

PREFIX = "vllm.kv_checksum."

EXPECTED = {
    "clean": {"verdict": "verified", "blocks_compared": 4, "blocks_mismatched": 0},
    "bit_flip": {"verdict": "mismatch", "blocks_compared": 4, "blocks_mismatched": 1},
    "lost_payload": {
        "verdict": "unverified",
        "unverified_reason": "no_payload",
        "blocks_compared": 0,
        "blocks_mismatched": 0,
    },
}


def test_spans_tell_the_verdicts(forks):
    """A request that fails has its span, too, and counts as one that failed."""
    with spans.collecting() as collector:
        traced = {
            "args": ("--otlp-traces-endpoint", collector.endpoint),
            "env": spans.ENVIRONMENT,
            "fork_server": forks,
        }
        p = pairs.producer("traces-p", tiny_qwen3(), **traced)
        d = pairs.consumer(
            "traces-d", tiny_qwen3(), "fail", faults=pairs.every_fault(), **traced
        )
        with serving(p, d):
            for number, (damage, told) in enumerate(EXPECTED.items()):
                prompt, request_id = pairs.prompt_of(100, number), f"{damage}-d"
                params = prefill(p, prompt, request_id=f"p-{damage}")
                answer = d.completions(prompt, 2, params, request_id=request_id)
                status = 200 if damage == "clean" else pairs.FAILED_STATUS
                assert answer.status_code == status
                span = collector.request_span(request_id)
                expected = {"carrier": "kv_transfer_params", **told}
                found = {k: v for k, v in span.items() if k.startswith(PREFIX)}
                assert found == {PREFIX + k: v for k, v in expected.items()}
                on_p = collector.request_span(f"p-{damage}")
                assert not [key for key in on_p if key.startswith(PREFIX)]
            name = "vllm:request_success_total"
            assert d.metric(name, finished_reason="error") == 2
