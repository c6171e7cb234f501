"""The flags of `detour bench serve`, spelt as sglang.bench_serving and `vllm bench serve` do."""

import argparse

from detour.bench.endpoints import BACKENDS


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="detour bench serve",
        description="Drive a running server and print the figures. A list (1,8,32) is run in turn.",
        allow_abbrev=False,
    )
    _server(parser.add_argument_group("the server"))
    _load(parser.add_argument_group("the load"))
    _data(parser.add_argument_group("what is asked"))
    _results(parser.add_argument_group("the results"))
    return parser


def _server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--backend", choices=sorted(BACKENDS), default="openai", help="request form")
    group.add_argument("--base-url", default="", help="http://host:port; instead of --host, --port")
    group.add_argument("--host", default="127.0.0.1")
    group.add_argument("--port", type=int, default=30000)
    group.add_argument(
        "--endpoint", default="", help="path, where it is not the backend's usual one"
    )
    group.add_argument("--model", default="", help="name to send (default: what /v1/models says)")
    group.add_argument("--served-model-name", default="", help="goes before --model")
    group.add_argument("--api-key", default="")
    group.add_argument("--header", nargs="*", default=[], metavar="NAME=VALUE")
    group.add_argument(
        "--ready-check-timeout-sec", type=float, default=5.0, help="wait so long for /health"
    )


def _load(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--max-concurrency",
        type=_counts,
        default=[0],
        metavar="N,N,...",
        help="closed loop (0 = none)",
    )
    group.add_argument(
        "--request-rate", type=_rates, default=[float("inf")], metavar="R,R,...", help="open loop"
    )
    group.add_argument("--burstiness", type=_positive, default=1.0, help="1 = Poisson arrivals")
    group.add_argument(
        "--num-prompts",
        type=_count,
        default=0,
        help="requests a level (default: 4 x concurrency, at least 16; 1000 without a limit)",
    )
    group.add_argument("--warmup-requests", "--num-warmups", type=_count, default=1)
    group.add_argument("--flush-cache", action="store_true", help="before each level")
    group.add_argument("--disable-stream", action="store_true")
    group.add_argument("--disable-ignore-eos", action="store_true")
    group.add_argument("--temperature", type=float, default=0.0)
    group.add_argument("--request-seed", type=int, default=-1, help="sampling seed to send")
    group.add_argument("--extra-request-body", default="", metavar="JSON")
    group.add_argument("--seed", type=int, default=42, help="of the prompts and arrivals")


def _data(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--dataset-name",
        choices=["random", "random-ids", "generated-shared-prefix", "sharegpt", "custom"],
        default="random",
    )
    group.add_argument("--dataset-path", default="", help="the file of sharegpt or custom")
    group.add_argument(
        "--tokenizer", default="", help="folder or .gguf; only to make or measure text"
    )
    group.add_argument("--vocab-size", type=_count, default=0, help="default: what the server says")
    group.add_argument(
        "--random-prompt-form",
        choices=["auto", "ids", "text"],
        default="auto",
        help="auto = ids where the endpoint takes them",
    )
    group.add_argument("--random-input-len", "--input-len", type=_count1, default=1024)
    group.add_argument("--random-output-len", "--output-len", type=_count1, default=128)
    group.add_argument(
        "--random-range-ratio",
        type=_ratio,
        default=1.0,
        help="lengths are uniform in [ratio x length, length]",
    )
    group.add_argument("--sharegpt-output-len", type=_count, default=0, help="0 = as in the file")
    group.add_argument("--gsp-num-groups", type=_count1, default=64)
    group.add_argument("--gsp-prompts-per-group", type=_count1, default=16)
    group.add_argument("--gsp-system-prompt-len", type=_count1, default=2048)
    group.add_argument("--gsp-question-len", type=_count1, default=128)
    group.add_argument("--gsp-output-len", type=_count1, default=256)


def _results(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--output-file", default="", help="append one JSON line a level")
    group.add_argument("--output-details", action="store_true", help="with every request's times")
    group.add_argument("--plot", default="", metavar="FILE.png")
    group.add_argument("--goodput", nargs="*", default=[], metavar="ttft:MS")
    group.add_argument("--tag", default="", help="goes into the JSON")
    group.add_argument(
        "--disable-tqdm", "--disable-progress", action="store_true", help="no progress bar"
    )


def _count(text: str) -> int:
    return _whole(text, 0)


def _count1(text: str) -> int:
    return _whole(text, 1)


def _whole(text: str, least: int) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return value


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def _ratio(text: str) -> float:
    value = _positive(text) if text not in ("0", "0.0") else 0.0
    if value > 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0 and 1")
    return value


def _counts(text: str) -> list[int]:
    return [_whole(part, 0) for part in text.split(",")]


def _rates(text: str) -> list[float]:
    return [_positive(part) for part in text.split(",")]
