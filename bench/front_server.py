"""The front alone as a process: real HTTP, tokenizer and engine client; a script for an engine.

    python bench/front_server.py STREAMS STEPS INTERVAL [bare]

Prints its port, then serves. The script waits until STREAMS sequences are open, gives each one
token every INTERVAL seconds for STEPS steps, then ends them. With STREAMS 0 it answers every
request at once with a single token. The CPU time of the process in each step between the first and
the last is printed as JSON (seconds) when its standard input ends, which ends the server. `bare`
serves the same steps from an asyncio protocol that writes one fixed chunk a stream: what the machine
asks for the sockets alone.
"""

import asyncio
import json
import sys
import time
from collections import deque
from typing import Any, ClassVar

import msgspec
import numpy as np
import tokenizers
import uvicorn
import uvloop
from tokenizers import decoders, models, pre_tokenizers, trainers

from detour.api.app import build_app
from detour.api.settings import ApiSettings
from detour.engine.channel import Abort, AskStats, Ready, Stats, Submit, ToEngine, ToFront
from detour.engine.remote import EngineClient
from detour.engine.request import Finish, Started, TokenEvents
from detour.text.chat_template import ChatTemplate
from detour.text.tokenizer import Tokenizer

CONTEXT = 65_536
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def words(count: int, seed: int = 0) -> str:
    """Text of `count` made-up words, the same for the same seed."""
    rng = np.random.default_rng(seed)
    syllables = [a + b for a in "bdfgklmnprst" for b in ("a", "e", "i", "o", "u", "an", "er")]
    picks = rng.integers(0, len(syllables), (count, 3))
    lengths = rng.integers(1, 4, count)
    return " ".join(
        "".join(syllables[one] for one in row[:length])
        for row, length in zip(picks.tolist(), lengths.tolist(), strict=True)
    )


def small_tokenizer() -> Tokenizer:
    """A byte-level BPE trained on such text: a real tokenizer without a download."""
    inner = tokenizers.Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=4096,
        show_progress=False,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    inner.train_from_iterator([words(20_000)], trainer)
    return Tokenizer(inner, eos_ids=(0,))


class Script:
    """A FrontLink: what it receives is packed and unpacked as on the wire, without the socket."""

    def __init__(self, streams: int, steps: int, interval: float, vocab_size: int) -> None:
        self.streams, self.steps, self.interval = streams, steps, interval
        self.vocab_size = vocab_size
        self.cpu: list[float] = []  # of each step between the first and the last, seconds
        self._open: list[int] = []
        self._news = asyncio.Event()
        self._out: deque[ToFront] = deque()
        self._step = 0
        self._cpu_at_start = 0.0
        self._decode = msgspec.msgpack.Decoder(ToFront).decode
        self._out.append(
            Ready(
                num_pages=1 << 20,
                page_size=64,
                max_slots=1 << 16,
                context_length=CONTEXT,
                vocab_size=vocab_size,
                kv_bytes_per_token=1,
                eos_ids=(0,),
                weight_bytes=1,
                dtype="float32",
                device="none",
                backends={},
            )
        )

    def send(self, message: ToEngine) -> None:
        match message:
            case Submit():
                self._open += [request.sid for request in message.requests]
                self._news.set()
            case Abort():
                self._open = [sid for sid in self._open if sid not in message.sids]
            case AskStats():
                self._out.append(Stats())
                self._news.set()

    async def receive(self) -> ToFront:
        while True:
            if self._out:
                return self._out.popleft()
            if self._open and len(self._open) >= self.streams:
                return await self._tokens()
            self._news.clear()
            await self._news.wait()

    async def _tokens(self) -> ToFront:
        if self._step > 1:  # the first step also wrote the headers
            self.cpu.append(time.process_time() - self._cpu_at_start)
        self._cpu_at_start = time.process_time()
        if self.streams:
            await asyncio.sleep(self.interval)
        self._step += 1
        sids = np.array(self._open, dtype=np.int64)
        tokens = (sids * 7 + self._step) % (self.vocab_size - 1) + 1
        last = not self.streams or self._step == self.steps
        started = [Started(sid, 0) for sid in self._open] if self._step == 1 else []
        finished = [Finish(sid, "length") for sid in self._open] if last else []
        if last:
            self._open, self._step = [], 0
        packed = msgspec.msgpack.encode(
            TokenEvents(
                sids.tobytes(), tokens.astype(np.int32).tobytes(), started, finished=finished
            )
        )
        return self._decode(packed)


async def main(streams: int, steps: int, interval: float) -> None:
    tokenizer = small_tokenizer()
    script = Script(streams, steps, interval, tokenizer.vocab_size)
    client = EngineClient(script, max_queued=1 << 16)
    app = build_app(client, tokenizer, ChatTemplate(TEMPLATE, "", ""), ApiSettings("bench"))
    config = uvicorn.Config(
        app,
        port=0,
        log_level="error",
        access_log=False,
        loop="uvloop",
        http="httptools",
        backlog=4096,
    )
    server = uvicorn.Server(config)
    receiving = asyncio.create_task(client.run())
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    sys.stdout.write(f"{server.servers[0].sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    asyncio.get_running_loop().add_reader(sys.stdin, lambda: setattr(server, "should_exit", True))
    await serving
    receiving.cancel()
    sys.stdout.write(json.dumps({"cpu": script.cpu}) + "\n")


class Bare(asyncio.Protocol):
    """Answers any request with a head, then whatever its server writes."""

    opened: ClassVar[list[Any]] = []

    def connection_made(self, transport: Any) -> None:  # uvloop's is no asyncio.Transport
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n")
        self.opened.append(self._transport)


async def bare(streams: int, steps: int, interval: float) -> None:
    server = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", 0, backlog=4096)
    sys.stdout.write(f"{server.sockets[0].getsockname()[1]}\n")
    sys.stdout.flush()
    while len(Bare.opened) < streams:
        await asyncio.sleep(0.01)
    chunk = b"c0\r\ndata: " + b"x" * 184 + b"\n\n\r\n"
    cpu = []
    for _ in range(steps):
        await asyncio.sleep(interval)
        before = time.process_time()
        for transport in Bare.opened:
            transport.write(chunk)
        await asyncio.sleep(0)  # uvloop writes when the loop turns
        cpu.append(time.process_time() - before)
    for transport in Bare.opened:
        transport.close()
    await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)  # closing takes turns
    sys.stdout.write(json.dumps({"cpu": cpu}) + "\n")


if __name__ == "__main__":
    serve = bare if sys.argv[4:] == ["bare"] else main
    uvloop.run(serve(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])))
