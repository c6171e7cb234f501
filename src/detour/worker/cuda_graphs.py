"""CUDA graphs of decode steps: one launch in place of some hundred.

A graph holds assembling, planning and the forward pass of a step of so many rows of one token. A step
of fewer rows is padded with rows of a slot that no sequence has; others run as they are. What a
graph reads lies in one buffer that each step fills with one copy. Models that attend to a selection
in long contexts have a second graph of each size for steps in which nothing need be selected.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from detour.engine.plan import StepPlan
from detour.errors import ConfigError
from detour.models.model import Model
from detour.ops.batch import Batch
from detour.worker.kv_cache import KVCache
from detour.worker.staging import Staging

log = logging.getLogger(__name__)

Call = Callable[[], tuple[Batch, Tensor, Tensor]]
# Runs a call so that the second result repeats it, into the tensors of the first.
Record = Callable[[Call], tuple[tuple[Batch, Tensor, Tensor], Callable[[], None]]]


@dataclass(frozen=True)
class Forward:
    """What a forward pass leaves for sampling."""

    hidden: Tensor  # [T, H]
    tokens: Tensor  # [T] int64, all known
    logits_at: Tensor  # [S] int64 into T
    places: Tensor  # [S] int64: where Staging.remember puts what is sampled


@dataclass(frozen=True)
class Captured:
    """A recorded step of some rows. `forward` is what each replay writes to."""

    numbers: Tensor  # Staging.numbers, joined
    forward: Forward
    replay: Callable[[], None]


class DecodeGraphs:
    """Graphs by their number of rows and longest context; none until `capture` has been called."""

    def __init__(self, model: Model, kv: KVCache, staging: Staging) -> None:
        self.model = model
        self.kv = kv
        self.staging = staging
        self.captured: dict[tuple[int, int], Captured] = {}

    @torch.inference_mode()
    def capture(self, sizes: Sequence[int], record: Record) -> None:
        """Record graphs for each of `sizes`. Raises what a backend raises that cannot be recorded.

        Page 0 is written to. The largest comes first: the others find room in what it leaves.
        """
        longest, whole = self.staging.columns * self.staging.page_size, self.model.whole_until
        contexts = (longest, whole) if 0 < whole < longest else (longest,)
        for size in sorted(sizes, reverse=True):
            for context in contexts:
                self.captured[size, context] = self._capture(size, context, record)

    def _capture(self, size: int, context: int, record: Record) -> Captured:
        staging = self.staging
        arrays = staging.numbers(padded(_NO_ROWS, size, staging.max_slots))
        numbers = staging.join(arrays).to(staging.device)
        pieces = numbers.split([len(array) for array in arrays])
        counts = np.ones(size, np.int32)
        # As wide a page table as that takes: a replay may hold sequences of any length up to it.
        lengths = np.full(size, context, np.int32)

        def call() -> tuple[Batch, Tensor, Tensor]:
            batch, places = staging.assemble(pieces, counts, lengths, unknown=True)
            return batch, places, self.model.forward(batch, self.model.plan(batch), self.kv.layers)

        (batch, places, hidden), replay = record(call)
        return Captured(numbers, Forward(hidden, batch.tokens, batch.logits_at, places), replay)

    def run(self, plan: StepPlan) -> Forward | None:
        """The plan's forward pass; None if no graph holds it: rows of one token, all sampled."""
        rows = len(plan.slots)
        if not rows or plan.token_count > rows or not plan.samples.all():
            return None
        longest = int(plan.starts.max()) + 1
        fits = (key for key in self.captured if key[0] >= rows and key[1] >= longest)
        size, context = min(fits, default=(0, 0))
        if not size:
            return None
        one = self.captured[size, context]
        fill = padded(plan, size, self.staging.max_slots) if size > rows else plan
        together = self.staging.join(self.staging.numbers(fill))
        one.numbers.copy_(together, non_blocking=True)
        self.staging.update_tables(plan)
        one.replay()
        whole = one.forward
        return Forward(
            whole.hidden[:rows], whole.tokens[:rows], whole.logits_at[:rows], whole.places[:rows]
        )


_NONE = np.zeros(0, np.int32)
_NO_ROWS = StepPlan(
    0, _NONE, _NONE, _NONE, _NONE, np.zeros(0, np.bool_), _NONE, _NONE, _NONE, _NONE
)


def padded(plan: StepPlan, rows: int, slot: int) -> StepPlan:
    """The plan with rows of one sampled token at the start of `slot` behind its own."""
    more = rows - len(plan.slots)
    zeros, ones = np.zeros(more, np.int32), np.ones(more, np.int32)
    return replace(
        plan,
        slots=np.concatenate([plan.slots, slot * ones]),
        starts=np.concatenate([plan.starts, zeros]),
        counts=np.concatenate([plan.counts, ones]),
        tokens=np.concatenate([plan.tokens, zeros]),
        samples=np.concatenate([plan.samples, ones > 0]),
        prompt_logprobs=np.concatenate([plan.prompt_logprobs, -ones]),
    )


def decode_sizes(most: int, asked: str = "") -> tuple[int, ...]:
    """Rows of the graphs for steps of up to `most`: an eighth more than wanted at most, from 8 on.

    asked: the sizes instead, as whole numbers between commas. Raises ConfigError.
    """
    if asked:
        words = asked.replace(",", " ").split()
        if not all(word.isdigit() and int(word) for word in words):
            raise ConfigError(
                f"--cuda-graph-bs takes positive whole numbers, not {asked!r}.",
                param="cuda_graph_bs",
            )
        return tuple(sorted({min(int(word), most) for word in words}))
    sizes, size = [], 1
    while size < most:
        sizes.append(size)
        size = 2 * size if size < 8 else size + max(8, 1 << (size.bit_length() - 4))
    return (*sizes, most) if most > 0 else ()


def cuda_recorder(device: torch.device) -> Record:
    """Records on a stream of its own, all graphs in one pool of memory: they never run at once."""
    pool = torch.cuda.graph_pool_handle()
    stream = torch.cuda.Stream(device)

    def record(call: Call) -> tuple[tuple[Batch, Tensor, Tensor], Callable[[], None]]:
        graph = torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            call()  # compiles kernels, makes library handles
            stream.synchronize()
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = call()
            except BaseException:
                with contextlib.suppress(RuntimeError):  # of the recording that is now invalid
                    graph.capture_end()
                raise
            graph.capture_end()
        torch.cuda.current_stream(device).wait_stream(stream)
        return result, graph.replay

    return record


def capture_all(graphs: DecodeGraphs, sizes: Sequence[int], device: torch.device) -> None:
    """Record them all, or log in one line why steps go without."""
    begun, before = time.monotonic(), torch.cuda.mem_get_info(device)[0]
    try:
        graphs.capture(sizes, cuda_recorder(device))
    except Exception as error:  # whatever a backend raises: steps can be run without
        graphs.captured.clear()
        told = str(error).strip().partition("\n")[0]
        log.warning("steps run without CUDA graphs: recording one failed with: %s", told)
        return
    torch.cuda.empty_cache()
    taken = before - torch.cuda.mem_get_info(device)[0]
    log.info(
        "CUDA graphs for %d sizes up to %d rows: %.2f GB, %.1f s",
        len(sizes), max(sizes), taken / 1e9, time.monotonic() - begun,
    )  # fmt: skip


def graph_bytes(graphs: DecodeGraphs, sizes: Sequence[int], device: torch.device) -> int:
    """About what graphs of all `sizes` will take, from recording (and dropping) the largest two."""
    free = [torch.cuda.mem_get_info(device)[0]]
    record = cuda_recorder(device)
    for size in sorted(sizes, reverse=True)[:2]:
        try:
            graphs.capture([size], record)
        except Exception:  # capture_all will say so
            break
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(device)[0])
    graphs.captured.clear()
    torch.cuda.empty_cache()
    taken = [one - other for one, other in zip(free, free[1:], strict=False)]
    return max(taken[0], 0) + max(taken[-1], 2 << 20) * (len(sizes) - 1) if taken else 0
