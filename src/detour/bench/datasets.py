"""What is asked for: prompts of random length, with shared prefixes, or from a file.

Knows prompts and how long their answers should be; knows nothing of servers. Everything is drawn
from one seeded generator, so that two runs with the same flags ask for the same things.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from detour.errors import BadRequest

Encode = Callable[[str], Sequence[int]]
Decode = Callable[[Sequence[int]], str]


class Prompt(NamedTuple):
    """`ids` or `text` is empty, not both: what is not empty is sent."""

    text: str
    ids: list[int]
    output_tokens: int


@dataclass(frozen=True)
class Vocabulary:
    """How prompts of a wished length are made.

    With ids, a prompt is drawn from the middle of the vocabulary, where no tokenizer keeps its
    special tokens. As text it is what those ids decode to where a tokenizer is given; else it is
    made of short words that most vocabularies hold as one token each.
    """

    size: int
    as_ids: bool
    decode: Decode | None = None

    def draw(self, rng: np.random.Generator, length: int) -> list[int]:
        """Ids [length]; of words where there is neither a tokenizer nor the wish for ids."""
        if self.as_ids or self.decode is not None:
            low, high = self.size // 10, self.size * 9 // 10
        else:
            low, high = 0, len(WORDS)
        return [int(i) for i in rng.integers(low, high, length)]

    def prompt(self, ids: list[int], output_tokens: int) -> Prompt:
        if self.as_ids:
            return Prompt("", ids, output_tokens)
        if self.decode is not None:
            return Prompt(self.decode(ids), [], output_tokens)
        return Prompt(" ".join(WORDS[i] for i in ids), [], output_tokens)


def random_prompts(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    count: int,
    input_tokens: int,
    output_tokens: int,
    range_ratio: float,
) -> list[Prompt]:
    """Lengths are uniform in [range_ratio * length, length], at least 1."""
    inputs = _lengths(rng, count, input_tokens, range_ratio)
    outputs = _lengths(rng, count, output_tokens, range_ratio)
    return [
        vocabulary.prompt(vocabulary.draw(rng, i), o) for i, o in zip(inputs, outputs, strict=True)
    ]


def _lengths(rng: np.random.Generator, count: int, length: int, ratio: float) -> list[int]:
    low = max(1, int(length * ratio))
    return [int(n) for n in rng.integers(low, max(low, length) + 1, count)]


def shared_prefix_prompts(
    vocabulary: Vocabulary,
    rng: np.random.Generator,
    *,
    groups: int,
    prompts_per_group: int,
    system_tokens: int,
    question_tokens: int,
    output_tokens: int,
) -> list[Prompt]:
    """`groups` prefixes, each before `prompts_per_group` questions, in shuffled order."""
    prefixes = [vocabulary.draw(rng, system_tokens) for _ in range(groups)]
    prompts = [
        vocabulary.prompt(prefix + vocabulary.draw(rng, question_tokens), output_tokens)
        for prefix in prefixes
        for _ in range(prompts_per_group)
    ]
    return [prompts[i] for i in rng.permutation(len(prompts))]


def sharegpt_prompts(
    path: Path, rng: np.random.Generator, count: int, output_tokens: int, encode: Encode | None
) -> list[Prompt]:
    """First turns of a ShareGPT file (a JSON list of {"conversations": [{"from", "value"}, ...]}).

    The answer's length is that of the file's second turn, unless `output_tokens` > 0. Without a
    tokenizer a token is taken to be four characters. Raises BadRequest where the file does not fit.
    """
    measure = _measure(encode)
    found = []
    for entry in _read_json(path):
        turns = _turns(entry)
        if len(turns) < 2:
            continue
        question, answer = (str(turn.get("value", turn.get("content", ""))) for turn in turns[:2])
        if question and (answer or output_tokens):
            found.append((question, answer))
    if not found:
        raise BadRequest(f"{path} holds no conversation of two turns; is it a ShareGPT file?")
    order = rng.permutation(len(found))
    chosen = [found[order[i % len(found)]] for i in range(count)]
    return [Prompt(question, [], output_tokens or measure(answer)) for question, answer in chosen]


def _turns(entry: Any) -> list[dict[str, Any]]:
    found = entry.get("conversations") if isinstance(entry, dict) else None
    return [turn for turn in found if isinstance(turn, dict)] if isinstance(found, list) else []


def custom_prompts(
    path: Path, count: int, output_tokens: int, encode: Encode | None
) -> list[Prompt]:
    """Lines of JSON: {"prompt": text, "output_tokens" or "completion": optional}, in file order."""
    measure = _measure(encode)
    prompts = []
    for number, line in enumerate(_read_text(path).splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text = entry["prompt"]
        except (ValueError, KeyError, TypeError):
            raise BadRequest(f'{path}, line {number}: not a JSON object with a "prompt".') from None
        length = entry.get("output_tokens") or measure(entry.get("completion", "")) or 256
        prompts.append(Prompt(text, [], output_tokens or length))
    if not prompts:
        raise BadRequest(f"{path} holds no prompt.")
    return [prompts[i % len(prompts)] for i in range(count)]


def _measure(encode: Encode | None) -> Callable[[str], int]:
    if encode is None:
        return lambda text: (len(text) + 3) // 4
    return lambda text: len(encode(text))


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"The data set {path} cannot be read: {error}.") from None


def _read_json(path: Path) -> list[Any]:
    try:
        entries = json.loads(_read_text(path))
    except ValueError as error:
        raise BadRequest(f"The data set {path} is not JSON: {error}.") from None
    if not isinstance(entries, list):
        raise BadRequest(f"The data set {path} should be a JSON list.")
    return entries


WORDS = """
the of and to in is you that it he was for on are as with his they at be this have from or one
had by but not what all were we when your can said there use an each which she do how their if
will up other about out many then them these so some her would make like him into time has look
two more write go see number no way could people my than first water been call who its now find
long down day did get come made may part over new sound take only little work know place year
live me back give most very after thing our just name good sentence man think say great where
help through much before line right too mean old any same tell boy follow came want show also
around form three small set put end does another well large must big even such because turn here
why ask went men read need land different home us move try kind hand picture again change
""".split()  # noqa: SIM905
