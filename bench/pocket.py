"""What quantising and sparse attention cost in task accuracy, on the pocket GLM-5.

    python bench/pocket.py [--model pocket-glm5] [--count 100] [--quick]

Runs the pocket model's tasks through the real engine for every combination of weights (bfloat16,
NVFP4 experts, FP8), KV cache (bfloat16, fp8_e4m3) and attention (sparse, dense), and prints the
share of answers that are right to the last character. Exit status 1 where a bar is missed: recall
and calls of tools at 95 % or more (bfloat16, sparse), NVFP4 with an fp8 cache within 2 points.
"""

import argparse
import contextlib
import io
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "pocket"))
from markup import STOPS, render, template
from tasks import TASKS, Task

from detour.cli.quantize import main as quantize
from detour.config.environment import read_environment
from detour.config.options import Config
from detour.launch import model_path
from detour.llm import LLM
from detour.loading.model_config import read_model_config
from detour.sampling_params import SamplingParams
from detour.text.tokenizer import open_tokenizer

SEED = 1 << 41  # training draws from seeds far below
WEIGHTS = {"bfloat16": (), "nvfp4": ("--format", "nvfp4"), "fp8": ("--format", "fp8")}
CACHES = ("bfloat16", "fp8_e4m3")
ROOMS = {"copying": 0.9, "recall": 0.9, "sums": 0.1, "calls": 0.9}  # shares of the context
BAR, LOSS = 95.0, 2.0
HELD = ("recall", "calls")


@dataclass(frozen=True)
class Question:
    """A prompt as text and ids, and the text that is to follow it."""

    kind: str
    prompt: list[int]
    answer: str


def questions(model: Path, count: int) -> list[Question]:
    """`count` of each kind, most of them longer than what a token attends to."""
    tokenizer = open_tokenizer(model)
    context = read_model_config(model)["max_position_embeddings"]
    source, found = random.Random(SEED), []
    for kind, make in TASKS.items():
        own: list[Question] = []
        while len(own) < count:
            task = make(source, int(ROOMS[kind] * context))
            prompt, answer = split(task)
            ids = tokenizer.encode(prompt, add_special_tokens=False)
            if len(ids) + len(tokenizer.encode(answer)) < context:
                own.append(Question(kind, ids, answer))
        found += own
    return found


def split(task: Task) -> tuple[str, str]:
    """The prompt for the last answer, and that answer with the thought before it."""
    before = template().render(task.messages[:-1], task.tools)
    whole = render(task)
    assert whole.startswith(before)
    answer = whole.removeprefix(before)
    return before, answer.removesuffix(next(mark for mark in STOPS if answer.endswith(mark)))


def accuracy(model: Path, asked: list[Question], options: dict[str, Any]) -> dict[str, float]:
    """By kind, the percentage of answers that are right behind the thought."""
    with LLM(str(model), **options) as llm:
        longest = max(len(one.prompt) for one in asked)
        params = SamplingParams(max_tokens=longest, temperature=0.0)
        outputs = llm.generate([one.prompt for one in asked], params)
    right: dict[str, list[bool]] = {}
    for one, output in zip(asked, outputs, strict=True):
        said, wanted = (text.rpartition("</think>")[2] for text in (output.text, one.answer))
        right.setdefault(one.kind, []).append(said == wanted)
    return {kind: 100 * sum(found) / len(found) for kind, found in right.items()}


def combinations(model: Path, quick: bool) -> Iterator[tuple[tuple[str, str, str], dict[str, Any]]]:
    """(weights, cache, attention) and the options they are."""
    dense = {"index_topk": read_model_config(model)["max_position_embeddings"]}
    for weights in WEIGHTS:
        for cache in CACHES:
            for attention, changes in (("sparse", {}), ("dense", dense)):
                name = (weights, cache, attention)
                if not quick or name in (BASE, QUANTISED):
                    yield name, {"kv_cache_dtype": cache, "model_overrides": changes}


BASE = ("bfloat16", "bfloat16", "sparse")
QUANTISED = ("nvfp4", "fp8_e4m3", "sparse")


def verdict(table: dict[tuple[str, str, str], dict[str, float]]) -> list[str]:
    """A sentence for each bar that is missed."""
    base, quantised, missed = table[BASE], table[QUANTISED], []
    for kind in HELD:
        if base[kind] < BAR:
            missed.append(f"{kind} is right in {base[kind]:.1f} %, not {BAR:.0f} %")
    for kind, share in base.items():
        if share - quantised[kind] > LOSS:
            missed.append(
                f"NVFP4 with an fp8 cache loses {share - quantised[kind]:.1f} points of {kind}"
            )
    return missed


def written(model: Path, weights: str, folder: Path) -> Path:
    """The checkpoint with such weights, the model's own or one made in `folder`."""
    if not WEIGHTS[weights]:
        return model
    if not (target := folder / weights).exists():
        with contextlib.redirect_stdout(io.StringIO()):
            quantize([str(model), str(target), *WEIGHTS[weights]])
    return target


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--model", default="pocket-glm5")
    parser.add_argument("--count", type=int, default=100, help="questions of each kind")
    parser.add_argument("--quick", action="store_true", help="only what the bars are about")
    dtype = "bfloat16" if torch.cuda.is_available() else "float32"
    parser.add_argument("--dtype", default=dtype, help="what is computed in")
    wanted = parser.parse_args()
    model = model_path(Config(model=wanted.model), read_environment())
    asked = questions(model, wanted.count)
    print(f"{model.name}: {wanted.count} questions of each kind, computed in {wanted.dtype}")
    print(f"{'weights':10} {'cache':10} {'attention':10}" + "".join(f"{k:>9}" for k in TASKS))
    table = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, options in combinations(model, wanted.quick):
            source = written(model, name[0], Path(folder))
            table[name] = accuracy(source, asked, {"dtype": wanted.dtype, **options})
            shares = "".join(f"{table[name][kind]:9.1f}" for kind in TASKS)
            print(f"{name[0]:10} {name[1]:10} {name[2]:10}{shares}", flush=True)
    missed = verdict(table)
    print("\n".join(f"MISSED: {one}" for one in missed) or "every bar is met")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
