"""Who runs next: admit, plan a step, preempt, commit its result.

Speaks in tokens: each step every sequence gets at most the tokens that are known (or will be, once
the steps that are out are back) and not yet planned. Knows nothing of messages, clocks or devices.
Per step it does no Python work per running sequence: their numbers are columns of a SlotTable.
"""

import itertools
import logging
from bisect import insort
from collections import deque
from dataclasses import dataclass

import msgspec
import numpy as np

from detour.engine.admission import Admission, outgrown, refusal
from detour.engine.deadlines import Deadlines
from detour.engine.outbox import Outbox
from detour.engine.page_ledger import PageLedger
from detour.engine.plan import Bools, Geometry, Int32s, StepPlan, StepResult
from detour.engine.request import Finish, Request
from detour.engine.sequence import Int64s, Sequence, SlotTable
from detour.engine.step import Chunk, Outstanding, build_step
from detour.engine.waiting import Policy, WaitingQueue, rank

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SchedulerSettings:
    chunk: int = 2048  # tokens of a step; <= 0: whole prompts, up to max_prefill_tokens
    max_prefill_tokens: int = 16384
    max_queued: int = -1  # sequences without a slot; -1 = any number
    policy: Policy = "fcfs"
    share_prefixes: bool = True  # false: only within one request (n > 1)
    conservativeness: float = 1.0  # scales the pages kept for the growth of running sequences


@dataclass
class Counters:
    steps: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    preemptions: int = 0


class Scheduler:
    """Its state changes only through submit, abort, expire, plan, commit and abandon; what is to be
    told to the front gathers in `outbox`."""

    def __init__(self, geometry: Geometry, settings: SchedulerSettings) -> None:
        self.geometry = geometry
        self.settings = settings
        self.counters = Counters()
        self.outbox = Outbox()
        self.table = SlotTable(geometry)
        self.ledger = PageLedger(self.table, geometry.num_pages, settings.share_prefixes)
        self.queue = WaitingQueue(self.ledger, self.table, settings.policy)
        self._admission = Admission(self.table, self.ledger, settings.conservativeness)
        self._eos = frozenset(geometry.eos_ids)
        self._whole = settings.chunk <= 0
        self._budget = settings.max_prefill_tokens if self._whole else settings.chunk
        self._open: dict[int, Sequence] = {}
        self._deadlines = Deadlines()
        self._prefilling: list[Sequence] = []  # in a slot, not all given tokens computed; by rank
        self._free_slots = list(range(geometry.max_slots - 1, -1, -1))
        self._leaving: list[tuple[int, int]] = []  # (step, slot): free once that step is back
        self._outstanding: deque[Outstanding] = deque()
        self._next_step = 0
        self._arrivals = 0

    @property
    def open_sequences(self) -> int:
        return len(self._open)

    @property
    def outstanding_steps(self) -> int:
        return len(self._outstanding)

    @property
    def oldest_step(self) -> int:
        """The step whose result comes next. Raises IndexError where none is out."""
        return self._outstanding[0].step

    @property
    def max_step_tokens(self) -> int:
        """No plan has more tokens. Every running sequence that decodes is in each step; prompts get
        what they leave of the chunk, at least a quarter of it."""
        slots = self.geometry.max_slots
        if self._whole:
            return self._budget + slots
        return max(self._budget, slots + self._least)

    @property
    def _least(self) -> int:
        return max(1, self._budget // 4)

    # --- in and out

    def submit(self, requests: list[Request]) -> None:
        """Queue them. What can never run ends at once with a Finish that says why."""
        most = self.settings.max_queued
        for _, members in itertools.groupby(requests, key=lambda request: request.group):
            group = list(members)  # of one client request: all are taken or none
            room = most + len(self._free_slots) - len(self.queue)
            full = most >= 0 and room < len(group)
            for request in group:
                self._submit(request, full)

    def _submit(self, request: Request, full: bool) -> None:
        sid = request.sid
        if sid in self._open:
            log.error("sequence %d was submitted twice: the second is ignored", sid)
            return
        finish = refusal(request, self.geometry)
        if finish is None and full:
            most = self.settings.max_queued
            message = f"The queue is full ({most} requests may wait); try again later."
            finish = Finish(sid, "error", message=message, status=503)
        if finish is not None:
            self.outbox.finished(finish)
            return
        ids, prompt_length = request.prompt_ids + request.output_ids, len(request.prompt_ids) // 4
        namespace = self.ledger.open(request)
        self._open[sid] = Sequence(request, namespace, self._arrivals, ids, prompt_length)
        self._arrivals += 1
        self.queue.add(self._open[sid])
        if request.deadline:
            self._deadlines.add(request.deadline, sid, self._open)

    def abort(self, sids: list[int]) -> None:
        """End these without a Finish; unknown ones are ignored."""
        for sid in sids:
            if sid in self._open:
                self._end(self._open[sid], None)

    def end_all(self, finish: Finish) -> None:
        """End every open sequence with this finish (its sid is filled in)."""
        for sequence in list(self._open.values()):
            self._end(sequence, finish)

    def expire(self, now: float) -> None:
        """End the sequences whose deadline has passed."""
        while self.next_deadline() <= now:
            sid = self._deadlines.pop()
            self._end(self._open[sid], Finish(sid, "deadline"))

    def next_deadline(self) -> float:
        """Of the open sequences; infinity where none has one."""
        return self._deadlines.next(self._open)

    # --- planning

    def plan(self) -> StepPlan | None:
        """The next step, taking for granted that those that are out succeed; None = nothing to do.

        At most two steps are out: `commit` or `abandon` one before a third.
        """
        assert len(self._outstanding) < 2, "two steps are out already"
        decodes = self._plan_decodes()
        count = int(np.count_nonzero(decodes))
        chunks = self._plan_chunks(count)
        if not count and not chunks:
            return None
        step, self._next_step = self._next_step, self._next_step + 1
        plan, outstanding = build_step(
            step, self.table, decodes, chunks, self.ledger.take_changes()
        )
        self._outstanding.append(outstanding)
        return plan

    def _plan_decodes(self) -> Bools:
        """[slots] which get one token, with a page to write it to."""
        table = self.table
        ready = table.planned < np.minimum(table.expected, table.target)
        ready &= table.decoding
        short = (ready & (table.planned >= table.capacity)).nonzero()[0]
        while len(short) > self.ledger.available:
            if len(table.sequences) > 1:
                self._preempt(max(table.sequences.values(), key=rank))
                self.counters.preemptions += 1
                self._admission.tighten()
            elif not self._outstanding:
                last = table.sequences[int(short[0])]
                self._end(last, outgrown(last, self.geometry))
            else:  # the step that is out may end it
                return np.zeros_like(ready)
            ready &= table.alive
            short = short[table.alive[short]]
        if len(short):
            self.ledger.grow(short)
        return ready

    def _plan_chunks(self, decodes: int) -> list[Chunk]:
        """Prompt tokens for what the decodes leave of the step."""
        budget = self._budget if self._whole else max(self._budget - decodes, self._least)
        chunks: list[Chunk] = []
        running = self._prefilling.copy()
        if running and not self._whole and self._rest(running[0]) > 2 * budget:
            # A very long prompt leaves a quarter to those behind it, so that they need not wait for
            # all of it.
            share = budget // 4
            budget -= share - self._plan_in_order(running[1:], share, chunks)
            self._plan_chunk(running[0], budget, chunks)
        else:
            self._plan_in_order(running, budget, chunks)
        return chunks

    def _plan_in_order(self, running: list[Sequence], budget: int, chunks: list[Chunk]) -> int:
        """Those in a slot, then new ones; what is left of the budget."""
        for sequence in running:
            budget -= self._plan_chunk(sequence, budget, chunks)
        if len(self.queue) and self._free_slots and budget > 0:
            budget = self._admit(budget, chunks)
        return budget

    def _rest(self, sequence: Sequence) -> int:
        """Given tokens that are not planned."""
        return int(self.table.known[sequence.slot] - self.table.planned[sequence.slot])

    def _admit(self, budget: int, chunks: list[Chunk]) -> int:
        table = self.table
        for sequence in self.queue.candidates():
            if budget <= 0 or not self._free_slots:
                break
            if self.queue.held_back(sequence, self._prefilling):
                continue
            most = budget if self._whole and chunks else self.geometry.context_length
            slot = self._free_slots[-1]
            if self._admission.enter(sequence, slot, most):
                self._free_slots.pop()
                self.queue.admitted(sequence)
                insort(self._prefilling, sequence, key=rank)
                self._count_admission(sequence, int(table.planned[slot]))
                budget -= self._plan_chunk(sequence, budget, chunks, enters=True)
            elif table.sequences:
                break  # none passes it by being smaller
            else:
                self._end(sequence, outgrown(sequence, self.geometry))
        return budget

    def _count_admission(self, sequence: Sequence, cached: int) -> None:
        if sequence.cached_tokens < 0:
            sequence.cached_tokens = min(cached, sequence.prompt_length)
            self.counters.cached_tokens += sequence.cached_tokens
            self.counters.prompt_tokens += sequence.prompt_length - sequence.cached_tokens

    def _plan_chunk(
        self, sequence: Sequence, budget: int, chunks: list[Chunk], *, enters: bool = False
    ) -> int:
        """Plan up to `budget` of a sequence's given tokens; how many."""
        table, slot = self.table, sequence.slot
        start, known = int(table.planned[slot]), int(table.known[slot])
        rest = known - start
        count = min(rest, budget)
        if table.decoding[slot] or count <= 0 or (self._whole and chunks and rest > budget):
            return 0
        samples = count == rest and known < int(table.limit[slot])
        table.planned[slot] += count
        if samples:
            table.expected[slot] += 1
            table.decoding[slot] = True
        chunks.append(Chunk(sequence, slot, start, count, samples, enters))
        return count

    # --- results

    def commit(self, result: StepResult) -> None:
        """Take in the result of the oldest step that is out."""
        plan = self._outstanding.popleft()
        assert result.step == plan.step, "results come in the order of their plans"
        table = self.table
        table.computed += plan.decodes
        for chunk in plan.chunks:
            table.computed[chunk.slot] += chunk.count
        slots, tokens = plan.sampled, result.tokens
        alive = table.alive[slots]
        valid = result.finite & (tokens.view(np.uint32) < self.geometry.vocab_size)
        rows = (alive & valid).nonzero()[0]
        if len(rows) < len(slots):
            for slot in slots[alive & ~valid].tolist():
                self._end(table.sequences[slot], _NOT_FINITE, poisoned=True)
            slots, tokens = slots[rows], tokens[rows]
        known = table.append(slots, tokens)
        self._commit_chunks(plan, result)
        if len(slots):
            self.outbox.tokens(table.sids[slots], tokens)
            asked = table.wants_logprobs[slots]
            if np.count_nonzero(asked):
                self.outbox.logprobs(table.sequences, slots[asked], rows[asked], result)
            over = table.may_end[tokens.astype(np.intp)] | (known >= table.limit[slots])
            if np.count_nonzero(over):
                self._finish(slots[over], tokens[over], known[over])
        self.counters.steps += 1
        self.counters.generated_tokens += len(slots)
        self._admission.relax()
        self._free_left()

    def _commit_chunks(self, plan: Outstanding, result: StepResult) -> None:
        """Share what was computed of prompts, before any of these sequences ends."""
        scored = {row.slot: row for row in result.prompt_logprobs}
        for chunk in plan.chunks:
            sequence, slot = chunk.sequence, chunk.slot
            if sequence.slot != slot:
                continue  # it has ended, or was preempted
            self.ledger.insert(slot)
            if slot in scored:
                self.outbox.prompt_logprobs(sequence, scored[slot])
            if int(self.table.computed[slot]) * 4 >= len(sequence.ids):
                self._prefilling.remove(sequence)
                if chunk.samples:
                    self.outbox.started(sequence)
                else:
                    self._end(sequence, Finish(sequence.request.sid, "length"))

    def _finish(self, slots: Int64s, tokens: Int32s, known: Int32s) -> None:
        """End those of these sequences that their new token ends."""
        for slot, token, count in zip(slots.tolist(), tokens.tolist(), known.tolist(), strict=True):
            sequence = self.table.sequences[slot]
            ending = sequence.ending(token, count, self._eos, int(self.table.limit[slot]))
            if ending.happened:
                self._end(sequence, Finish(sequence.request.sid, ending.reason, ending.matched))

    def abandon(self, step: int, message: str) -> None:
        """The plan of `step` and those after it have not happened and will not be committed.

        Sequences with tokens in that step end with an error that says `message`; those that only
        later plans name are computed again.
        """
        gone = [plan for plan in self._outstanding if plan.step >= step]
        for _ in gone:
            self._outstanding.pop()
        for slot in gone[0].slots() if gone else []:
            if slot in self.table.sequences:
                finish = Finish(0, "error", message=message, status=500)
                self._end(self.table.sequences[slot], finish, poisoned=True)
        for plan in gone:
            for slot in (*plan.slots(), *plan.table_slots.tolist()):
                if slot in self.table.sequences:
                    self._preempt(self.table.sequences[slot])
        self._leaving = [(self._last_naming(slot), slot) for _, slot in self._leaving]
        self._free_left()

    # --- keeping order

    def flush_cache(self) -> int:
        """Forget all cached prefixes that no running sequence uses. How many pages stay."""
        self.ledger.tree.evict(self.ledger.tree.evictable)
        return self.ledger.pool.cached

    def violations(self) -> list[str]:
        """What contradicts the invariants, a sentence each. For tests and idle times."""
        return self.ledger.violations()

    def _preempt(self, sequence: Sequence) -> None:
        """Take its pages; it waits, and is computed again from its known tokens."""
        self._leave(sequence)
        self.queue.add(sequence)

    def _end(self, sequence: Sequence, finish: Finish | None, *, poisoned: bool = False) -> None:
        """The one way out. `poisoned`: nothing that it computed alone may be used again."""
        del self._open[sequence.request.sid]
        if sequence.slot >= 0:
            self._leave(sequence, ended=True, poisoned=poisoned)
        else:
            self.queue.remove(sequence)
        self.ledger.close(sequence.request)
        if finish is not None:
            self.outbox.started(sequence)
            self.outbox.finished(msgspec.structs.replace(finish, sid=sequence.request.sid))

    def _leave(self, sequence: Sequence, *, ended: bool = False, poisoned: bool = False) -> None:
        slot = sequence.slot
        if sequence in self._prefilling:
            self._prefilling.remove(sequence)
        keep = not poisoned and (self.settings.share_prefixes or not ended)
        self.ledger.leave(slot, keep=keep, poisoned=poisoned)
        self.table.leave(sequence)
        self._leaving.append((self._last_naming(slot), slot))
        self._free_left()

    def _last_naming(self, slot: int) -> int:
        """The last step that is out and writes for this slot; -1 = none."""
        return max((plan.step for plan in self._outstanding if plan.names(slot)), default=-1)

    def _free_left(self) -> None:
        """Slots that no step names any more may be used again."""
        first = self._outstanding[0].step if self._outstanding else self._next_step
        self._free_slots += [slot for step, slot in self._leaving if step < first]
        self._leaving = [entry for entry in self._leaving if entry[0] >= first]


_NOT_FINITE = Finish(0, "error", message="The model's output was not a finite number.", status=500)
