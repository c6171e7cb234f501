"""Item 9 of the host path's benchmarks: text from tokens, and tokens from text."""

import re
import tempfile
import time
from pathlib import Path

from row import Row

from detour.api.answer import Answer
from detour.loading.tiny_tokenizer import write_tokenizer
from detour.text.detokenizer import Detokenizer
from detour.text.reply_parser import reply_syntax
from detour.text.tokenizer import Tokenizer, open_tokenizer

STREAMS = 1024
REPEATS = 200
# A third of it is characters that take several tokens each.
TEXT = "Plain words run on, then 🦙🎉👩‍👩‍👧 and 漢字かな交じり文 and naïve Ünïcödé; 12.5 % of it "
STOP = ("###", "User:", "\n\n", "<|im_end|>")
EMBEDDED = Path(__file__).parents[1] / ".cache/smollm2-135m-instruct"


def vocabulary() -> tuple[Tokenizer, str]:
    """The embedded model's tokenizer where it was fetched, else a tiny one of our own."""
    for file in EMBEDDED.glob("*.gguf"):
        return open_tokenizer(file), "49k vocabulary"
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        return open_tokenizer(Path(folder)), "300-token vocabulary"


def push_step(tokenizer: Tokenizer, stop: tuple[str, ...]) -> float:
    """Median CPU milliseconds of one token on each of the streams, at all offsets into the text."""
    tokens = tokenizer.encode(TEXT, add_special_tokens=False)
    streams = [Detokenizer(tokenizer, stop=stop) for _ in range(STREAMS)]
    times = []
    for step in range(REPEATS):
        step_tokens = [tokens[(stream + step) % len(tokens)] for stream in range(STREAMS)]
        start = time.process_time()
        for stream, token in zip(streams, step_tokens, strict=True):
            stream.push(token)
        times.append(time.process_time() - start)
    return 1e3 * sorted(times)[REPEATS // 2]


def part_step(text: str) -> float:
    """Median CPU milliseconds of parting a word of each of the streams, GLM's marks looked for."""
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    syntax = reply_syntax("glm45", "glm47", "")
    streams = [Answer(syntax.parser("<think>", tools)) for _ in range(STREAMS)]
    words = re.findall(r"\s?\S+|\s", text)
    for stream in streams:
        stream.push("Well")
    times = []
    for step in range(REPEATS):
        start = time.process_time()
        for number, stream in enumerate(streams):
            stream.push(words[(number + step) % len(words)])
        times.append(time.process_time() - start)
    return 1e3 * sorted(times)[REPEATS // 2]


def encode_time(tokenizer: Tokenizer, count: int) -> float:
    """Median CPU milliseconds of encoding a text of `count` tokens that was not seen before."""
    times = []
    for repeat in range(7):
        words = [f"{word}{repeat}" if i % 7 == 0 else word for i, word in enumerate(TEXT.split())]
        text = " ".join(words)
        text *= count // len(tokenizer.encode(text)) + 1
        start = time.process_time()
        tokenizer.encode(text)
        times.append(time.process_time() - start)
    return 1e3 * sorted(times)[3]


def rows() -> list[Row]:
    tokenizer, kind = vocabulary()
    best = "1.24 (tokenizers DecodeStream)"
    return [
        Row("9. detokenise 1,024 streams, split UTF-8", push_step(tokenizer, ()), "ms", best, 1.3),
        Row("9. the same with 4 stop strings", push_step(tokenizer, STOP), "ms", "", 1.3),
        Row("9. part 1,024 streams of thoughts", part_step(TEXT), "ms", "", 3.0),
        Row(f"9. encode 32k tokens, {kind}", encode_time(tokenizer, 32768), "ms", "119", 250.0),
    ]
