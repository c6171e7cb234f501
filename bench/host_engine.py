"""What the engine costs on the host: a step's planning and committing, the prefix tree, admission.

Items 1 to 7 of the host path's set. CPU time of one thread, medians; no device, no model.
"""

import time
from collections.abc import Callable
from statistics import median

import numpy as np
from row import Row

from detour.engine.page_pool import PagePool
from detour.engine.plan import Geometry, StepPlan, StepResult
from detour.engine.prefix_tree import PrefixTree
from detour.engine.request import Request
from detour.engine.scheduler import Scheduler, SchedulerSettings
from detour.sampling_params import SamplingParams

REPEATS = 200
PAGE = 64
VOCAB = 100_000
EOS = 0


def cpu(action: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median CPU seconds."""
    times = []
    for _ in range(repeats):
        begin = time.thread_time_ns()
        action()
        times.append(time.thread_time_ns() - begin)
    return median(times) / 1e9


def cpu_after(
    prepare: Callable[[], object], action: Callable[[object], object], repeats: int = REPEATS
) -> float:
    """Median CPU seconds of the action alone, given what `prepare` made for it."""
    times = []
    for _ in range(repeats):
        given = prepare()
        begin = time.thread_time_ns()
        action(given)
        times.append(time.thread_time_ns() - begin)
    return median(times) / 1e9


def scheduler(slots: int, context: int, pages: int, chunk: int = 1 << 20) -> Scheduler:
    geometry = Geometry(
        num_pages=pages,
        page_size=PAGE,
        max_slots=slots,
        context_length=context,
        vocab_size=VOCAB,
        kv_bytes_per_token=1,
        eos_ids=(EOS,),
    )
    return Scheduler(geometry, SchedulerSettings(chunk=chunk))


def random_ids(rng: np.random.Generator, count: int) -> bytes:
    return rng.integers(1, VOCAB, count, dtype=np.int32).tobytes()


def request(sid: int, prompt: bytes, max_tokens: int) -> Request:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return Request(sid=sid, group=sid, request_id="", prompt_ids=prompt, params=params)


def result_of(plan: StepPlan, rng: np.random.Generator) -> StepResult:
    slots = plan.slots[plan.samples]
    n = len(slots)
    return StepResult(
        step=plan.step,
        slots=slots,
        tokens=rng.integers(1, VOCAB, n, dtype=np.int32),
        logprobs=np.zeros(n, np.float32),
        top_ids=np.zeros((n, 0), np.int32),
        top_logprobs=np.zeros((n, 0), np.float32),
        finite=np.ones(n, np.bool_),
    )


class Decoding:
    """An engine in which all sequences decode, with two steps out."""

    def __init__(self, running: int, context: int) -> None:
        self.running = running
        self.rng = np.random.default_rng(0)
        self.times: list[int] = []
        room = REPEATS + 50
        pages = running * (-(-(context + room) // PAGE)) + 2
        self.engine = scheduler(running, context + room, pages)
        for sid in range(running):
            prompt = random_ids(self.rng, context - 10)
            self.engine.submit([request(sid, prompt, room + 20)])
        self.out = self.engine.plan()
        while len(self.out.tokens) != running:  # all prompts, then a first decode
            self.engine.commit(result_of(self.out, self.rng))
            self.engine.outbox.take()
            self.out = self.engine.plan()

    def step(self) -> None:
        """Plan, commit, and pack the events."""
        result = result_of(self.out, self.rng)
        begin = time.thread_time_ns()
        self.out = self.engine.plan()
        self.engine.commit(result)
        events = self.engine.outbox.take()
        self.times.append(time.thread_time_ns() - begin)
        assert events is not None and len(self.out.tokens) == self.running

    @property
    def seconds(self) -> float:
        return median(self.times) / 1e9


def decode_steps(*settings: tuple[int, int]) -> list[float]:
    """Median CPU seconds of a step for each (running, context); in turns, so that a busy moment of
    the machine falls on all of them."""
    engines = [Decoding(running, context) for running, context in settings]
    for _ in range(REPEATS):
        for engine in engines:
            engine.step()
    return [engine.seconds for engine in engines]


def match(nodes: int) -> float:
    rng = np.random.default_rng(0)
    pool = PagePool(2000)
    tree = PrefixTree(pool, PAGE)
    ids = random_ids(rng, 32768 + PAGE)
    pages, at = 32768 // PAGE, tree.root("")
    tree.pin(at)
    for piece in range(nodes):
        # A pin on each end keeps the pieces apart, as turns of a conversation are.
        begin, end = piece * pages // nodes, (piece + 1) * pages // nodes
        tokens = ids[begin * PAGE * 4 : end * PAGE * 4]
        at, _ = tree.insert(at, tokens, pool.allocate(end - begin))
        tree.pin(at)
    assert len(tree.nodes()) == nodes
    assert len(tree.match("", ids, pages).pages) == pages
    return cpu(lambda: tree.match("", ids, pages))


def forest(leaves: int, shared: bytes = b"") -> tuple[PrefixTree, PagePool]:
    """A tree of `leaves` two-page leaves."""
    rng = np.random.default_rng(1)
    pool = PagePool(2 * leaves + 10_000)
    tree = PrefixTree(pool, PAGE)
    for _ in range(leaves):
        insert(tree, pool, random_ids(rng, 2 * PAGE))
    if shared:
        insert(tree, pool, shared)
    return tree, pool


def insert(tree: PrefixTree, pool: PagePool, ids: bytes) -> None:
    root = tree.root("")
    tree.pin(root)
    node, _ = tree.insert(root, ids, pool.allocate(len(ids) // (4 * PAGE)))
    tree.unpin(node)


def insert_shared() -> float:
    """9k tokens of which the tree has 8k already."""
    rng = np.random.default_rng(2)
    shared = random_ids(rng, 8192)
    tree, pool = forest(4096, shared)

    def prepare() -> tuple[bytes, np.ndarray]:
        if pool.free < 200:
            tree.evict(2000)
        return shared + random_ids(rng, 1024), pool.allocate(9216 // PAGE)

    def action(given: tuple[bytes, np.ndarray]) -> None:
        ids, pages = given
        root = tree.root("")
        tree.pin(root)
        node, present = tree.insert(root, ids, pages)
        pool.release(pages[: len(present)])
        tree.unpin(node)

    return cpu_after(prepare, action)


def evict(leaves: int) -> float:
    tree, pool = forest(leaves)
    rng = np.random.default_rng(3)

    def prepare() -> None:
        for _ in range(8):
            insert(tree, pool, random_ids(rng, 2 * PAGE))

    return cpu_after(prepare, lambda _: tree.evict(1024 // PAGE))


def admission(length: int) -> float:
    """From the message to the first plan, nothing cached, beside 230 that decode (their share of
    the plan is taken off)."""
    rng = np.random.default_rng(4)
    engine = scheduler(256, 40_000, 60_000, chunk=1 << 17)
    engine.submit([request(sid, random_ids(rng, 100), 30_000) for sid in range(230)])

    def step() -> float:
        begin = time.thread_time_ns()
        plan = engine.plan()
        spent = time.thread_time_ns() - begin
        assert plan is not None
        engine.commit(result_of(plan, rng))
        engine.outbox.take()
        return spent

    step()
    with_one, without = [], []
    for sid in range(1000, 1000 + REPEATS):
        without.append(step())
        entering = request(sid, random_ids(rng, length), 100)
        begin = time.thread_time_ns()
        engine.submit([entering])
        submitted = time.thread_time_ns() - begin
        with_one.append(submitted + step())
        engine.abort([sid])
        engine.flush_cache()
    return (median(with_one) - median(without)) / 1e9


def rows() -> list[Row]:
    ms, us = 1e3, 1e6
    step, long = decode_steps((1024, 1024), (1024, 32768))
    few, some = decode_steps((64, 1024), (256, 1024))
    found = [
        Row("1 step, 1,024 running, 1k context, page 64", step * ms, "ms", "0.59 nano-vllm", 1.0),
        Row("2 step, 64 running", few * ms, "ms", "1.28 mini-sglang", 0.15),
        Row("2 step, 256 running", some * ms, "ms", "5.3 mini-sglang", 0.35),
        Row("3 step, 1,024 running, 32k / 1k context", long / step, "ratio", "grows", 1.1),
    ]
    for nodes, anchor, bar in ((1, "14-24", 25), (64, "320-500", 150), (256, "1,340-1,830", 500)):
        name = f"4 match 32k tokens in {nodes} nodes"
        found.append(Row(name, match(nodes) * us, "us", f"{anchor} mini-sglang", bar))
    found.append(
        Row(
            "5 insert 9k, 8k shared, 4,096 leaves", insert_shared() * us, "us", "54 mini-sglang", 60
        )
    )
    for leaves, anchor in ((4096, "1,100 mini-sglang"), (65536, "17,000 (extrapolated)")):
        name = f"6 evict 1k tokens of {leaves:,} leaves"
        found.append(Row(name, evict(leaves) * us, "us", anchor, 100))
    for length, bar in ((1024, 0.1), (32768, 0.2)):
        name = f"7 admit a cold prompt of {length:,} tokens"
        found.append(Row(name, admission(length) * ms, "ms", "0.30-0.44 mini-sglang (1k)", bar))
    return found


if __name__ == "__main__":
    for row in rows():
        print(f"{row.name:45} {row.value:8.3f} {row.unit:6} {row.anchor:28} <= {row.bar}")
