"""From request fields to SamplingParams: defaults, spellings, and what is refused as not there.

Knows the schema and the sampling parameters; nothing of engines.
"""

import secrets
from collections.abc import Mapping
from typing import Any

import msgspec

from detour.api.schema import NativeSampling, RequestFields
from detour.errors import BadRequest
from detour.sampling_params import MAX_SEED, MAX_TOP_LOGPROBS, SamplingParams

MAX_CHOICES = 128

_DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
_PLAIN = (
    "frequency_penalty",
    "presence_penalty",
    "ignore_eos",
    "skip_special_tokens",
    "spaces_between_special_tokens",
)
_NOT_THERE = (
    "regex",
    "ebnf",
    "json_schema",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "structural_tag",
    "stop_regex",
    "lora_path",
    "custom_logit_processor",
    "return_hidden_states",
    "token_ids_logprob",
    "input_embeds",
    "image_data",
    "audio_data",
    "video_data",
)


def refuse_absent_features(fields: Mapping[str, Any]) -> None:
    """Raises BadRequest for a field whose feature is not served, unless it asks for nothing."""
    for name in _NOT_THERE:
        value = fields.get(name)
        asks = any(value) if isinstance(value, list) else bool(value)
        if asks:
            raise BadRequest(f"{name} is not supported yet.", param=name, code="unsupported")
    form = fields.get("response_format")
    if form and form.get("type") != "text":
        raise BadRequest(
            f"response_format of type {form.get('type')!r} is not supported yet; only 'text' is.",
            param="response_format",
            code="unsupported",
        )


def sampling_params(
    fields: RequestFields | NativeSampling,
    defaults: Mapping[str, Any],
    *,
    logprobs: int = -1,
    prompt_logprobs: int = -1,
    shows_special_tokens: bool = False,
) -> SamplingParams:
    """What the fields ask, with `defaults` (generation_config.json) where they are silent.

    shows_special_tokens: a parser needs them in the text, unless the client says otherwise.

    max_tokens is left for the caller, who knows the prompt. Raises BadRequest for a field that
    cannot be understood; ranges are checked by SamplingParams.check.
    """
    sent = {name: value for name, value in vars(fields).items() if value is not None}
    asked = {name: sent.get(name, defaults.get(name)) for name in _DEFAULTED}
    asked.update((name, sent.get(name)) for name in _PLAIN)
    values: dict[str, Any] = {name: value for name, value in asked.items() if value is not None}
    values.setdefault("skip_special_tokens", not shows_special_tokens)
    if values.get("top_k") == -1:
        values["top_k"] = 0
    stop = sent.get("stop", ())
    stops = (stop,) if isinstance(stop, str) else stop
    keeps_stop = sent.get("include_stop_str_in_output", sent.get("no_stop_trim", False))
    return SamplingParams(
        min_tokens=sent.get("min_tokens", sent.get("min_new_tokens", 0)),
        logit_bias=_logit_bias(sent.get("logit_bias", {})),
        seed=_seed(sent.get("seed", sent.get("sampling_seed", -1))),
        stop=tuple(check_text(text, "stop") for text in stops),
        stop_token_ids=tuple(sent.get("stop_token_ids", ())),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        include_stop_str_in_output=keeps_stop,
        **values,
    )


def check_text(text: str, param: str) -> str:
    """The text, which must be able to travel. Raises BadRequest for half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise BadRequest(f"{param} is not valid Unicode.", param=param) from None
    return text


def choice_params(params: SamplingParams, choice: int) -> SamplingParams:
    """The params for a request's choice number `choice`: own noise; the first one's as sent."""
    if choice == 0:
        return params
    return msgspec.structs.replace(params, seed=(params.seed + choice * _SEED_STRIDE) & MAX_SEED)


_SEED_STRIDE = 0x1E3779B97F4A7C15  # odd, so that no two choices of a request meet


def number_of_choices(n: int | None) -> int:
    if n is None:
        return 1
    if not 1 <= n <= MAX_CHOICES:
        raise BadRequest(f"n must be between 1 and {MAX_CHOICES}, got {n}.", param="n")
    return n


def wanted_logprobs(asked: bool, top: int | None, name: str) -> int:
    """SamplingParams.logprobs for a yes/no field with a count beside it. Raises BadRequest."""
    if not asked:
        if top:
            raise BadRequest(f"{name} needs logprobs to be true.", param=name)
        return -1
    if top is not None and not 0 <= top <= MAX_TOP_LOGPROBS:
        raise BadRequest(f"{name} must be between 0 and {MAX_TOP_LOGPROBS}, got {top}.", param=name)
    return top or 0


def _seed(seed: int) -> int:
    return secrets.randbelow(MAX_SEED) if seed == -1 else seed


def _logit_bias(biases: Mapping[str, float]) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in biases.items()}
    except ValueError:
        raise BadRequest("logit_bias takes token ids as its keys.", param="logit_bias") from None
