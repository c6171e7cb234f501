"""`detour bench serve`: drive a running server at several levels of load and print what it gave.

Knows flags, the server's own words about itself and the order of a run. The spellings are those of
sglang.bench_serving and `vllm bench serve`. Exit status: 0, 1 when no request succeeded, 2 when the
flags or the server's address do not fit.
"""

import argparse
import asyncio
import itertools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from detour.bench.datasets import (
    Encode,
    Prompt,
    Vocabulary,
    custom_prompts,
    random_prompts,
    shared_prefix_prompts,
    sharegpt_prompts,
)
from detour.bench.endpoints import BACKENDS, Ask, Endpoint
from detour.bench.flags import make_parser
from detour.bench.http_client import BrokenReply, ConnectFailed, HttpClient, Target
from detour.bench.load import Load, Measured, Outcome, bodies, run_load, send
from detour.bench.plot import can_plot, plot
from detour.bench.report import Details, Summary, overview, record, summarise, table
from detour.errors import BadRequest, DetourError
from detour.text.tokenizer import open_tokenizer

try:
    import uvloop
except ImportError:
    uvloop = None  # type: ignore[assignment]

FALLBACK_VOCABULARY = 32_000


def main(argv: Sequence[str]) -> int:
    """Run with these arguments (without the program's name)."""
    args = make_parser().parse_args(list(argv))
    console = Console(stderr=True, highlight=False)
    try:
        if args.plot and not can_plot():
            raise BadRequest("--plot needs matplotlib: pip install 'detour[bench]'.")
        factory = uvloop.new_event_loop if uvloop is not None else None
        with asyncio.Runner(loop_factory=factory) as runner:
            return runner.run(_Run(args, console).whole())
    except DetourError as error:
        console.print(
            f"detour bench serve: {error.message}", style="red", markup=False, soft_wrap=True
        )
        return 2
    except KeyboardInterrupt:
        console.print("Interrupted.")
        return 130


class _Run:
    def __init__(self, args: argparse.Namespace, console: Console) -> None:
        self.args = args
        self.console = console
        self.target = Target(args.base_url or f"http://{args.host}:{args.port}")
        headers = dict(_header(line) for line in args.header)
        if args.api_key:
            headers["Authorization"] = f"Bearer {args.api_key}"
        self.client = HttpClient(self.target, headers)
        self.endpoint: Endpoint = BACKENDS[args.backend]
        self.stream = not args.disable_stream
        self.goodput = dict(_limit(text) for text in args.goodput)

    async def whole(self) -> int:
        try:
            await self._wait_until_ready()
            model = self.args.served_model_name or self.args.model or await self._model()
            ask = self._ask(model)
            prompts_of = await self._dataset()
            levels = list(itertools.product(self.args.request_rate, self.args.max_concurrency))
            results = []
            for rate, concurrency in levels:
                load = Load(rate, concurrency, self.args.burstiness, self.args.seed)
                results.append(await self._level(load, ask, prompts_of))
        finally:
            await self.client.close()
        summaries = [summary for summary, _ in results]
        if len(results) > 1:
            print(overview(summaries))
        self._plot(results)
        return 0 if any(summary.completed for summary in summaries) else 1

    # --- the server

    async def _wait_until_ready(self) -> None:
        """/health answers 200; servers without that route are ready when they answer at all."""
        deadline = time.monotonic() + self.args.ready_check_timeout_sec
        while True:
            try:
                status, _ = await self.client.fetch("GET", "/health")
                if status in (200, 404, 405):
                    return
                reason = f"the server's /health answers with status {status}"
            except ConnectFailed as error:
                reason = str(error)
            except BrokenReply as error:
                raise BadRequest(f"{self.target.url}: {error}.") from None
            if time.monotonic() >= deadline:
                what = reason[0].upper() + reason[1:]
                raise BadRequest(f"{what}; is it running, and ready, at {self.target.url}?")
            await asyncio.sleep(0.25)

    async def _get(self, path: str) -> dict[str, object]:
        """A JSON object the server tells; {} where it does not."""
        try:
            status, body = await self.client.fetch("GET", path)
            found = msgspec.json.decode(body) if status == 200 else {}
        except (ConnectFailed, BrokenReply, msgspec.DecodeError):
            return {}
        return found if isinstance(found, dict) else {}

    async def _model(self) -> str:
        models = (await self._get("/v1/models")).get("data")
        if isinstance(models, list) and models and isinstance(models[0], dict):
            return str(models[0].get("id", "default"))
        return "default"

    async def _vocabulary_size(self) -> int:
        for path in ("/model_info", "/get_model_info", "/server_info", "/v1/models"):
            size = _find_number(await self._get(path), ("vocab_size", "n_vocab"))
            if size:
                return size
        self.console.print(
            f"The server does not tell its vocabulary size; token ids are drawn below "
            f"{FALLBACK_VOCABULARY} (--vocab-size sets it)."
        )
        return FALLBACK_VOCABULARY

    # --- what is asked

    def _ask(self, model: str) -> Ask:
        extra: dict[str, object] = {}
        if self.args.extra_request_body:
            try:
                extra = msgspec.json.decode(self.args.extra_request_body, type=dict[str, object])
            except msgspec.DecodeError as error:
                raise BadRequest(f"--extra-request-body is not a JSON object: {error}.") from None
        return Ask(
            model,
            self.stream,
            not self.args.disable_ignore_eos,
            self.args.temperature,
            self.args.request_seed,
            extra,
        )

    async def _dataset(self) -> "_Dataset":
        args = self.args
        tokenizer = open_tokenizer(Path(args.tokenizer)) if args.tokenizer else None
        form = args.random_prompt_form
        if form == "auto":
            form = "ids" if self.endpoint.takes_ids else "text"
        as_ids = args.dataset_name == "random-ids" or (form == "ids" and self.endpoint.takes_ids)
        if not as_ids and tokenizer is None:
            size = FALLBACK_VOCABULARY  # words stand for tokens
        elif args.vocab_size:
            size = args.vocab_size
        else:
            size = tokenizer.vocab_size if tokenizer else await self._vocabulary_size()
        vocabulary = Vocabulary(size, as_ids, tokenizer.decode if tokenizer else None)
        return _Dataset(args, vocabulary, tokenizer.encode if tokenizer else None)

    # --- one level

    async def _level(self, load: Load, ask: Ask, dataset: "_Dataset") -> tuple[Summary, Details]:
        args = self.args
        count = dataset.count(load)
        # Every level asks anew, or the later ones would find their prompts in the server's cache.
        prompts = dataset.prompts(count + args.warmup_requests, load)
        messages = bodies(self.client, self.endpoint, args.endpoint, ask, prompts)
        for message in messages[count:]:
            outcome = await send(self.client, message, self.stream)
            if outcome.error:
                self.console.print(
                    f"Warm-up failed: {outcome.error}", style="yellow", markup=False, soft_wrap=True
                )
                break
        if args.flush_cache:
            await self.client.fetch("POST", "/flush_cache")
        measured = await self._under_load(messages[:count], load)
        summary, details = summarise(measured, load, self.goodput, self.stream)
        print(table(summary, args.backend, self.goodput), flush=True)
        self._write(summary, details, ask.model)
        return summary, details

    async def _under_load(self, messages: list[bytes], load: Load) -> Measured:
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        began, tokens = time.perf_counter(), 0
        # Drawn twice a second and never by a thread of its own: the client must stay light.
        with Progress(
            *columns, console=self.console, auto_refresh=False, disable=self.args.disable_tqdm
        ) as progress:
            task = progress.add_task(_describe(load), total=len(messages), rate="")
            drawn = began

            def on_done(outcome: Outcome) -> None:
                nonlocal tokens, drawn
                tokens += max(outcome.output_tokens, 0)
                progress.advance(task)
                now = time.perf_counter()
                if now - drawn > 0.5:
                    drawn = now
                    progress.update(task, rate=f"{tokens / (now - began):.0f} tok/s")
                    progress.refresh()

            measured = await run_load(self.client, messages, self.stream, load, on_done)
            progress.refresh()
        return measured

    # --- what is written

    def _write(self, summary: Summary, details: Details, model: str) -> None:
        args = self.args
        if not args.output_file:
            return
        about: dict[str, object] = {
            "tag": args.tag,
            "backend": args.backend,
            "base_url": self.target.url,
            "model": model,
            "dataset_name": args.dataset_name,
            "random_input_len": args.random_input_len,
            "random_output_len": args.random_output_len,
            "random_range_ratio": args.random_range_ratio,
        }
        line = record(summary, details if args.output_details else None, about)
        try:
            with Path(args.output_file).open("ab") as file:
                file.write(line + b"\n")
        except OSError as error:
            raise BadRequest(f"--output-file cannot be written: {error}.") from None

    def _plot(self, results: list[tuple[Summary, Details]]) -> None:
        if not self.args.plot:
            return
        try:
            plot([s for s, _ in results], [d for _, d in results], Path(self.args.plot))
        except (OSError, ValueError) as error:
            raise BadRequest(f"--plot cannot be written: {error}.") from None
        self.console.print(f"Plot: {self.args.plot}", markup=False)


class _Dataset:
    """The prompts of a level, by the flags."""

    def __init__(
        self, args: argparse.Namespace, vocabulary: Vocabulary, encode: Encode | None
    ) -> None:
        self._args = args
        self._vocabulary = vocabulary
        self._encode = encode
        self._rng = np.random.default_rng(args.seed)

    def count(self, load: Load) -> int:
        args = self._args
        if args.num_prompts:
            return int(args.num_prompts)
        if args.dataset_name == "generated-shared-prefix":
            return int(args.gsp_num_groups * args.gsp_prompts_per_group)
        return max(16, 4 * load.concurrency) if load.concurrency else 1000

    def prompts(self, count: int, load: Load) -> list[Prompt]:
        args = self._args
        if args.dataset_name in ("random", "random-ids"):
            return random_prompts(
                self._vocabulary,
                self._rng,
                count,
                args.random_input_len,
                args.random_output_len,
                args.random_range_ratio,
            )
        if args.dataset_name == "generated-shared-prefix":
            made = shared_prefix_prompts(
                self._vocabulary,
                self._rng,
                groups=args.gsp_num_groups,
                prompts_per_group=args.gsp_prompts_per_group,
                system_tokens=args.gsp_system_prompt_len,
                question_tokens=args.gsp_question_len,
                output_tokens=args.gsp_output_len,
            )
            return [made[i % len(made)] for i in range(count)]
        if not args.dataset_path:
            raise BadRequest(f"--dataset-name {args.dataset_name} needs --dataset-path.")
        path = Path(args.dataset_path)
        if args.dataset_name == "sharegpt":
            return sharegpt_prompts(path, self._rng, count, args.sharegpt_output_len, self._encode)
        return custom_prompts(path, count, args.sharegpt_output_len, self._encode)


def _describe(load: Load) -> str:
    if load.rate == float("inf"):
        return f"{load.concurrency} streams" if load.concurrency else "all at once"
    return f"{load.rate:g} requests/s"


def _header(line: str) -> tuple[str, str]:
    name, separator, value = line.partition("=") if "=" in line else line.partition(":")
    if not separator:
        raise BadRequest(f"--header {line!r} should read Name=value.")
    return name.strip(), value.strip()


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    try:
        limit = float(value)
    except ValueError:
        limit = -1.0
    if name not in ("ttft", "tpot", "e2e") or limit < 0:
        raise BadRequest(f"--goodput {text!r} should read ttft:MS, tpot:MS or e2e:MS.")
    return name, limit


def _find_number(found: object, names: tuple[str, ...]) -> int:
    """The first positive whole number under one of `names`, however deep; 0 if there is none."""
    children: list[object] = []
    if isinstance(found, dict):
        for name in names:
            if isinstance(found.get(name), int) and found[name] > 0:
                return int(found[name])
        children = list(found.values())
    elif isinstance(found, list):
        children = found
    return next((n for n in (_find_number(child, names) for child in children) if n), 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
