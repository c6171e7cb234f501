"""Tasks as batches of tokens: ids, and how much each next token counts.

Knows the tokenizer and the tasks, no model. Workers make them beside the training.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import Value
from typing import Any

import torch
from markup import PREFIX, ROLES, render
from tasks import TASKS, Task
from tokenizers import Tokenizer
from torch import Tensor

# What a token counts that the model does not say, and how many of them count.
BACKGROUND, COUNTED = 0.3, 0.15
SHARES = {"copying": 2.0, "recall": 3.0, "sums": 1.0, "calls": 3.0}
# All else is learnt once the model looks things up: what it learns first, for this much of the reach.
LOOKING_UP, FIRST = ("copying", "recall"), 0.25
LONGEST_SUM = 64  # tokens
THINKS = 0.75  # share of conversations whose last answer is thought about


Row = tuple[list[int], list[float]]


@dataclass(frozen=True)
class Pack:
    """ids [B, T + 1] int64, padded with 0; weights [B, T] float32 of predicting ids[:, 1:]."""

    ids: Tensor
    weights: Tensor


class Encoder:
    """Conversations as ids, and which of them the model is to say."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._speaker = tokenizer.token_to_id("<|assistant|>")
        self._turns = {tokenizer.token_to_id(mark) for mark in (*ROLES, *PREFIX)}

    def encode(self, task: Task, thinks: bool, source: random.Random) -> Row:
        """The tokens, and a weight for each but the first: 1 behind the mark that a prompt ends
        with, up to the mark that ends the turn."""
        text = render(task, thinks)
        ids = self._tokenizer.encode(text, add_special_tokens=False).ids
        weights, speaks = [], False
        for place, token in enumerate(ids[1:], 1):
            given = ids[place - 1] == self._speaker
            told = speaks and not given
            counted = BACKGROUND if source.random() < COUNTED else 0.0
            weights.append(1.0 if told else counted)
            speaks = token == self._speaker or (speaks and token not in self._turns)
        return ids, weights

    def pack(self, source: random.Random, room: int, tokens: int, kind: str = "") -> Pack:
        """Conversations of at most `room` tokens, `tokens` of them with padding; all of a kind if
        one is given."""
        shares = {kind: share for kind, share in SHARES.items() if fits(kind, room)}
        shares = {kind: 1.0} if kind else shares
        rows: list[Row] = []
        while len(rows) < max(1, tokens // room):
            one = source.choices(list(shares), list(shares.values()))[0]
            task = TASKS[one](source, room)
            thinks = one == "sums" or source.random() < THINKS
            row = self.encode(task, thinks, source)
            rows += [row] if len(row[0]) <= room + 1 else []
        longest = max(len(ids) for ids, _ in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.int64)
        weights = torch.zeros(len(rows), longest - 1)
        for row_ids, row_weights, (own, counts) in zip(ids, weights, rows, strict=True):
            row_ids[: len(own)] = torch.tensor(own)
            row_weights[: len(counts)] = torch.tensor(counts)
        return Pack(ids, weights)


def fits(kind: str, room: int) -> bool:
    """Sums are short, and a call takes a schema."""
    return room <= LONGEST_SUM if kind == "sums" else kind != "calls" or room > LONGEST_SUM


class Batches(torch.utils.data.IterableDataset[Pack]):
    """Endless; `reach` (0 to 1) says how long conversations may be by now."""

    def __init__(self, tokenizer: str, rooms: tuple[int, ...], tokens: int, seed: int) -> None:
        self.rooms, self.tokens, self.seed = rooms, tokens, seed
        self.tokenizer = tokenizer
        self.reach: Any = Value("d", 0.0)

    def __iter__(self) -> Iterator[Pack]:
        worker = torch.utils.data.get_worker_info()
        source = random.Random(f"{self.seed} {worker.id if worker else 0}")
        encoder = Encoder(Tokenizer.from_file(self.tokenizer))
        while True:
            reach = max(0.0, self.reach.value - FIRST) / (1 - FIRST)
            if not reach:
                yield encoder.pack(source, self.rooms[0], self.tokens, source.choice(LOOKING_UP))
                continue
            most = min(len(self.rooms), 1.5 + reach * (len(self.rooms) - 1))
            yield encoder.pack(source, self.rooms[int(source.random() * most)], self.tokens)
