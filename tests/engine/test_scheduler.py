"""One rule of the scheduler each. The random schedules hold the invariants."""

import pytest
from fake_executor import geometry, run_alone
from harness import Harness, request

from detour.engine.plan import UNKNOWN_TOKEN
from detour.engine.request import pack_ids
from detour.engine.scheduler import SchedulerSettings
from detour.engine.sequence import Sequence

LONG = list(range(1, 41))


def plans(harness: Harness) -> list[list[tuple[int, int]]]:
    """(start, count) of each row, plan by plan."""
    return [
        list(zip(p.starts.tolist(), p.counts.tolist(), strict=True)) for p in harness.executor.plans
    ]


@pytest.mark.parametrize("depth", [1, 2])
def test_no_step_is_planned_beyond_a_predictable_end(depth):
    harness = Harness(depth=depth)
    harness.submit(request(1, [5, 6, 7], max_tokens=4, ignore_eos=True))
    harness.run()
    harness.check_ended()
    assert plans(harness) == [[(0, 3)], [(3, 1)], [(4, 1)], [(5, 1)]]


def test_with_two_steps_out_the_last_token_is_the_workers():
    harness = Harness(depth=2)
    harness.submit(request(1, [5, 6, 7], max_tokens=3, ignore_eos=True))
    harness.run()
    assert [p.tokens.tolist() for p in harness.executor.plans[1:]] == [[UNKNOWN_TOKEN]] * 2


def test_decodes_and_chunks_share_steps_within_the_budget():
    harness = Harness(settings=SchedulerSettings(chunk=8))
    harness.submit(request(1, [1, 2], max_tokens=20, ignore_eos=True))
    harness.step()
    harness.submit(request(2, LONG[:20], max_tokens=2))
    for _ in range(3):
        harness.step()
    assert plans(harness)[1:] == [[(2, 1), (0, 7)], [(3, 1), (7, 7)], [(4, 1), (14, 6)]]
    harness.run()
    harness.check_ended()


def test_whole_prompts_where_chunking_is_off():
    settings = SchedulerSettings(chunk=0, max_prefill_tokens=30)
    harness = Harness(settings=settings)
    harness.submit(*(request(n, [n] * 20, max_tokens=1) for n in (1, 2)))
    harness.submit(request(3, [3] * 35, max_tokens=1))
    harness.run()
    harness.check_ended()
    assert plans(harness) == [[(0, 20)], [(0, 20)], [(0, 30)], [(30, 5)]]


def test_a_second_request_reuses_the_first_ones_pages():
    harness = Harness()
    harness.submit(request(1, LONG, max_tokens=1))
    harness.run()
    harness.submit(request(2, [*LONG[:30], 49], max_tokens=1), request(3, LONG, max_tokens=1))
    harness.run()
    harness.check_ended()
    assert harness.started == {1: 0, 2: 28, 3: 36}, "whole pages, and one token is computed"
    assert harness.scheduler.counters.cached_tokens == 64


def test_salts_keep_prefixes_apart():
    harness = Harness()
    for sid, salt in enumerate(["", "a", "b", "a"]):
        harness.submit(request(sid, LONG, max_tokens=1, cache_salt=salt))
        harness.run()
    assert harness.started == {0: 0, 1: 0, 2: 0, 3: 36}


def test_without_sharing_only_siblings_share_and_nothing_stays():
    harness = Harness(settings=SchedulerSettings(share_prefixes=False, chunk=16))
    harness.submit(*(request(n, LONG, group=1, seed=n, max_tokens=3) for n in (1, 2)))
    harness.submit(request(3, LONG, max_tokens=3))
    harness.run()
    harness.check_ended()
    assert harness.started == {1: 0, 2: 36, 3: 0}
    assert harness.scheduler.ledger.pool.cached == 0


def test_a_sequence_waits_for_the_one_that_computes_its_prefix():
    harness = Harness(settings=SchedulerSettings(chunk=10))
    long = LONG + LONG
    harness.submit(request(1, long, max_tokens=2), request(2, [*long, 7], max_tokens=2))
    harness.submit(request(3, [9, 9, 9], max_tokens=2))
    for _ in range(4):
        harness.step()
    assert list(harness.started) == [3], "a short one waits neither for the long nor the held back"
    harness.run()
    harness.check_ended()
    assert harness.started[2] == 80


@pytest.mark.parametrize("end", ["abort", "finish"])
def test_who_waited_for_it_goes_on_when_the_other_ends(end):
    harness = Harness(settings=SchedulerSettings(chunk=10))
    long = LONG + LONG
    harness.submit(request(1, long, max_tokens=1), request(2, long, max_tokens=1))
    harness.step()
    harness.step()
    if end == "abort":
        harness.abort(1)
    harness.run()
    harness.check_ended()
    assert harness.started[2] == (20 if end == "abort" else 76)


def test_priority_then_arrival():
    harness = Harness(geometry(max_slots=1))
    harness.submit(*(request(n, [n], max_tokens=1, priority=n // 3) for n in range(5)))
    harness.run()
    assert list(harness.finishes) == [3, 4, 0, 1, 2]


def test_longest_prefix_first_but_nobody_waits_for_ever():
    harness = Harness(geometry(max_slots=1), SchedulerSettings(policy="lpm"))
    harness.submit(request(0, LONG, max_tokens=1))
    harness.run()
    harness.submit(request(1, [7, 8, 9], max_tokens=1), request(2, LONG[:12], max_tokens=1))
    harness.submit(request(3, LONG, max_tokens=1))
    harness.run()
    assert list(harness.finishes) == [0, 3, 2, 1]
    harness.submit(request(4, [4, 5, 6], max_tokens=1))
    for sid in range(5, 305):  # always one with a better prefix
        harness.submit(request(sid, LONG, max_tokens=1))
        harness.step()
    assert 4 in harness.finishes


def test_pressure_preempts_the_youngest_and_it_comes_back():
    # 15 pages of 4: two sequences of 30 tokens at the end do not fit together.
    harness = Harness(geometry(num_pages=16), SchedulerSettings(conservativeness=0.0))
    harness.submit(*(request(n, [n] * 10, max_tokens=30, ignore_eos=True) for n in (1, 2)))
    harness.run()
    harness.check_ended()
    assert harness.scheduler.counters.preemptions == 1
    assert list(harness.finishes) == [1, 2]


def test_the_reserve_avoids_preemption():
    harness = Harness(geometry(num_pages=16), SchedulerSettings(conservativeness=2.0))
    harness.submit(*(request(n, [n] * 10, max_tokens=30, ignore_eos=True) for n in (1, 2)))
    harness.run()
    harness.check_ended()
    assert harness.scheduler.counters.preemptions == 0


def test_the_last_one_standing_that_outgrows_the_pool_ends_with_an_error():
    harness = Harness(geometry(num_pages=6), depth=2)
    harness.submit(request(1, [1] * 10, max_tokens=50, ignore_eos=True))
    harness.submit(request(2, [2] * 3, max_tokens=2, ignore_eos=True))
    harness.run()
    assert harness.finishes[1].status == 500
    assert "20 tokens" in harness.finishes[1].message
    assert len(harness.tokens[1]) == 11
    assert harness.finishes[2].reason == "length"


def test_what_can_never_run_is_refused_with_both_numbers():
    harness = Harness(geometry(num_pages=6, context_length=32))
    harness.submit(request(1, [1] * 32), request(2, [1] * 21), request(3, []), request(4, [50]))
    messages = {sid: f.message for sid, f in harness.finishes.items()}
    assert "32 tokens" in messages[1] and "context length of 32" in messages[1]
    assert "21 tokens" in messages[2] and "holds 20" in messages[2]
    assert "empty" in messages[3] and "vocabulary of 50" in messages[4]
    assert all(f.status == 400 for f in harness.finishes.values())
    assert not harness.started


def test_generation_ends_at_the_context_length():
    harness = Harness(geometry(context_length=16))
    harness.submit(request(1, [3] * 15, max_tokens=9, ignore_eos=True))
    harness.submit(request(2, [3] * 10, max_tokens=9, ignore_eos=True))
    harness.run()
    harness.check_ended()
    assert [len(harness.tokens[n]) for n in (1, 2)] == [1, 6]


def test_the_queue_has_an_end():
    harness = Harness(geometry(max_slots=2), SchedulerSettings(max_queued=1))
    harness.submit(*(request(n, [n], max_tokens=2) for n in range(4)))
    assert list(harness.finishes) == [3], "two have a slot to go to, one may wait"
    assert harness.finishes[3].status == 503 and "queue is full" in harness.finishes[3].message
    harness.run()
    harness.submit(*(request(n, [n], group=9, max_tokens=2) for n in range(10, 14)))
    assert {10, 11, 12, 13} <= set(harness.finishes), "all of a request or none"


def test_a_resumed_sequence_goes_on_after_what_was_emitted():
    whole = request(1, [5, 6, 7], max_tokens=9, min_tokens=7)
    tokens, reason, matched = run_alone(whole, geometry())
    harness = Harness()
    harness.submit(
        request(1, [5, 6, 7], max_tokens=9, min_tokens=7, output_ids=pack_ids(tokens[:4]))
    )
    harness.run()
    assert tokens[:4] + harness.tokens[1] == tokens
    assert (harness.finishes[1].reason, harness.finishes[1].matched) == (reason, matched)
    done = request(2, [5, 6, 7], max_tokens=4, output_ids=pack_ids(tokens[:4]))
    harness.submit(done)
    assert harness.finishes[2].reason == "length"


def test_a_prompt_can_be_scored_without_an_answer():
    harness = Harness(settings=SchedulerSettings(chunk=16))
    harness.submit(request(1, LONG, max_tokens=1))
    harness.run()
    harness.submit(request(2, LONG, max_tokens=0, prompt_logprobs=2))
    harness.submit(request(3, LONG, max_tokens=0))
    harness.run()
    harness.check_ended()
    assert harness.scores[2] == [-float(token) for token in LONG[1:]]
    assert harness.started[2] == 0, "scoring computes all of it"
    assert harness.tokens[2] == [] and harness.finishes[3].reason == "length"


def test_deadlines_end_waiting_and_running_ones():
    harness = Harness(geometry(max_slots=1))
    harness.submit(request(1, [1], max_tokens=50, ignore_eos=True, deadline=5.0))
    harness.submit(request(2, [2], max_tokens=2, deadline=4.0), request(3, [3], max_tokens=2))
    harness.step()
    assert harness.scheduler.next_deadline() == 4.0
    harness.scheduler.expire(4.5)
    harness.step()
    assert list(harness.finishes) == [2]
    harness.scheduler.expire(5.0)
    harness.run()
    harness.check_ended()
    assert [harness.finishes[n].reason for n in (1, 2, 3)] == ["deadline", "deadline", "length"]
    assert harness.scheduler.next_deadline() == float("inf")


def test_a_failed_step_ends_its_sequences_and_no_other():
    harness = Harness(depth=2, raise_on=[3])
    harness.submit(request(1, [1, 2], max_tokens=30, ignore_eos=True))
    for _ in range(4):
        harness.step()
    harness.submit(request(2, LONG, max_tokens=3, ignore_eos=True))
    harness.run()
    harness.check_ended()
    assert harness.finishes[1].status == 500
    assert harness.finishes[2].reason == "length"


def test_a_row_that_is_not_finite_ends_alone_and_leaves_nothing_cached():
    harness = Harness(not_finite=[1])
    harness.submit(request(1, LONG, max_tokens=3), request(2, [7] * 20, max_tokens=3))
    harness.run()
    harness.check_ended()
    assert harness.finishes[1].status == 500 and "finite" in harness.finishes[1].message
    assert harness.scheduler.ledger.tree.match_length("", pack_ids(LONG), 10) == 0
    assert harness.finishes[2].reason in ("stop", "length")


def test_flushing_keeps_what_runs():
    harness = Harness()
    harness.submit(request(1, LONG, max_tokens=1))
    harness.run()
    assert harness.scheduler.flush_cache() == 0
    assert harness.scheduler.ledger.pool.free == harness.scheduler.ledger.pool.usable
    harness.submit(request(2, LONG, max_tokens=5, ignore_eos=True))
    harness.step()
    assert harness.scheduler.flush_cache() == 10
    harness.run()
    harness.check_ended()


def test_a_violation_is_healed():
    harness = Harness()
    harness.submit(request(1, LONG, max_tokens=5, ignore_eos=True))
    harness.step()
    ledger = harness.scheduler.ledger
    ledger.pool.allocate(3)  # nobody's
    assert ledger.heal() and ledger.healed == 1
    assert ledger.heal() == [] and ledger.healed == 1
    harness.run()
    harness.check_ended()


def test_a_sid_submitted_twice_runs_once(caplog):
    harness = Harness()
    harness.submit(request(1, [1, 2], max_tokens=2))
    harness.submit(request(1, [1, 2], max_tokens=2))
    harness.run()
    harness.check_ended()
    assert "twice" in caplog.text


def test_stop_tokens_end_only_the_sequence_that_asks():
    harness = Harness()
    tokens, _, _ = run_alone(request(1, [5, 6], max_tokens=8, ignore_eos=True), geometry())
    stop = tokens[3]
    for sid, ids in ((1, (stop,)), (2, ())):
        harness.submit(
            request(sid, [5, 6], seed=1, max_tokens=8, ignore_eos=True, stop_token_ids=ids)
        )
    harness.run()
    harness.check_ended()
    assert harness.finishes[1].matched == stop and harness.finishes[2].reason == "length"
    assert not harness.scheduler.table.may_end[stop], "forgotten with the sequence"


def test_cached_chunks_of_a_row_that_is_not_finite_are_forgotten():
    harness = Harness(settings=SchedulerSettings(chunk=10), not_finite=[2])
    harness.submit(request(1, LONG[:12], max_tokens=1))
    harness.run()
    harness.submit(request(2, LONG, max_tokens=3))
    harness.step()
    harness.step()
    tree = harness.scheduler.ledger.tree
    assert tree.match_length("", pack_ids(LONG), 10) == 8
    harness.run()
    assert harness.finishes[2].status == 500
    assert tree.match_length("", pack_ids(LONG), 10) == 0, "nor what it was computed from"


def test_prompt_scores_are_told_once_though_preempted_on_the_way():
    harness = Harness(
        geometry(num_pages=17), SchedulerSettings(chunk=8, conservativeness=0.0), depth=2
    )
    prompt = LONG + LONG[:6]
    harness.submit(request(1, [9] * 15, max_tokens=30, ignore_eos=True))
    harness.step()
    harness.submit(request(2, prompt, max_tokens=1, prompt_logprobs=0))
    harness.run()
    harness.check_ended()
    assert harness.scheduler.counters.preemptions == 1
    assert harness.scores[2] == [-float(token) for token in prompt[1:]]


def test_a_lost_page_table_change_sends_its_sequence_back():
    harness = Harness()
    harness.submit(*(request(n, [n] * 9, max_tokens=9, ignore_eos=True) for n in (1, 2)))
    harness.step()
    scheduler = harness.scheduler
    table, second = scheduler.table, scheduler._open[2]
    # As if its first pages had been swapped for another's, in a step that has no room for its row.
    scheduler.ledger._change(second.slot, 0, table.page_table[second.slot, :2])
    table.decoding[second.slot] = False
    plan = scheduler.plan()
    assert plan is not None and len(plan.slots) == 1 and len(plan.table_pages) == 2
    scheduler.abandon(plan.step, "It failed.")
    assert second.slot < 0 and len(scheduler.queue) == 1, "the worker has not heard of the swap"
    harness.run()
    harness.check_ended()
    assert [harness.finishes[n].status for n in (1, 2)] == [500, 200]


def test_min_tokens_hold_even_where_the_sampler_does_not_mask():
    for stop in ({"stop_token_ids": (7,)}, {}):
        sequence = Sequence(request(1, [1, 2], min_tokens=3, **stop), "", 0, b"", 2)
        token = 7 if stop else 0
        ends = [sequence.ending(token, n, frozenset({0}), 99).happened for n in range(3, 8)]
        assert ends == [False, False, False, True, True]
