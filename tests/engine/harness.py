"""Drives a scheduler and an executor by hand, and checks the invariants after every step."""

from collections import defaultdict

import numpy as np
from fake_executor import FakeExecutor, geometry, run_alone

from detour.engine.page_pool import HELD
from detour.engine.plan import Geometry, StepPlan
from detour.engine.request import Finish, Request, TokenEvents, pack_ids, unpack_ids
from detour.engine.scheduler import Scheduler, SchedulerSettings
from detour.sampling_params import SamplingParams


def request(sid: int, prompt: list[int], *, group: int = -1, **changes) -> Request:
    """Names of Request's fields go there, all others to its params."""
    fields = {k: v for k, v in changes.items() if k in Request.__struct_fields__}
    params = {k: v for k, v in changes.items() if k not in fields}
    fields.setdefault("params", SamplingParams(**{"max_tokens": 8, "seed": sid, **params}))
    return Request(
        sid=sid,
        group=sid if group < 0 else group,
        request_id=f"r{sid}",
        prompt_ids=pack_ids(prompt),
        **fields,
    )


class Harness:
    def __init__(
        self,
        geo: Geometry | None = None,
        settings: SchedulerSettings | None = None,
        depth: int = 1,
        **executor,
    ) -> None:
        self.geometry = geo or geometry()
        self.scheduler = Scheduler(self.geometry, settings or SchedulerSettings())
        self.executor = FakeExecutor(self.geometry, **executor)
        self.depth = depth
        self.requests: dict[int, Request] = {}
        self.tokens: dict[int, list[int]] = defaultdict(list)
        self.finishes: dict[int, Finish] = {}
        self.started: dict[int, int] = {}
        self.scores: dict[int, list[float]] = defaultdict(list)
        self.logprobs: dict[int, list[float]] = defaultdict(list)
        self.aborted: set[int] = set()

    def submit(self, *requests: Request) -> None:
        self.requests.update({r.sid: r for r in requests})
        self.scheduler.submit(list(requests))
        self._hear()

    def abort(self, *sids: int) -> None:
        self.aborted |= {sid for sid in sids if sid not in self.finishes}
        self.scheduler.abort(list(sids))
        self._hear()
        self.check()

    def step(self) -> bool:
        """Plan one step, take in one result as the loop does. False where nothing was to do."""
        scheduler, executor = self.scheduler, self.executor
        plan = scheduler.plan()
        if plan is not None:
            self._check_plan(plan)
            try:
                executor.submit(plan)
            except RuntimeError as fault:
                scheduler.abandon(plan.step, str(fault))
        self._hear()
        self.check()
        out = scheduler.outstanding_steps
        if out and (plan is None or out >= self.depth):
            oldest = scheduler.oldest_step
            try:
                scheduler.commit(executor.collect())
            except RuntimeError as fault:
                scheduler.abandon(oldest, str(fault))
        self._hear()
        self.check()
        return plan is not None or out > 0

    def run(self, most: int = 5000) -> None:
        """Until nothing is open."""
        for _ in range(most):
            if not self.step():
                break
        assert not self.scheduler.open_sequences, "sequences wait for ever"

    def check(self) -> None:
        assert self.scheduler.violations() == []
        assert self.scheduler.ledger.pool.faults == 0

    def check_ended(self) -> None:
        """Everything was answered once, pages are free or cached, tokens are the rule's."""
        pool = self.scheduler.ledger.pool
        assert pool.held == 0 and pool.free + pool.cached == pool.usable
        assert self.scheduler.ledger.tree.evictable == pool.cached
        assert set(self.finishes) | self.aborted == set(self.requests)
        assert not set(self.finishes) & self.aborted
        for sid, finish in self.finishes.items():
            self.check_answer(sid, finish)

    def check_answer(self, sid: int, finish: Finish) -> None:
        tokens, reason, matched = run_alone(self.requests[sid], self.geometry)
        if finish.reason in ("stop", "length"):
            assert (self.tokens[sid], finish.reason, finish.matched) == (tokens, reason, matched)
        else:
            assert self.tokens[sid] == tokens[: len(self.tokens[sid])]
        if finish.reason == "error":
            assert finish.status >= 400 and finish.message.endswith((".", "failed", "refused"))

    def _check_plan(self, plan: StepPlan) -> None:
        scheduler, table = self.scheduler, self.scheduler.table
        assert plan.token_count <= scheduler.max_step_tokens
        size = self.geometry.page_size
        for slot, start, count in zip(plan.slots, plan.starts, plan.counts, strict=True):
            first, last = int(start) // size, (int(start) + int(count) - 1) // size
            assert first >= table.tree_pages[slot], "a shared page is written"
            pages = table.page_table[slot, first : last + 1]
            assert scheduler.ledger.pool.are(HELD, pages), "a page is written that is not held"
        assert (table.computed <= table.known)[table.alive].all()

    def _hear(self) -> None:
        events = self.scheduler.outbox.take()
        if events is not None:
            self._take(events)

    def _take(self, events: TokenEvents) -> None:
        sids = np.frombuffer(events.sids, np.int64).tolist()
        for sid in sids:
            assert sid not in self.finishes and sid not in self.aborted, "a token after the end"
        for started in events.started:
            assert started.sid not in self.started, "started twice"
            self.started[started.sid] = started.cached_tokens
        for sid, token in zip(sids, unpack_ids(events.tokens).tolist(), strict=True):
            assert sid in self.started
            self.tokens[sid].append(token)
        for entry in events.logprobs:
            self.logprobs[entry.sid].append(entry.logprob)
        for entry in events.prompt_logprobs:
            scores = self.scores[entry.sid]
            assert entry.start == len(scores) + 1, "prompt log-probabilities in order, once"
            scores += np.frombuffer(entry.logprobs, np.float32).tolist()
        for finish in events.finished:
            assert finish.sid not in self.finishes, "finished twice"
            assert finish.sid not in self.aborted, "finished after an abort"
            self.finishes[finish.sid] = finish
