"""Executors: a runner in this process behind the engine's seam."""

import logging
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from detour.engine.plan import Geometry, StepPlan, StepResult
from detour.worker.capacity import Worker, start_worker
from detour.worker.runner import Pending
from detour.worker.settings import WorkerSettings

log = logging.getLogger(__name__)


class StepSkipped(RuntimeError):
    """A step before this one failed, so this one was not run."""


@dataclass(frozen=True)
class WorkerFacts:
    """What people ask about a worker."""

    weight_bytes: int
    kv_bytes: int
    dtype: str
    device: str
    threads: int  # compute threads on a CPU, 0 on a GPU
    backends: Mapping[str, str]  # op -> backend in use


class LocalExecutor:
    """An engine.executor.Executor that runs on a thread of its own.

    The thread leaves Python while torch computes, so the engine's loop goes on beside it. On a GPU
    the thread only launches; `collect` waits for the device.

    Raises CheckpointError and ConfigError when the model cannot be served as asked.
    """

    def __init__(self, settings: WorkerSettings) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="worker")
        self._out: deque[Future[Pending]] = deque()
        self._failed = False
        try:
            self._worker: Worker = self._thread.submit(start_worker, settings).result()
        except BaseException:
            self._thread.shutdown()
            raise

    @property
    def geometry(self) -> Geometry:
        return self._worker.geometry

    @property
    def facts(self) -> WorkerFacts:
        worker = self._worker
        return WorkerFacts(
            weight_bytes=worker.built.weight_bytes,
            kv_bytes=worker.runner.kv.nbytes,
            dtype=str(worker.built.site.dtype).removeprefix("torch."),
            device=worker.built.site.device.name,
            threads=worker.threads,
            backends=worker.backends(),
        )

    def submit(self, plan: StepPlan) -> None:
        self._out.append(self._thread.submit(self._run, plan))

    def collect(self) -> StepResult:
        try:
            return self._out.popleft().result().wait()
        except BaseException:
            # What was submitted after a failed step must not have happened either.
            for future in self._out:
                future.exception()
            self._out.clear()
            self._failed = False
            raise

    def close(self) -> None:
        self._thread.shutdown(cancel_futures=True)
        self._out.clear()

    def _run(self, plan: StepPlan) -> Pending:
        if self._failed:
            raise StepSkipped(f"step {plan.step} was not run: the one before it failed")
        try:
            return self._worker.runner.run(plan)
        except BaseException:
            self._failed = True
            raise
