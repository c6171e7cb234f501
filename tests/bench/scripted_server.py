"""A server in this process that says what it is told, byte for byte, over real sockets."""

import asyncio
import json
from collections.abc import Awaitable, Callable

Writer = Callable[[bytes], Awaitable[None]]
Script = Callable[["Asked", Writer], Awaitable[None]]


class Asked:
    def __init__(self, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.method, self.path, self.headers, self.body = method, path, headers, body

    @property
    def json(self) -> dict:
        return json.loads(self.body)


class ScriptedServer:
    """`async with` it; `script(asked, write)` writes a whole reply."""

    def __init__(self, script: Script, *, close_after_reply: bool = False) -> None:
        self.script = script
        self.asked: list[Asked] = []
        self.open_now = 0
        self.most_open = 0
        self.connections = 0
        self._close_after_reply = close_after_reply
        self._tasks: set[asyncio.Task] = set()

    async def __aenter__(self) -> "ScriptedServer":
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        return self

    async def __aexit__(self, *_) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        self._tasks.add(task)
        self.connections += 1

        async def write(data: bytes) -> None:
            writer.write(data)
            await writer.drain()

        try:
            while asked := await _read(reader):
                if asked.method == "POST":
                    self.asked.append(asked)
                    self.open_now += 1
                    self.most_open = max(self.most_open, self.open_now)
                try:
                    await self.script(asked, write)
                finally:
                    self.open_now -= asked.method == "POST"
                if self._close_after_reply:
                    break
        except (ConnectionError, asyncio.CancelledError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()


async def _read(reader: asyncio.StreamReader) -> Asked | None:
    try:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")
    except asyncio.IncompleteReadError:
        return None
    method, path, _ = head[0].split(" ")
    headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in head[1:] if line)}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Asked(method, path, headers, body)


def whole(status: int, body: object) -> bytes:
    text = json.dumps(body).encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Length: {len(text)}\r\n\r\n"
    return head.encode() + text


STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(body: object) -> bytes:
    return b"data: " + (body if isinstance(body, bytes) else json.dumps(body).encode()) + b"\n\n"


END = chunk(event(b"[DONE]")) + chunk(b"")


async def answer(asked: Asked, write: Writer) -> None:
    """A well-behaved server: health, one model, and as many words as were asked for."""
    if asked.method == "GET":
        replies = {
            "/health": (200, {}),
            "/v1/models": (200, {"data": [{"id": "scripted", "meta": {"n_vocab": 1000}}]}),
        }
        await write(whole(*replies.get(asked.path, (404, {"error": {"message": "no such route"}}))))
        return
    if asked.path == "/flush_cache":
        await write(whole(200, {}))
        return
    body = asked.json
    wanted = body.get("max_tokens") or body["sampling_params"]["max_new_tokens"]
    prompt = body.get("prompt") or body.get("input_ids") or body.get("text") or body["messages"]
    said = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
    if not body["stream"]:
        usage = {"prompt_tokens": said, "completion_tokens": wanted}
        text = "x " * wanted
        openai = {"choices": [{"text": text, "message": {"content": text}}], "usage": usage}
        native = {"text": text, "meta_info": usage}
        await write(whole(200, native if asked.path == "/generate" else openai))
        return
    await write(STREAM_HEAD)
    for i in range(wanted):
        await asyncio.sleep(0)
        await write(chunk(event(_piece(asked.path, i, said))))
    if asked.path != "/generate":
        usage = {
            "prompt_tokens": said,
            "completion_tokens": wanted,
            "prompt_tokens_details": {"cached_tokens": 1},
        }
        await write(chunk(event({"choices": [], "usage": usage})))
    await write(END)


def _piece(path: str, i: int, said: int) -> dict:
    if path == "/generate":
        meta = {"prompt_tokens": said, "completion_tokens": i + 1, "cached_tokens": 1}
        return {"text": "x" * (i + 1), "meta_info": meta}
    if path == "/v1/chat/completions":
        return {"choices": [{"delta": {"role": "assistant", "content": "x"}}]}
    return {"choices": [{"text": "x"}]}
