"""`detour generate`: continue prompts without a server. Reads and writes texts or JSON lines."""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from detour import logs
from detour.config.parse import make_parser, parse
from detour.errors import ConfigError
from detour.llm import LLM, Output
from detour.sampling_params import SamplingParams

DEFAULT_MAX_TOKENS = 128
_SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "seed")


def main(argv: Sequence[str]) -> int:
    parsed = parse(argv, _parser())
    wanted, config = parsed.rest, parsed.config
    logs.set_up("warning", "generate")
    for notice in parsed.notices:
        print(notice, file=sys.stderr)
    prompts = _prompts(wanted)
    if not prompts:
        raise ConfigError("There is nothing to continue: give --prompt or --input.")
    params = _params(wanted)
    with LLM(**vars(config)) as llm, _open_output(wanted.output) as out:
        outputs, seconds = _run(llm, prompts, params, chat=wanted.chat)
        for prompt, output in zip(prompts, outputs, strict=True):
            _write(out, prompt, output, plain=wanted.plain)
    tokens = sum(len(output.token_ids) for output in outputs)
    print(
        f"{len(outputs)} prompts, {sum(o.prompt_tokens for o in outputs):,} tokens in, "
        f"{tokens:,} out, {seconds:.1f} s, {tokens / max(seconds, 1e-9):,.0f} tokens/s",
        file=sys.stderr,
    )
    return 1 if any(output.error for output in outputs) else 0


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("detour generate", "Continue prompts without a server.")
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="may repeat")
    group.add_argument(
        "--input",
        default="",
        metavar="FILE",
        help="a prompt a line, or JSON lines with a prompt each",
    )
    group.add_argument(
        "--output", default="-", metavar="FILE", help="JSON lines; - is the terminal"
    )
    group.add_argument("--plain", action="store_true", help="write the texts alone")
    group.add_argument("--chat", action="store_true", help="a prompt is a person's message")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=int, default=DEFAULT_MAX_TOKENS, metavar="N", help=""
    )
    sampling.add_argument("--temperature", type=float, default=0.0, metavar="N", help="0 = greedy")
    sampling.add_argument("--top-p", type=float, default=1.0, metavar="N", help="")
    sampling.add_argument("--top-k", type=int, default=0, metavar="N", help="0 = all")
    sampling.add_argument("--sampling-seed", dest="seed", type=int, default=0, metavar="N", help="")
    sampling.add_argument("--stop", action="append", default=[], metavar="TEXT", help="may repeat")
    return parser


def _params(wanted: argparse.Namespace) -> SamplingParams:
    values = {name: vars(wanted)[name] for name in _SAMPLING}
    return SamplingParams(**values, stop=tuple(wanted.stop))


def _prompts(wanted: argparse.Namespace) -> list[str]:
    prompts: list[str] = list(wanted.prompt)
    if not wanted.input:
        return prompts
    try:
        text = sys.stdin.read() if wanted.input == "-" else Path(wanted.input).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--input {wanted.input} cannot be read: {error}.") from error
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            prompts.append(_prompt_of(line, f"{wanted.input}, line {number}"))
    return prompts


def _prompt_of(line: str, place: str) -> str:
    if not line.lstrip().startswith("{"):
        return line
    try:
        value: Mapping[str, Any] = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{place} is not JSON: {error}.") from error
    for name in ("prompt", "text"):
        if isinstance(value.get(name), str):
            return str(value[name])
    raise ConfigError(f"{place} has no prompt.")


def _open_output(path: str) -> TextIO:
    if path == "-":
        return open(sys.stdout.fileno(), "w", encoding="utf-8", closefd=False)
    try:
        return open(path, "w", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {path} cannot be written: {error.strerror}.") from error


def _run(
    llm: LLM, prompts: list[str], params: SamplingParams, *, chat: bool
) -> tuple[list[Output], float]:
    bar = Progress(
        TextColumn("Generating"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]} tokens/s"),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not sys.stderr.isatty(),
    )
    start, tokens = time.perf_counter(), 0

    def advance(output: Output) -> None:
        nonlocal tokens
        tokens += len(output.token_ids)
        speed = tokens / (time.perf_counter() - start)
        bar.update(task, advance=1, speed=f"{speed:,.0f}")

    with bar:
        task = bar.add_task("", total=len(prompts), speed="0")
        if chat:
            outputs = llm.chat_all(
                [[{"role": "user", "content": prompt}] for prompt in prompts], params, advance
            )
        else:
            outputs = llm.generate(prompts, params, advance)
    return outputs, time.perf_counter() - start


def _write(out: TextIO, prompt: str, output: Output, *, plain: bool) -> None:
    if output.error:
        print(f"{prompt[:40]!r}: {output.error}", file=sys.stderr)
    if plain:
        out.write(output.text + "\n")
        return
    line = {
        "prompt": prompt,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "prompt_tokens": output.prompt_tokens,
        "completion_tokens": len(output.token_ids),
        "cached_tokens": output.cached_tokens,
        "error": output.error,
    }
    out.write(msgspec.json.encode(line).decode() + "\n")
