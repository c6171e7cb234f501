"""Feeds StepPlans to a Runner by hand: scattered pages, chunks, shared prefixes, unknown tokens."""

import random
from dataclasses import dataclass, field

import numpy as np
import torch

from detour.engine.plan import UNKNOWN_TOKEN, Admitted, StepPlan, StepResult
from detour.sampling_params import SamplingParams
from detour.worker.capacity import start_worker
from detour.worker.runner import Runner
from detour.worker.settings import WorkerSettings

GREEDY = SamplingParams(temperature=0.0)


def make_runner(path, **changes) -> Runner:
    values = {"device": "cpu", "threads": 1, "max_slots": 8, "progress": False}
    values |= {"dtype": "float32", "max_total_tokens": 2048, "max_step_tokens": 512}
    return start_worker(WorkerSettings(path, **{**values, **changes})).runner


@dataclass
class Sequence:
    known: list[int]
    params: SamplingParams
    prompt_length: int
    computed: int = 0
    pages: list[int] = field(default_factory=list)


class Driver:
    """Sequences by slot, their pages, and the steps that compute them."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.page_size = runner.kv.page_size
        self.free = list(range(1, runner.kv.num_pages))
        random.Random(3).shuffle(self.free)
        self.sequences: dict[int, Sequence] = {}
        self.admitted: list[Admitted] = []
        self.changes: list[tuple[int, int, int]] = []
        self.steps = 0

    def admit(self, slot: int, ids, params=GREEDY, *, like: int = -1, shared: int = 0) -> None:
        """A new sequence in a slot; its first `shared` tokens lie in the pages of slot `like`."""
        sequence = Sequence(list(ids), params, len(ids))
        self.sequences[slot] = sequence
        self.admitted.append(Admitted(slot, params, len(ids), np.array(ids, np.int32)))
        if shared:
            assert shared % self.page_size == 0
            sequence.computed = shared
            for page in self.sequences[like].pages[: shared // self.page_size]:
                self._give(slot, page)

    def _give(self, slot: int, page: int) -> None:
        pages = self.sequences[slot].pages
        self.changes.append((slot, len(pages), page))
        pages.append(page)

    def plan(self, rows: list[tuple[int, int]], *, unknown: bool = False) -> StepPlan:
        """rows: (slot, count) of tokens to compute; those that reach the end are sampled."""
        tokens, starts, samples, asks = [], [], [], []
        for slot, count in rows:
            sequence = self.sequences[slot]
            start, stop = sequence.computed, sequence.computed + count
            while len(sequence.pages) * self.page_size < stop:
                self._give(slot, self.free.pop())
            given = sequence.known[start:stop]
            if unknown:
                given = [UNKNOWN_TOKEN] * count
            tokens += given
            starts.append(start)
            samples.append(stop >= len(sequence.known))
            asks.append(sequence.params.prompt_logprobs if start < sequence.prompt_length else -1)
            sequence.computed = stop
        changes = np.array(self.changes, np.int32).reshape(-1, 3)
        made = StepPlan(
            step=self.steps,
            slots=np.array([slot for slot, _ in rows], np.int32),
            starts=np.array(starts, np.int32),
            counts=np.array([count for _, count in rows], np.int32),
            tokens=np.array(tokens, np.int32),
            samples=np.array(samples, np.bool_),
            prompt_logprobs=np.array(asks, np.int32),
            table_slots=changes[:, 0],
            table_columns=changes[:, 1],
            table_pages=changes[:, 2],
            admitted=tuple(self.admitted),
        )
        self.steps += 1
        self.admitted, self.changes = [], []
        return made

    def commit(self, result: StepResult) -> StepResult:
        for slot, token in zip(result.slots.tolist(), result.tokens.tolist(), strict=True):
            self.sequences[slot].known.append(token)
        return result

    def run(self, rows: list[tuple[int, int]]) -> StepResult:
        return self.commit(self.runner.run(self.plan(rows)).wait())

    @torch.inference_mode()
    def logits(self, rows: list[tuple[int, int]]) -> list[torch.Tensor]:
        """Logits [count, V] of every token of each row, past the sampler."""
        batch, _ = self.runner.staging.stage(self.plan(rows))
        model = self.runner.model
        hidden = model.forward(batch, model.plan(batch), self.runner.kv.layers)
        return list(model.logits(hidden).cpu().split([count for _, count in rows]))
