"""Random schedules: whatever comes in whatever order, the answers are those of each request alone.

A failure here is a fault of the engine core (pages, tree, plans), never of numerics.
"""

from fake_executor import geometry
from harness import Harness, request
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from detour.engine.request import unpack_ids
from detour.engine.scheduler import SchedulerSettings

geometries = st.builds(
    geometry,
    num_pages=st.integers(4, 40),
    page_size=st.sampled_from([1, 2, 4, 16]),
    max_slots=st.integers(1, 6),
    context_length=st.integers(12, 64),
    vocab_size=st.just(12),
)
scheduler_settings = st.builds(
    SchedulerSettings,
    chunk=st.sampled_from([0, 1, 3, 8, 16, 100]),
    max_prefill_tokens=st.sampled_from([8, 32, 200]),
    max_queued=st.sampled_from([-1, -1, 2, 6]),
    policy=st.sampled_from(["fcfs", "lpm"]),
    share_prefixes=st.booleans(),
    conservativeness=st.sampled_from([0.0, 0.3, 1.0]),
)


@st.composite
def one_request(draw, sid: int, stems: list[list[int]], groups: int):
    prompt = draw(st.sampled_from(stems))[: draw(st.integers(1, 40))]
    prompt = prompt + draw(st.lists(st.integers(1, 11), max_size=6))
    max_tokens = draw(st.integers(0, 24))
    return request(
        sid,
        prompt,
        group=draw(st.integers(0, groups)) * 1000,
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(st.integers(1, 11), max_size=2))),
        seed=draw(st.integers(0, 3)),
        logprobs=draw(st.sampled_from([-1, -1, 0, 2])),
        prompt_logprobs=draw(st.sampled_from([-1, -1, -1, 0, 2])),
        priority=draw(st.sampled_from([0, 0, 1])),
        cache_salt=draw(st.sampled_from(["", "", "salt"])),
    )


@st.composite
def schedules(draw):
    stems = draw(
        st.lists(st.lists(st.integers(1, 11), min_size=1, max_size=40), min_size=1, max_size=3)
    )
    count = draw(st.integers(1, 14))
    requests = [draw(one_request(sid, stems, count)) for sid in range(count)]
    actions = []
    for entry in requests:
        actions.append(("submit", entry))
        actions += [("step", None)] * draw(st.integers(0, 4))
        if draw(st.integers(0, 3)) == 0:
            actions.append(("abort", draw(st.integers(0, entry.sid))))
        if draw(st.integers(0, 9)) == 0:
            actions.append(("flush", None))
    return actions


def play(harness: Harness, actions) -> None:
    for action, what in actions:
        if action == "submit":
            harness.submit(what)
        elif action == "abort":
            harness.abort(what)
        elif action == "flush":
            harness.scheduler.flush_cache()
            harness.check()
        else:
            harness.step()
    harness.run()
    harness.check_ended()


bounded = settings(
    max_examples=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@bounded
@given(geometries, scheduler_settings, st.integers(1, 2), schedules())
def test_answers_do_not_depend_on_the_schedule(geo, config, depth, actions):
    harness = Harness(geo, config, depth)
    play(harness, actions)
    for sid, finish in harness.finishes.items():
        params = harness.requests[sid].params
        if params.logprobs >= 0:
            assert harness.logprobs[sid] == [-float(token) for token in harness.tokens[sid]]
        if params.prompt_logprobs >= 0 and finish.reason != "error":
            ids = unpack_ids(harness.requests[sid].prompt_ids).tolist()
            assert harness.scores[sid] == [-float(token) for token in ids[1:]]


@bounded
@given(
    geometries,
    scheduler_settings,
    st.integers(1, 2),
    schedules(),
    st.sets(st.integers(0, 40), max_size=4),
    st.sets(st.integers(0, 40), max_size=3),
)
def test_faults_end_only_the_sequences_of_their_step(geo, config, depth, actions, raising, refused):
    harness = Harness(geo, config, depth, raise_on=raising, refuse=refused, not_finite={3})
    play(harness, actions)
