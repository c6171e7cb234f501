"""Nothing grows with the number of requests served."""

import gc
import random
import sys

from fake_executor import FakeExecutor, geometry
from harness import request

from detour.engine.scheduler import Scheduler, SchedulerSettings


def serve(scheduler: Scheduler, executor: FakeExecutor, sids: range, dice: random.Random) -> None:
    for sid in sids:
        prompt = [dice.randrange(1, 50) for _ in range(dice.randrange(1, 14))]
        scheduler.submit(
            [
                request(
                    sid,
                    prompt,
                    max_tokens=dice.randrange(0, 3),
                    cache_salt=dice.choice(["", f"salt {sid}"]),
                    stop_token_ids=(dice.randrange(50),),
                    deadline=dice.choice([0.0, 1e9]),
                )
            ]
        )
        if dice.random() < 0.3:
            scheduler.abort([sid - dice.randrange(3)])
        plan = scheduler.plan()
        if plan is not None:
            executor.submit(plan)
        if scheduler.outstanding_steps == 2:
            scheduler.commit(executor.collect())
        scheduler.outbox.take()
    executor.plans.clear()


def test_memory_is_flat():
    geo = geometry(num_pages=60)
    scheduler, executor = Scheduler(geo, SchedulerSettings()), FakeExecutor(geo)
    dice = random.Random(0)
    serve(scheduler, executor, range(800), dice)  # until tree and queues have their usual size
    gc.collect()
    before = sys.getallocatedblocks()
    serve(scheduler, executor, range(800, 1600), dice)
    gc.collect()
    grown = sys.getallocatedblocks() - before
    assert grown < 400, f"800 requests left {grown} blocks of memory"
    while scheduler.open_sequences or scheduler.outstanding_steps:
        plan = scheduler.plan()
        if plan is not None:
            executor.submit(plan)
        scheduler.commit(executor.collect())
    pool = scheduler.ledger.pool
    assert pool.held == 0 and pool.free + pool.cached == pool.usable
