"""StepPlan and StepResult: all that crosses from the engine to a worker and back.

A plan is rows of (slot, start, count): compute `count` tokens of the sequence in `slot`, the first at
position `start`. A decode is a row with count 1, a prefill chunk one with more; nothing else tells
them apart. A slot is a sequence's place (0 .. max_running - 1) in the worker's per-sequence arrays.

Running the same plan twice writes the same KV to the same pages and gives the same tokens.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from detour.sampling_params import SamplingParams

Int32s = NDArray[np.int32]
Float32s = NDArray[np.float32]
Bools = NDArray[np.bool_]

# The token was sampled by a step whose result had not come back when this one was planned.
UNKNOWN_TOKEN = -1


@dataclass(frozen=True)
class Admitted:
    """A sequence that enters a slot with this step: what the worker's sampler must know of it."""

    slot: int
    params: SamplingParams
    prompt_length: int  # known_ids[:prompt_length] is the prompt, the rest was generated
    known_ids: Int32s  # [known]


@dataclass(frozen=True)
class StepPlan:
    step: int  # counts up from 0
    slots: Int32s  # [rows]
    starts: Int32s  # [rows] position of the row's first token
    counts: Int32s  # [rows] >= 1
    tokens: (
        Int32s  # [counts.sum()] row after row; UNKNOWN_TOKEN = the worker holds it (last sampled)
    )
    samples: Bools  # [rows] sample a token after the row's last one
    prompt_logprobs: Int32s  # [rows] -1 none, else k: log-probabilities of the row's own tokens too
    table_slots: (
        Int32s  # [changes] page_table[table_slots, table_columns] = table_pages, before the step
    )
    table_columns: Int32s  # [changes]
    table_pages: Int32s  # [changes]
    admitted: tuple[Admitted, ...] = ()

    @property
    def token_count(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class PromptRowLogprobs:
    """Of a row that asked: log-probabilities of tokens at positions [start, start + n)."""

    slot: int
    start: int
    logprobs: Float32s  # [n]
    top_ids: Int32s  # [n, k]
    top_logprobs: Float32s  # [n, k]


@dataclass(frozen=True)
class StepResult:
    step: int
    slots: Int32s  # [sampled] the plan's slots where samples is true, in order
    tokens: Int32s  # [sampled]
    logprobs: Float32s  # [sampled] of the sampled token; meaningful for sequences that ask
    top_ids: Int32s  # [sampled, k] k = the most any sampled row asks for, 0 if none; best first
    top_logprobs: Float32s  # [sampled, k]
    finite: Bools  # [sampled] false: the row's logits were not finite and its token means nothing
    prompt_logprobs: tuple[PromptRowLogprobs, ...] = field(default=())


@dataclass(frozen=True)
class Geometry:
    """What a worker can hold; told by the executor once it has measured its memory."""

    num_pages: int  # page 0 included, which belongs to no sequence: padded rows write there
    page_size: int  # tokens
    max_slots: int  # sequences at once
    context_length: int  # most tokens of one sequence
    vocab_size: int
    kv_bytes_per_token: int
    eos_ids: tuple[int, ...]
