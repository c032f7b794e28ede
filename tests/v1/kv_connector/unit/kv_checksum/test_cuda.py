# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test, on a CUDA GPU, the kernel's values and that sums reach the host in order.

The kernel's tests need torch and Triton alone; the worker's need vLLM.
"""

import threading

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA GPU", allow_module_level=True)

from without_vllm import stand_in_for_vllm, vllm_is_installed

stand_in_for_vllm()

from vllm.distributed.kv_transfer.kv_checksum.worker.kernels import (  # noqa: E402
    torch_reference,
    triton_kernel,
)

from .rig.cells import (  # noqa: E402
    LAYOUTS,
    SHAPES,
    expected,
    random_cells,
    rows_for,
    run,
    view,
)

needs_vllm = pytest.mark.skipif(not vllm_is_installed(), reason="needs vLLM")


@pytest.mark.parametrize("prepare", [triton_kernel.prepare, torch_reference.prepare])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_the_definitions_value(prepare, shape, layout):
    cells = random_cells(*shape)
    layer_view = view(cells, layout(cells.cuda()))
    rows = rows_for(shape[2])
    assert run(prepare, [layer_view], rows.cuda()) == expected(cells, rows)


@pytest.fixture
def worker_and_cache():
    from .rig import caches as u

    spec = u.full_spec()
    cache = u.random_cache(8, spec)
    caches = {u.names(0)[0]: cache.cuda()}
    worker = u.worker(u.config(8, (caches, spec)), caches)
    return worker, cache, caches[u.names(0)[0]]


def scheduled():
    from vllm.distributed.kv_transfer.kv_checksum import (
        KVChecksumBlocks,
        KVChecksumScheduled,
    )

    blocks = KVChecksumBlocks(57, {0: (1, [5, 2, 7])})
    return KVChecksumScheduled(reqs_to_send={"r": blocks})


@needs_vllm
def test_sums_are_copied_after_they_are_made_and_before_later_writes(worker_and_cache):
    """Call `finalize` on another thread while the stream is busy, as executors do."""
    from .rig import caches as u

    worker, cache, on_device = worker_and_cache
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        worker.bind(scheduled())
        output = worker.post_forward(None, set(), set())
        on_device.zero_()  # the next forward
        torch.cuda._sleep(200_000_000)
    records = []
    thread = threading.Thread(target=lambda: records.extend(output.finalize()))
    thread.start()
    thread.join()
    assert u.values_of(records[0]) == u.expected_sums({0: cache}, [5, 2, 7], 1, 57)


@needs_vllm
def test_the_step_does_not_wait_for_the_device(worker_and_cache):
    worker, _, _ = worker_and_cache
    torch.cuda.set_sync_debug_mode("error")
    try:
        worker.bind(scheduled())
        output = worker.post_forward(None, set(), set())
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert output.finalize()[0].checksums["r"]
