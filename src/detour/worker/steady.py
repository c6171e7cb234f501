"""Steps of a batch that stays as it is, without a scheduler, for measuring.

Plans are made as the engine's loop makes them: two steps are out at a time, and a decode's token is
one the host does not know yet.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from detour.engine.plan import UNKNOWN_TOKEN, Admitted, StepPlan
from detour.sampling_params import SamplingParams
from detour.worker.capacity import Worker
from detour.worker.runner import Pending

WARM = 6  # steps before the clock starts
_NONE = np.zeros(0, np.int32)


@dataclass(frozen=True)
class SteadyBatch:
    """`rows` sequences of `context` tokens in slots 0 to rows - 1, with room for `more` each.

    chunk: the most prompt tokens of a step.
    """

    worker: Worker
    rows: int
    context: int
    more: int
    chunk: int
    params: SamplingParams

    def fill(self) -> None:
        """Compute one context and give every sequence a copy of what was cached for it.

        So the contents are a model's own, whatever their layout, and each row reads its own pages.
        """
        for start in range(0, self.context, self.chunk):
            count = min(self.chunk, self.context - start)
            tokens = self._tokens(start + np.arange(count))
            self._start(start, np.array([count]), tokens, enter=start == 0).wait()
        pages = torch.from_numpy(self._pages()).to(self.worker.runner.device)
        with torch.inference_mode():
            for tensor in (one for layer in self.worker.runner.kv.layers for one in layer):
                tensor[pages[1:]] = tensor[pages[0]]

    def decode(self, count: int) -> float:
        """Seconds a step of one token of every sequence takes, in the mean of `count`.

        count + WARM tokens are `more` at most.
        """
        ones = np.ones(self.rows, np.int64)
        known = self._tokens(np.arange(self.rows))  # so that sequences differ from here on
        self._start(self.context, ones, known, enter=True).wait()
        unknown = np.full(self.rows, UNKNOWN_TOKEN)
        return _timed(
            lambda step: self._start(self.context + 1 + step, ones, unknown, enter=False), count
        )

    def prompts(self, count: int) -> tuple[float, int]:
        """(seconds, tokens) of a step of whole prompts, as many as a step holds (or part of one)."""
        each = min(self.context, self.chunk)
        counts = np.full(min(self.rows, max(1, self.chunk // each)), each)
        tokens = self._tokens(np.arange(counts.sum()))
        return _timed(lambda step: self._start(0, counts, tokens, enter=True), count), len(tokens)

    def profile(self, count: int) -> str:
        """A GPU's longest kernels of a decode step: microseconds and launches a step, and name."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            self.decode(count)
            torch.cuda.synchronize()
        steps = count + WARM + 1
        lines: list[Any] = sorted(found.key_averages(), key=lambda one: -one.device_time_total)
        return "\n".join(
            f"  {one.device_time_total / steps:9.1f} us {one.count / steps:7.1f} x  {one.key[:90]}"
            for one in lines[:20]
        )

    def _tokens(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        return 5 + numbers % (self.worker.geometry.vocab_size - 5)

    def _pages(self) -> NDArray[np.int64]:
        """[rows, pages of a row], scattered."""
        columns = -(-(self.context + self.more) // self.worker.geometry.page_size)
        scattered = np.random.default_rng(0).permutation(self.rows * columns)
        return 1 + scattered.reshape(self.rows, columns)

    def _start(
        self, start: int, counts: NDArray[np.int64], tokens: NDArray[np.int64], *, enter: bool
    ) -> Pending:
        """A step of the first len(counts) sequences from position `start`; enter: they are new."""
        rows = len(counts)
        tables, admitted = (_NONE, _NONE, _NONE), ()
        if enter:
            pages = self._pages()
            slots, columns = np.indices(pages.shape, dtype=np.int32)
            tables = tuple(one.ravel().astype(np.int32) for one in (slots, columns, pages))
            known = np.ones(start + 1, np.int32)
            admitted = tuple(Admitted(row, self.params, start + 1, known) for row in range(rows))
        return self.worker.runner.run(
            StepPlan(
                0, np.arange(rows, dtype=np.int32), np.full(rows, start, np.int32),
                counts.astype(np.int32), tokens.astype(np.int32), np.ones(rows, np.bool_),
                np.full(rows, -1, np.int32), *tables, admitted,
            )
        )  # fmt: skip


def _timed(start: Callable[[int], Pending], count: int) -> float:
    """Seconds a step, the first WARM left out."""
    out = deque([start(0)])
    begun = 0.0
    for step in range(1, WARM + count):
        if step == WARM:
            out.popleft().wait()
            begun = time.perf_counter()
        out.append(start(step))
        if len(out) > 1:
            out.popleft().wait()
    out.popleft().wait()
    return (time.perf_counter() - begun) / count
