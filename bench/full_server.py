"""The whole server but for the model, as two processes: real HTTP, tokenizer, channel, scheduler
and loop over a stub device whose every step takes 10 ms.

    python bench/full_server.py STEP_SECONDS          (prints its port, then serves)

When its standard input ends it prints what it cost as JSON: `front` and `engine` CPU seconds, and
the `idle` share of the device between its first step and its last.
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections import deque

import numpy as np
import uvicorn
import uvloop
from front_server import TEMPLATE, small_tokenizer

from detour.api.app import build_app
from detour.api.settings import ApiSettings
from detour.engine.channel import EngineChannel, FrontChannel
from detour.engine.loop import EngineLoop
from detour.engine.plan import Geometry, StepPlan, StepResult
from detour.engine.remote import EngineClient
from detour.engine.scheduler import Scheduler, SchedulerSettings
from detour.text.chat_template import ChatTemplate

SLOTS, PAGE, CHUNK, VOCABULARY = 1024, 64, 8192, 4096


class StubDevice:
    """An executor like a GPU: steps queue up and each takes its time, without our CPU."""

    weight_bytes, dtype, device = 1, "none", "stub"
    backends: dict[str, str] = {}
    geometry = Geometry(
        num_pages=SLOTS * 8 + 1,
        page_size=PAGE,
        max_slots=SLOTS,
        context_length=2048,
        vocab_size=VOCABULARY,
        kv_bytes_per_token=1,
        eos_ids=(0,),
    )

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._out: deque[tuple[float, StepPlan]] = deque()
        self._free_at = 0.0
        self.busy = 0.0
        self.began = 0.0

    def submit(self, plan: StepPlan) -> None:
        now = time.perf_counter()
        self.began = self.began or now
        self._free_at = max(now, self._free_at) + self._seconds
        self.busy += self._seconds
        self._out.append((self._free_at, plan))

    def collect(self) -> StepResult:
        done_at, plan = self._out.popleft()
        wait = done_at - time.perf_counter()
        if wait > 0:
            time.sleep(wait)
        slots = plan.slots[plan.samples]
        count = len(slots)
        tokens = (slots * 7 + plan.step) % (VOCABULARY - 1) + 1
        none = np.zeros((count, 0), np.float32)
        return StepResult(
            step=plan.step,
            slots=slots,
            tokens=tokens.astype(np.int32),
            logprobs=np.zeros(count, np.float32),
            top_ids=none.astype(np.int32),
            top_logprobs=none,
            finite=np.ones(count, np.bool_),
        )

    def close(self) -> None:
        pass

    @property
    def idle(self) -> float:
        span = self._free_at - self.began
        return 1.0 - self.busy / span if span > 0 else 0.0


def engine(seconds: float, to_engine: str, to_front: str) -> None:
    """The engine process; ends with Shutdown."""
    device = StubDevice(seconds)
    channel = EngineChannel(to_engine, to_front)
    scheduler = Scheduler(device.geometry, SchedulerSettings(chunk=CHUNK))
    EngineLoop(scheduler, device, channel, device).run()
    channel.close()
    cost = {"engine": time.process_time(), "idle": device.idle, "steps": scheduler.counters.steps}
    sys.stdout.write(json.dumps(cost) + "\n")


async def front(seconds: float) -> None:
    with tempfile.TemporaryDirectory() as folder:
        addresses = (f"ipc://{folder}/to-engine", f"ipc://{folder}/to-front")
        command = [sys.executable, __file__, str(seconds), *addresses]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        tokenizer = small_tokenizer()
        client = EngineClient(FrontChannel(*addresses), max_queued=1 << 16)
        app = build_app(client, tokenizer, ChatTemplate(TEMPLATE, "", ""), ApiSettings("bench"))
        config = uvicorn.Config(
            app, port=0, log_level="error", access_log=False, http="httptools", backlog=4096
        )
        server = uvicorn.Server(config)
        receiving = asyncio.create_task(client.run())
        await client.wait_until_up()
        before = time.process_time()
        serving = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.01)
        sys.stdout.write(f"{server.servers[0].sockets[0].getsockname()[1]}\n")
        sys.stdout.flush()
        loop = asyncio.get_running_loop()
        loop.add_reader(sys.stdin, lambda: setattr(server, "should_exit", True))
        await serving
        cost = {"front": time.process_time() - before}
        client.shut_down()
        out, _ = await asyncio.to_thread(process.communicate, timeout=30)
        receiving.cancel()
        sys.stdout.write(json.dumps(cost | json.loads(out.splitlines()[-1])) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 2:
        uvloop.run(front(float(sys.argv[1])))
    else:
        engine(float(sys.argv[1]), sys.argv[2], sys.argv[3])
