# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Test the order of the worker's work on streams and host threads, without a GPU.

The real worker runs on a fake of CUDA (`rig.streams`): all accesses to memory must be
ordered, whatever is fast or slow. The worker's waits, taken away one at a time, are
among the mutants.
"""

import pytest
import torch

from .rig.streams.fake_cuda import DEVICE, Event, FakeCUDA, Stream
from .rig.streams.order import OutOfOrder
from .rig.streams.steps import KINDS, Runner

NEVER = 9
"""The output of a step that nobody finalizes, as of an engine that goes down."""


@pytest.fixture
def cuda():
    with FakeCUDA().installed() as fake:
        yield fake


def run(kinds, streams, finalized):
    """Run steps; `finalized` says after which step each one's output is finalized."""
    with FakeCUDA().installed() as cuda:
        runner = Runner(cuda)
        outputs = {}
        for step, (kind, stream) in enumerate(zip(kinds, streams, strict=True)):
            outputs[step] = runner.step(kind, runner.streams[stream])
            for at in [n for n in outputs if finalized[n] <= step]:
                runner.finalize(outputs.pop(at))
        outputs.clear()
        cuda.collect()
    # Other threads wait for the device, the engine's step never does.
    assert "runner" not in cuda.waits
    return cuda


ORDERS = ((0, 1), (1, NEVER), (NEVER, 1))
"""After which step the outputs of two steps are finalized."""


@pytest.mark.parametrize("second", KINDS)
@pytest.mark.parametrize("first", KINDS)
def test_any_two_steps(first, second):
    """The worker was built on stream 0; the runner goes over to another one or back."""
    for finalized in ORDERS:
        run((first, second), (0, 1), finalized)
        run((first, second), (1, 0), finalized)


@pytest.mark.parametrize("kind", KINDS)
def test_three_steps_whose_outputs_are_finalized_in_another_order(kind):
    """Blocks of the first one are given to the next request if it has ended."""
    for last in ("receive", "save", "receive, send and save"):
        for finalized in ((0, 1, 2), (2, 1, 2), (2, 2, NEVER)):
            run((kind, "receive", last), (0, 1, 0), finalized)


def test_the_fallback_without_triton(monkeypatch):
    """PyTorch's operators are as many pieces of work on the stream."""
    installed = FakeCUDA.installed
    monkeypatch.setattr(
        FakeCUDA, "installed", lambda self: installed(self, has_triton=False)
    )
    for kind in KINDS:
        with_torch = run((kind, "send"), (1, 0), (1, NEVER))
        assert with_torch.order.number > 100


def test_the_sums_of_every_kind_of_step_reach_the_host(cuda):
    """Else nothing above would be a test: each output waits for one copy or two."""
    runner = Runner(cuda)
    for kind, parts in KINDS.items():
        before = cuda.waits.get("finalizer", 0)
        runner.finalize(runner.step(kind, runner.streams[0]))
        copies = len(parts & {"send", "receive", "stored", "full"})
        assert cuda.waits.get("finalizer", 0) - before == copies


# ---- the checker itself: each rule sees its own kind of race


def test_streams_that_do_not_wait_are_a_race(cuda):
    values, other = torch.zeros(4, device=DEVICE), Stream()
    race = pytest.raises(OutOfOrder, match="read by sum.* does not wait for the write")
    with race, cuda.use(other):
        values.sum()


def test_an_event_orders_streams_only_if_it_was_recorded_behind_the_work(cuda):
    other, event = Stream(), Event()
    event.record()
    values = torch.zeros(4, device=DEVICE)
    other.wait_event(event)
    with pytest.raises(OutOfOrder), cuda.use(other):
        values.sum()
    event.record()
    other.wait_event(event)
    with cuda.use(other):
        values.sum()


def test_an_event_that_was_not_recorded_is_passed(cuda):
    host = torch.empty(4, dtype=torch.int64, pin_memory=True)
    host.copy_(torch.zeros(4, dtype=torch.int64, device=DEVICE), non_blocking=True)
    Event().synchronize()
    with pytest.raises(OutOfOrder, match=r"read by numpy\(\) on runner"):
        host.numpy()
    cuda.stream.synchronize()
    host.numpy()


def test_memory_is_given_away_once_nobody_holds_it(cuda):
    """Its next owner is on the stream of its allocation, unless that is told more."""
    for told in (True, False):
        values, other = torch.zeros(4, device=DEVICE), Stream()
        other.wait_stream(cuda.stream)
        with cuda.use(other):
            values.sum()
        if told:
            values.record_stream(other)
        part = values[1:]
        del values
        cuda.collect()
        if told:
            del part
            cuda.collect()
            continue
        del part
        with pytest.raises(OutOfOrder, match="whoever gets it after runner freed it"):
            cuda.collect()


@pytest.mark.parametrize("pinned", [True, False])
@pytest.mark.parametrize("non_blocking", [True, False])
def test_copies_that_make_the_host_wait_are_counted(cuda, pinned, non_blocking):
    source = torch.zeros(4, device=DEVICE)
    host = torch.empty(4, pin_memory=pinned)
    host.copy_(source, non_blocking=non_blocking)
    assert cuda.waits.get("runner", 0) == (not (pinned and non_blocking))


def test_reading_a_value_makes_the_host_wait(cuda):
    values = torch.zeros(4, device=DEVICE)
    assert values.sum().item() == 0 and values.cpu().sum() == 0
    assert values.tolist() == [0] * 4
    assert cuda.waits == {"runner": 3}


def test_cells_that_are_not_the_same_may_be_read_and_written_at_once(cuda):
    cache = cuda.on_device(torch.zeros(8, 4), "cache")
    memory, other = cuda.memory_of(cache), Stream()
    cuda.launch("a forward", writes=[(memory, frozenset([1, 2]))])
    with cuda.use(other):
        cuda.launch("a load", writes=[(memory, frozenset([3]))])
        with pytest.raises(OutOfOrder, match="write by a load .* write by a forward"):
            cuda.launch("a load", writes=[(memory, frozenset([2, 3]))])
