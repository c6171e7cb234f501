"""`detour chat`: a conversation in the terminal, with a server or with a model in this process."""

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import httpx

from detour import logs
from detour.config.environment import read_environment
from detour.config.parse import make_parser, parse
from detour.errors import DetourError, Unavailable
from detour.sampling_params import SamplingParams

HELP = "/reset forgets the conversation, /system TEXT sets how the model behaves, /exit ends."
CONNECT_SECONDS = 10.0

Messages = list[dict[str, str]]
Answer = Callable[[Messages], Iterator[str]]  # the reply's pieces


def main(argv: Sequence[str]) -> int:
    parser = make_parser("detour chat", f"Talk to a model. {HELP}")
    group = parser.add_argument_group("conversation")
    group.add_argument("--url", default="", help="a running server; none: load the model here")
    group.add_argument("--system", default="", metavar="TEXT", help="how the model should behave")
    group.add_argument("--max-tokens", type=int, default=512, metavar="N", help="of an answer")
    group.add_argument("--temperature", type=float, default=0.0, metavar="N", help="0 = greedy")
    parsed = parse(argv, parser)
    wanted, config = parsed.rest, parsed.config
    logs.set_up("warning", "chat")
    if wanted.url:
        key = config.api_key or read_environment().api_key
        return Conversation(_remote(wanted, key), wanted.system).run()
    # Imported here: it loads torch, which a chat with a server does not need.
    from detour.llm import LLM  # noqa: PLC0415

    params = SamplingParams(max_tokens=wanted.max_tokens, temperature=wanted.temperature)
    with LLM(**vars(config)) as llm:
        return Conversation(lambda messages: llm.stream_chat(messages, params), wanted.system).run()


class Conversation:
    """Reads lines, shows answers, keeps the history. `answer` gives the reply to a history."""

    def __init__(self, answer: Answer, system: str) -> None:
        self.answer = answer
        self.system = system
        self.messages: Messages = []

    def run(self) -> int:
        print(HELP, file=sys.stderr)
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except (EOFError, KeyboardInterrupt):
                print()
                return 0
            if line in ("/exit", "/quit"):
                return 0
            if line:
                self.take(line)

    def take(self, line: str) -> None:
        """A command or something to say."""
        command, _, rest = line.partition(" ")
        if command == "/reset":
            self.messages = []
        elif command == "/system":
            self.system, self.messages = rest.strip(), []
        elif command.startswith("/"):
            print(f"There is no command {command}. {HELP}", file=sys.stderr)
        else:
            self.say(line)

    def say(self, text: str) -> None:
        """Ctrl-C ends the answer and keeps what came; an error takes the question back."""
        self.messages.append({"role": "user", "content": text})
        system = [{"role": "system", "content": self.system}] if self.system else []
        pieces: list[str] = []
        try:
            for piece in self.answer(system + self.messages):
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            pass
        except DetourError as error:
            print(error.message, file=sys.stderr)
            self.messages.pop()
            return
        print()
        self.messages.append({"role": "assistant", "content": "".join(pieces)})


def _remote(wanted: argparse.Namespace, key: str) -> Answer:
    url = wanted.url.rstrip("/").removesuffix("/v1") + "/v1/chat/completions"
    headers = {"Authorization": f"Bearer {key}"} if key else {}

    def answer(messages: Messages) -> Iterator[str]:
        body = {
            "messages": messages,
            "stream": True,
            "max_tokens": wanted.max_tokens,
            "temperature": wanted.temperature,
        }
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        try:
            with httpx.stream("POST", url, json=body, headers=headers, timeout=timeout) as response:
                if response.status_code != 200:
                    raise Unavailable(_refusal(response))
                yield from _pieces(response.iter_lines())
        except httpx.HTTPError as error:
            raise Unavailable(f"{wanted.url} does not answer: {error}.") from error

    return answer


def _pieces(lines: Iterator[str]) -> Iterator[str]:
    """The text of an OpenAI event stream. Raises Unavailable where it says an error."""
    for line in lines:
        data = line.removeprefix("data: ")
        if data == line or data == "[DONE]":
            continue
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            raise Unavailable(str(event["error"]["message"]))
        for choice in event["choices"]:
            yield choice["delta"].get("content") or ""


def _refusal(response: httpx.Response) -> str:
    response.read()
    try:
        return str(response.json()["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return f"{response.url} answered {response.status_code}."
