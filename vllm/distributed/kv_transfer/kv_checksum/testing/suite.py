# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the vLLM project
"""Start instances, run requests through them, and collect what goes wrong."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from vllm.distributed.kv_transfer.kv_checksum.support import connector_coverage
from vllm.distributed.kv_transfer.kv_checksum.testing.configuration import write_model
from vllm.distributed.kv_transfer.kv_checksum.testing.diagnosis import (
    Finding,
    look_for_strangers,
)
from vllm.distributed.kv_transfer.kv_checksum.testing.instance import Instance, Seen
from vllm.distributed.kv_transfer.kv_checksum.testing.problems import Fault, Problem
from vllm.v1.request import RequestStatus

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_checksum.testing.factory import (
        ConnectorFactory,
    )
    from vllm.v1.request import Request

logger = logging.getLogger(__name__)


class SuiteEndedError(Exception):
    """Raised where nothing more can be said of a connector."""


class NeverFinishedError(Exception):
    """Raised for a request that does not end in time."""


class Suite:
    """Checks one connector.

    Args:
        factory: describes it.
        stack: ends what is started.

    Attributes:
        problems: what was found so far, by fault.

    """

    def __init__(self, factory: ConnectorFactory, stack: ExitStack) -> None:
        self.factory, self.carrier, self.stack = factory, factory.carrier, stack
        self.problems: dict[Fault, Problem] = {}
        self._number = 0
        self._case = "start"
        self._instead: Fault | None = None
        # For tensors this small, threads cost more than they bring.
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        torch.set_num_threads(1)
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self._model = write_model(Path(folder) / "model")
        stack.enter_context(factory.surroundings())

    # ---- problems

    def add(self, findings: list[Finding]) -> None:
        """Add what was found in the running case."""
        for fault, detail in findings:
            if self._instead is not None:
                fault, detail = self._instead, f"{fault.value}, {detail}"
            problem = self.problems.setdefault(fault, Problem(fault, detail))
            if self._case not in problem.cases:
                problem.cases.append(self._case)

    @contextmanager
    def case(
        self, name: str, *instances: Instance, instead: Fault | None = None
    ) -> Iterator[None]:
        """Run a case.

        Args:
            name: names it in problems.
            instances: those that take part; what was seen of them starts anew.
            instead: the fault as which all faults count that are found in it.

        Raises:
            SuiteEndedError: something was raised in it, or did not end: what follows
                would tell of that, and not of the connector.

        """
        self._case, self._instead = name, instead
        for instance in instances:
            instance.stats.clear()
            instance.seen = Seen()
        try:
            yield
        except SuiteEndedError:
            raise
        except NeverFinishedError as error:
            self.add([(Fault.NEVER_FINISHED, str(error))])
            raise SuiteEndedError from error
        except Exception as error:
            logger.debug("the case %s raised", name, exc_info=True)
            self.add(self._raised(error, instances))
            raise SuiteEndedError from error
        for instance in instances:
            self.add(look_for_strangers(instance))
            self.add(
                [
                    (Fault.LIMIT_IGNORED, f"{offer} tokens were offered, not {limit}")
                    for offer, limit in instance.seen.over_limit
                ]
            )

    def _raised(
        self, error: Exception, instances: tuple[Instance, ...]
    ) -> list[Finding]:
        """Return what an exception tells; vLLM raises for a load reported again."""
        twice = [
            (Fault.REPORTED_TWICE, f"{req_id} was reported in steps {steps}")
            for instance in instances
            for req_id, steps in instance.seen.reported.items()
            if len(steps) > 1
        ]
        text = f"{type(error).__name__}: {error}".rstrip(": ")
        return twice or [(Fault.RAISED, text)]

    def end_stage(self) -> None:
        """End the suite if anything was found: later cases would tell of it again."""
        if self.problems:
            raise SuiteEndedError

    def require_coverage(self, instance: Instance) -> None:
        """End the suite if nobody checks the connector's loads."""
        coverage = connector_coverage(instance.config, instance.kv_config)
        if why := [c.not_checked for c in coverage if c.not_checked is not None]:
            self.add([(Fault.NOT_COVERED, "; ".join(why))])
        self.end_stage()

    # ---- instances and requests

    def instance(self, role: str, **settings: Any) -> Instance:
        """Start an instance."""
        return Instance(self.factory, self._model, role, self.stack, **settings)

    def name(self) -> str:
        """Return the id of a new client's request, with vLLM's random suffix."""
        self._number += 1
        return f"cmpl-{self._number}-0-aaaaaaaa"

    @staticmethod
    def name_on_consumer(producer_id: str) -> str:
        """Return the id that a client's request has on the other instance."""
        return producer_id[:-8] + "bbbbbbbb"

    def run(self, until: Callable[[], bool], *instances: Instance) -> None:
        """Step instances in turn until `until` says so.

        Raises:
            NeverFinishedError: it did not in time.

        """
        end = time.monotonic() + self.factory.timeout_s
        while not until():
            if time.monotonic() > end:
                waiting = [
                    f"{r.request_id} ({r.status.name})"
                    for i in instances
                    for r in i.scheduler.requests.values()
                    if not r.is_finished()
                ]
                raise NeverFinishedError(
                    f"{', '.join(waiting)} after {self.factory.timeout_s} s"
                )
            for instance in instances:
                instance.step()
            # Transfer threads need the interpreter, too.
            time.sleep(0.0005)

    def linger(self, *instances: Instance) -> None:
        """Step a little longer, for what comes late."""
        left = iter(range(5))
        self.run(lambda: next(left, None) is None, *instances)

    @staticmethod
    def abort(instance: Instance, request: Request) -> None:
        """Abort a request, as a client does that goes away."""
        instance.scheduler.finish_requests(
            request.request_id, RequestStatus.FINISHED_ABORTED
        )
