"""No flag changes the answer: 64 concurrent streams give the tokens each request gives alone.

    python bench/exactness.py [--quick] [--model M] [--requests 64] [--flags "..."]

Starts a float32 server for each combination of prefix cache, chunk size, page size and memory
pressure, sends all requests at once (mixed lengths, a third with a shared beginning; half greedy,
half sampled with a seed), and compares with what a server without any of it gives to each request
alone. A line a combination; exit status 1 when one differs, or when pressure did not preempt.
"""

import argparse
import asyncio
import itertools
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from servers import Running, detour

from detour.bench.http_client import BrokenReply, ConnectFailed, HttpClient, Target
from detour.bench.load import EventReader

PORT = 18490
# Tokens in the cache under pressure: the smaller the chunk, the fewer sequences run at a time. The
# longest request takes 248. And nothing is kept back for growth.
PRESSURE = {"16": 384, "64": 768, "off": 1024}
CHUNKS = {"16": 16, "64": 64, "off": -1}


@dataclass(frozen=True)
class Combination:
    radix: bool = False
    chunk: str = "off"
    page: int = 1
    pressure: bool = False

    @property
    def flags(self) -> list[str]:
        flags = ["--chunked-prefill-size", str(CHUNKS[self.chunk]), "--page-size", str(self.page)]
        flags += [] if self.radix else ["--disable-radix-cache"]
        if self.pressure:
            flags += ["--max-total-tokens", str(PRESSURE[self.chunk])]
            flags += ["--schedule-conservativeness", "0"]
        return flags

    def __str__(self) -> str:
        radix = "on" if self.radix else "off"
        pressure = "yes" if self.pressure else "no"
        return f"radix {radix:3}  chunk {self.chunk:3}  page {self.page:2}  pressure {pressure:3}"


REFERENCE = Combination()
QUICK = (
    Combination(True, "off", 16, False),
    Combination(True, "16", 1, True),
    Combination(False, "64", 64, True),
    Combination(True, "64", 64, False),
)


def combinations(quick: bool) -> list[Combination]:
    if quick:
        return list(QUICK)
    every = itertools.product((True, False), CHUNKS, (1, 16, 64), (False, True))
    return [Combination(*values) for values in every]


def make_requests(count: int, vocabulary: int) -> list[dict[str, object]]:
    """Bodies for /generate; prompts of 1 to 200 tokens, 8 to 48 new ones."""
    rng = np.random.default_rng(11)
    low, high = vocabulary // 10, vocabulary * 9 // 10
    shared = rng.integers(low, high, 96).tolist()
    bodies: list[dict[str, object]] = []
    for number in range(count):
        ids = rng.integers(
            low, high, int(rng.integers(1, 104 if number % 3 == 0 else 200))
        ).tolist()
        sampling: dict[str, object] = {
            "max_new_tokens": int(rng.integers(8, 49)),
            "temperature": 0.8 if number % 2 else 0.0,
            "sampling_seed": number,
            "ignore_eos": True,
        }
        prompt = shared + ids if number % 3 == 0 else ids
        bodies.append({"input_ids": prompt, "sampling_params": sampling, "stream": True})
    return bodies


async def tokens_of(client: HttpClient, body: dict[str, object]) -> list[int]:
    """Streams one request. Raises RuntimeError where it fails."""
    last = b""
    refused: list[bytes] = []

    def keep(payload: bytes, now: float) -> None:
        nonlocal last
        last = payload if payload != b"[DONE]" else last

    message = client.message("POST", "/generate", json.dumps(body).encode())
    try:
        await client.exchange(message, EventReader(keep).feed, lambda body, _: refused.append(body))
    except (BrokenReply, ConnectFailed) as error:
        raise RuntimeError(str(error)) from None
    event = json.loads(last or b"".join(refused) or b"{}")
    if "output_ids" not in event:
        raise RuntimeError(f"no tokens in the reply: {event}")
    found: list[int] = event["output_ids"]
    return found


async def all_of(bodies: list[dict[str, object]], together: bool) -> tuple[list[list[int]], int]:
    """Every request's tokens, and how often a sequence was preempted."""
    client = HttpClient(Target(f"http://127.0.0.1:{PORT}"), {})
    if together:
        found = await asyncio.gather(*(tokens_of(client, body) for body in bodies))
    else:
        found = [await tokens_of(client, body) for body in bodies]
    _, info = await client.fetch("GET", "/server_info")
    await client.close()
    return list(found), json.loads(info)["internal_states"][0]["preemptions"]


def differences(expected: list[list[int]], found: list[list[int]]) -> list[str]:
    texts = []
    for number, (want, got) in enumerate(zip(expected, found, strict=True)):
        if want != got:
            at = next(
                (i for i, (a, b) in enumerate(zip(want, got, strict=False)) if a != b),
                min(len(want), len(got)),
            )
            kind = "sampled" if number % 2 else "greedy"
            texts.append(
                f"    request {number} ({kind}): at new token {at} {want[at : at + 1]} became "
                f"{got[at : at + 1]} ({len(want)} and {len(got)} tokens)"
            )
    return texts


def run(
    combination: Combination,
    bodies: list[dict[str, object]],
    together: bool,
    args: argparse.Namespace,
) -> tuple[list[list[int]], int]:
    flags = ["--dtype", "float32", *combination.flags, *args.flags.split()]
    server = detour(Path(sys.executable), args.model, flags, 2048, PORT)
    with Running(server, Path(tempfile.gettempdir()) / "exactness.log"):
        return asyncio.run(all_of(bodies, together))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--vocab-size", type=int, default=49_152)
    parser.add_argument("--quick", action="store_true", help="four combinations instead of 36")
    parser.add_argument("--only", default="", help="combinations whose line holds this")
    parser.add_argument("--flags", default="", help="more flags for every server")
    args = parser.parse_args()
    bodies = make_requests(args.requests, args.vocab_size)
    expected, _ = run(REFERENCE, bodies, False, args)
    total = sum(map(len, expected))
    print(f"reference: {len(bodies)} requests, each alone, {total} tokens", flush=True)
    failures = 0
    for combination in combinations(args.quick):
        if args.only not in str(combination):
            continue
        began = time.monotonic()
        try:
            found, preemptions = run(combination, bodies, True, args)
            wrong = differences(expected, found)
        except RuntimeError as error:
            found, preemptions, wrong = [], 0, [f"    {error}"]
        idle = combination.pressure and not preemptions
        verdict = f"{len(wrong)} DIFFER" if wrong else "NO PREEMPTION" if idle else "equal"
        failures += verdict != "equal"
        seconds = time.monotonic() - began
        print(f"{combination}  {preemptions:4} preemptions  {seconds:4.0f} s  {verdict}")
        print("\n".join(wrong[:5]), end="\n" if wrong else "", flush=True)
    print("all equal" if not failures else f"{failures} combinations failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
