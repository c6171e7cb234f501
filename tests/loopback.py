"""A real uvicorn on loopback with the scripted engine behind it: one server per test module."""

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import uvicorn
from fake_engine import ByteTokenizer, FakeEngine

from detour.api.app import build_app
from detour.api.settings import ApiSettings
from detour.text.chat_template import ChatTemplate

MODEL = "small"


@dataclass
class Server:
    engine: FakeEngine
    url: str
    http: httpx.Client
    openai: openai.OpenAI
    loop: asyncio.AbstractEventLoop

    def on_loop(self, work: Callable[[], Any]) -> Any:
        """Run a plain call on the server's event loop, where the engine lives."""
        result: Future[Any] = Future()

        def run() -> None:
            try:
                result.set_result(work())
            except BaseException as error:
                result.set_exception(error)

        self.loop.call_soon_threadsafe(run)
        return result.result(10)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait, a turn of the server's loop at a time, for something that must come true."""

        async def wait() -> None:
            while not condition():
                await asyncio.sleep(0.001)

        asyncio.run_coroutine_threadsafe(asyncio.wait_for(wait(), 10), self.loop).result(15)


def serve(engine: FakeEngine, template: str = "", **settings: Any) -> Iterator[Server]:
    tokenizer = ByteTokenizer()
    compiled = ChatTemplate(template or tokenizer.chat_template, "<bos>", "<eos>")
    given = {"model_path": "/models/small", "served_model_names": (MODEL,)} | settings
    app = build_app(engine, tokenizer, compiled, ApiSettings(**given))
    config = uvicorn.Config(
        app, port=0, log_level="warning", access_log=False, timeout_keep_alive=60
    )
    server = uvicorn.Server(config)
    started: Future[tuple[int, asyncio.AbstractEventLoop]] = Future()

    async def main() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started:
            await asyncio.sleep(0.001)
        port = server.servers[0].sockets[0].getsockname()[1]
        started.set_result((port, asyncio.get_running_loop()))
        await task

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    port, loop = started.result(20)
    url = f"http://127.0.0.1:{port}"
    key = settings.get("api_key") or "none"
    http = httpx.Client(base_url=url, timeout=20)
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    with http, client:
        yield Server(engine, url, http, client, loop)
    server.should_exit = True
    thread.join(20)
    assert not thread.is_alive()
