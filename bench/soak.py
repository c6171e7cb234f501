"""Memory stays flat: many short requests, a fifth of them abandoned, and the processes' sizes.

    python bench/soak.py [--requests 20000] [--model M]     (a tiny model of random weights else)
    python bench/soak.py --url http://127.0.0.1:30000 --pid PID     (a server that runs already)

Abandoning means: closing the connection before the first token, amid the stream, or asking
/abort_request. Prints the resident size of the front and the engine along the way, then a verdict
for each: the growth after the first quarter, by a straight line through the samples, must stay
under --allow megabytes. At the end every page must be free or cached, and free after /flush_cache.
"""

import argparse
import asyncio
import contextlib
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from servers import Running, detour

from detour.bench.http_client import BrokenReply, ConnectFailed, HttpClient, Target
from detour.bench.load import EventReader
from detour.loading.synthetic import write_checkpoint

PORT = 18492
SAMPLES = 40
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


def processes(pid: int) -> dict[str, int]:
    """Name -> pid of a server's processes: "front" is its first, "engine" the one that computes."""
    found = {"front": pid}
    waiting = [pid]
    while waiting:
        parent = waiting.pop()
        children = Path(f"/proc/{parent}/task/{parent}/children")
        for child in map(int, children.read_text().split() if children.exists() else ()):
            words = Path(f"/proc/{child}/cmdline").read_bytes().replace(b"\0", b" ").decode()
            if "detour" in words:
                found["engine" if "launch_engine" in words else f"{child}"] = child
            waiting.append(child)
    return found


def resident_megabytes(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    return 0.0


class Soak:
    def __init__(self, url: str, vocabulary: int, seed: int) -> None:
        self.client = HttpClient(Target(url), {})
        self.rng = random.Random(seed)
        self.vocabulary = vocabulary
        self.ended = {"complete": 0, "abandoned": 0, "failed": 0}
        self.reasons: dict[str, int] = {}

    async def one(self, number: int) -> None:
        rng = self.rng
        low, high = self.vocabulary // 10, self.vocabulary * 9 // 10
        rid = f"soak-{number}"
        body = {
            "rid": rid,
            "input_ids": [rng.randrange(low, high) for _ in range(rng.randrange(1, 17))],
            "sampling_params": {"max_new_tokens": rng.randrange(1, 9), "temperature": 0.7},
            "stream": True,
        }
        events: list[bytes] = []
        first = asyncio.Event()

        def on_event(payload: bytes, now: float) -> None:
            events.append(payload)
            first.set()

        refused: list[bytes] = []
        message = self.client.message("POST", "/generate", json.dumps(body).encode())
        task = asyncio.ensure_future(
            self.client.exchange(
                message, EventReader(on_event).feed, lambda b, _: refused.append(b)
            )
        )
        way = rng.randrange(15)
        if way == 0:  # close before anything can have come
            await asyncio.sleep(0)
            task.cancel()
        elif way == 1:  # close amid the stream
            await asyncio.wait([task, waiter := asyncio.ensure_future(first.wait())],
                               return_when=asyncio.FIRST_COMPLETED)  # fmt: skip
            waiter.cancel()
            task.cancel()
        elif way == 2:
            with contextlib.suppress(BrokenReply, ConnectFailed):
                abort = json.dumps({"rid": rid}).encode()
                await self.client.fetch("POST", "/abort_request", abort)
        await self._note(task, way, events, refused)

    async def _note(
        self, task: "asyncio.Future[int]", way: int, events: list[bytes], refused: list[bytes]
    ) -> None:
        try:
            status = await task
        except asyncio.CancelledError:
            self.ended["abandoned"] += 1
            return
        except (BrokenReply, ConnectFailed) as error:
            status, refused = 0, [str(error).encode()]
        if status == 200 and events and events[-1] == b"[DONE]":
            self.ended["abandoned" if way == 2 else "complete"] += 1
        else:
            self.ended["failed"] += 1
            reason = f"{status} {b''.join(refused)[:200].decode('utf-8', 'replace')}"
            self.reasons[reason] = self.reasons.get(reason, 0) + 1

    async def state(self) -> dict[str, float]:
        _, body = await self.client.fetch("GET", "/server_info")
        state: dict[str, float] = json.loads(body)["internal_states"][0]
        return state

    async def run(
        self, count: int, streams: int, pids: dict[str, int]
    ) -> list[tuple[int, dict[str, float]]]:
        """Samples: (requests ended, name -> resident MB)."""
        numbers = iter(range(count))
        samples: list[tuple[int, dict[str, float]]] = []
        every = max(1, count // SAMPLES)

        async def work() -> None:
            for number in numbers:
                await self.one(number)
                ended = sum(self.ended.values())
                if ended % every == 0:
                    sizes = {name: resident_megabytes(pid) for name, pid in pids.items()}
                    samples.append((ended, sizes))
                    told = "  ".join(f"{name} {size:.1f} MB" for name, size in sizes.items())
                    print(f"{ended:7}  {told}", flush=True)

        await asyncio.gather(*(work() for _ in range(streams)))
        return samples

    async def settled(self, seconds: float) -> dict[str, float]:
        """The engine's state once it is idle."""
        end = time.monotonic() + seconds
        while True:
            state = await self.state()
            if not state["running"] + state["waiting"] or time.monotonic() > end:
                return state
            await asyncio.sleep(0.1)


def verdicts(samples: list[tuple[int, dict[str, float]]], allow: float) -> bool:
    """Prints one line a process; true when all are flat."""
    flat = True
    kept = samples[len(samples) // 4 :]
    counts = np.array([ended for ended, _ in kept], np.float64)
    for name in kept[0][1]:
        sizes = np.array([size[name] for _, size in kept])
        slope = float(np.polyfit(counts, sizes, 1)[0])
        growth = slope * float(counts[-1] - counts[0])
        good = growth <= allow
        flat &= good
        print(
            f"{name}: {'flat' if good else 'GROWING'}: {sizes[0]:.1f} -> {sizes[-1]:.1f} MB, "
            f"{slope * 1000:+.3f} MB per 1,000 requests"
        )
    return flat


async def pages_come_back(soak: Soak) -> bool:
    state = await soak.settled(30.0)
    free, held, cached, total = (
        int(state[f"pages_{name}"]) for name in ("free", "held", "cached", "total")
    )
    await soak.client.fetch("POST", "/flush_cache")
    after = await soak.state()
    good = held == 0 and free + cached == total and after["pages_free"] == total
    good &= not state["running"] + state["waiting"] and not state["healed"]
    print(
        f"pages: {free} free + {cached} cached + {held} held of {total}; after a flush "
        f"{int(after['pages_free'])} free; {int(state['healed'])} healed; "
        f"{int(state['preemptions'])} preemptions: {'all back' if good else 'LOST'}"
    )
    return good


async def whole(url: str, pid: int, args: argparse.Namespace) -> bool:
    soak = Soak(url, args.vocab_size, args.seed)
    pids = processes(pid)
    print(f"processes: {pids}")
    began = time.monotonic()
    samples = await soak.run(args.requests, args.streams, pids)
    seconds = time.monotonic() - began
    print(f"{args.requests} requests in {seconds:.0f} s: {soak.ended}")
    for reason, times in list(soak.reasons.items())[:5]:
        print(f"  failed x{times}: {reason}")
    good = verdicts(samples, args.allow) & await pages_come_back(soak)
    await soak.client.close()
    return good and not soak.ended["failed"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--url", default="", help="a server that runs already; needs --pid")
    parser.add_argument("--pid", type=int, default=0, help="of its first process")
    parser.add_argument("--model", default="", help="for a server of our own; default: a tiny one")
    parser.add_argument("--flags", default="", help="more flags for it")
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=TINY["vocab_size"])
    parser.add_argument("--allow", type=float, default=8.0, help="MB of growth taken as flat")
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    if args.url:
        return 0 if asyncio.run(whole(args.url, args.pid, args)) else 1
    # A small cache, so that all of it was touched long before the first sample that counts.
    flags = ["--max-total-tokens", "8192", *args.flags.split()]
    model = args.model
    if not model:
        folder = Path(tempfile.mkdtemp(prefix="soak-"))
        model = str(write_checkpoint(folder / "tiny", TINY, {}))
        flags += ["--load-format", "dummy"]
    server = detour(Path(sys.executable), model, flags, 2048, PORT)
    with Running(server, Path(tempfile.gettempdir()) / "soak.log") as running:
        return 0 if asyncio.run(whole(running.url, running.pid, args)) else 1


if __name__ == "__main__":
    sys.exit(main())
