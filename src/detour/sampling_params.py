"""What a request asks of the sampler. Checked once, here, whoever sends it."""

import math

import msgspec

from detour.errors import BadRequest

MAX_TOP_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_LENGTH = 4096  # characters; each token of a stream is searched for every stop string
MAX_SEED = 2**63 - 1


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """Every field is always present; the value that switches a feature off is its default.

    `seed` is always a number: the front draws one where the client sends none, so that a sequence
    can be continued elsewhere with the same noise (noise = f(seed, position), see ops/sampling).
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0  # 0 = greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 = all
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1  # -1 = none, 0 = the sampled token's, n = also the n best
    prompt_logprobs: int = -1
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    include_stop_str_in_output: bool = False

    def check(self, vocab_size: int) -> None:
        """Raises BadRequest naming the first field that is out of range."""
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if not (math.isfinite(value) and low <= value <= high):
                raise BadRequest(
                    f"{name} must be between {low} and {high}, got {value}.", param=name
                )
        if self.min_tokens > self.max_tokens:
            raise BadRequest(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens}).",
                param="min_tokens",
            )
        if len(self.stop) > MAX_STOP_STRINGS:
            raise BadRequest(
                f"stop takes at most {MAX_STOP_STRINGS} strings, got {len(self.stop)}.",
                param="stop",
            )
        for text in self.stop:
            if not 1 <= len(text) <= MAX_STOP_LENGTH:
                raise BadRequest(
                    f"A stop string must have 1 to {MAX_STOP_LENGTH} characters, got {len(text)}.",
                    param="stop",
                )
        for token in self.stop_token_ids:
            if not 0 <= token < vocab_size:
                raise BadRequest(
                    f"stop_token_ids must be below the vocabulary size {vocab_size}, got {token}.",
                    param="stop_token_ids",
                )
        for token, bias in self.logit_bias.items():
            if not 0 <= token < vocab_size:
                raise BadRequest(
                    f"logit_bias names token {token}, but the vocabulary has {vocab_size}.",
                    param="logit_bias",
                )
            if not -100 <= bias <= 100:
                raise BadRequest(
                    f"logit_bias must be between -100 and 100, got {bias} for token {token}.",
                    param="logit_bias",
                )


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("max_tokens", 0, 2**31 - 1),
    ("min_tokens", 0, 2**31 - 1),
    ("temperature", 0.0, 100.0),
    ("top_p", 1e-6, 1.0),
    ("top_k", 0, 2**31 - 1),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", 1e-3, 100.0),
    ("frequency_penalty", -2.0, 2.0),
    ("presence_penalty", -2.0, 2.0),
    ("seed", 0, MAX_SEED),
    ("logprobs", -1, MAX_TOP_LOGPROBS),
    ("prompt_logprobs", -1, MAX_TOP_LOGPROBS),
)
