"""What clients may send: OpenAI's and SGLang's bodies, with the extensions of the field.

Types are strict (a number sent as a string is an error that names the field); ranges are checked by
SamplingParams, whoever sends them; unknown fields are ignored; null means "not sent".
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Int = int | None
Number = float | None
Flag = bool | None
Text = str | None

Role = Literal["system", "developer", "user", "assistant", "tool", "function"]


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class StreamOptions(Body):
    include_usage: Flag = Field(None, description="Send one more chunk at the end with `usage`.")
    continuous_usage_stats: Flag = Field(None, description="Send `usage` with every chunk.")


class RequestFields(Body):
    """Fields that /v1/chat/completions and /v1/completions share."""

    model: Text = Field(
        None, description="A served model name, the model's path, or `default` (as if not sent)."
    )
    temperature: Number = Field(None, description="0 = greedy. Not sent: the model's default.")
    top_p: Number = Field(
        None, description="Sample from the likeliest tokens that hold this probability."
    )
    top_k: Int = Field(None, description="Sample from the k likeliest tokens; -1 or 0 = all.")
    min_p: Number = Field(
        None, description="Drop tokens less likely than this share of the likeliest one."
    )
    frequency_penalty: Number = Field(
        default=None,
        description="-2 to 2: lower a token's logit by this for each time it was generated.",
    )
    presence_penalty: Number = Field(
        None, description="-2 to 2: lower a token's logit by this if it was generated."
    )
    repetition_penalty: Number = Field(
        default=None,
        description="Divide (or multiply) logits of tokens seen in prompt or answer by this.",
    )
    logit_bias: dict[str, float] | None = Field(
        default=None,
        description="Token id (as a string) to a number from -100 to 100 added to its logit.",
    )
    n: Int = Field(None, description="Number of choices; they share the prompt's KV cache.")
    seed: Int = Field(
        default=None,
        description="The same request and seed give the same tokens. Not sent or -1: random.",
    )
    max_tokens: Int = Field(None, description="Most tokens to generate.")
    min_tokens: Int = Field(None, description="No end of text before this many tokens.")
    stop: str | list[str] | None = Field(None, description="Text that ends the answer (up to 64).")
    stop_token_ids: list[int] | None = Field(None, description="Token ids that end the answer.")
    include_stop_str_in_output: Flag = Field(None, description="Leave the stop text in the answer.")
    no_stop_trim: Flag = Field(None, description="SGLang's name of `include_stop_str_in_output`.")
    ignore_eos: Flag = Field(None, description="Go on after the model's end-of-text token.")
    skip_special_tokens: Flag = Field(None, description="Leave special tokens out of the text.")
    spaces_between_special_tokens: Flag = Field(
        None, description="Put spaces between special tokens where they are shown."
    )
    stream: Flag = Field(None, description="Answer with server-sent events.")
    stream_options: StreamOptions | None = Field(None, description="What a stream also says.")
    user: Text = Field(None, description="Your name for the end user; not interpreted.")
    rid: Text = Field(None, description="Your id of this request, for logs and /abort_request.")
    request_id: Text = Field(None, description="vLLM's name of `rid`.")
    priority: Int = Field(None, description="Larger runs earlier, where priorities are enabled.")
    cache_salt: Text = Field(
        None, description="Requests share cached prefixes only with those of the same salt."
    )
    extra_key: Text = Field(None, description="SGLang's name of `cache_salt`.")
    timeout: Number = Field(None, description="Seconds after which the request ends unfinished.")
    return_token_ids: Flag = Field(None, description="Add `token_ids` to each choice.")
    # Fields of features that are not there: refused where ignoring them would change the answer.
    response_format: dict[str, Any] | None = Field(
        None, description='Only {"type": "text"} is served yet.'
    )
    regex: Text = Field(None, description="Not served yet.")
    ebnf: Text = Field(None, description="Not served yet.")
    json_schema: Any = Field(None, description="Not served yet.")
    guided_json: Any = Field(None, description="Not served yet.")
    guided_regex: Text = Field(None, description="Not served yet.")
    guided_choice: list[str] | None = Field(None, description="Not served yet.")
    guided_grammar: Text = Field(None, description="Not served yet.")
    structured_outputs: dict[str, Any] | None = Field(None, description="Not served yet.")
    stop_regex: str | list[str] | None = Field(None, description="Not served yet.")
    lora_path: Text = Field(None, description="Not served yet.")
    custom_logit_processor: Text = Field(None, description="Not served yet.")
    return_hidden_states: Flag = Field(None, description="Not served yet.")


class Message(BaseModel):
    """One turn of a conversation. Further fields are handed to the chat template."""

    model_config = ConfigDict(strict=True, extra="allow")

    role: Role = Field(description="system, developer, user, assistant, tool or function.")
    content: str | list[dict[str, Any]] | None = Field(
        None, description='Text, or a list of parts {"type": "text", "text": ...}.'
    )


class ChatRequest(RequestFields):
    messages: list[Message] = Field(description="The conversation so far; at least one message.")
    max_completion_tokens: Int = Field(
        None, description="OpenAI's newer name of `max_tokens`; wins where both are sent."
    )
    logprobs: Flag = Field(None, description="Add the log-probabilities of the answer's tokens.")
    top_logprobs: Int = Field(None, description="With `logprobs`: also the k (0-20) likeliest.")
    add_generation_prompt: Flag = Field(
        None, description="End the prompt where the assistant's turn begins (default true)."
    )
    continue_final_message: Flag = Field(
        None, description="Go on with the last message instead of starting a new turn."
    )
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="Further variables for the chat template, as `enable_thinking`."
    )
    enable_thinking: Flag = Field(None, description="Whether to think, where a template asks.")
    reasoning_effort: Text = Field(None, description='For the template; "none" = no thinking.')
    reasoning: dict[str, Any] | None = Field(
        None, description="`effort` as `reasoning_effort`; `enabled` as `enable_thinking`."
    )
    separate_reasoning: Flag = Field(
        None,
        description="False leaves thoughts in the content, as the model writes them. "
        "Default: they are `reasoning_content`, if the server was started with --reasoning-parser.",
    )
    stream_reasoning: Flag = Field(None, description="False sends thoughts once they are whole.")
    tools: list[dict[str, Any]] | None = Field(
        None, description="Functions that the model may call; `strict` is not enforced yet."
    )
    tool_choice: str | dict[str, Any] | None = Field(
        None,
        description='"auto", "none", "required", or a named function. The last two make the '
        "answer begin with a call, without thinking; its arguments are the model's own.",
    )
    parallel_tool_calls: Flag = Field(None, description="False leaves out calls after the first.")


TokenIds = list[int]


class CompletionRequest(RequestFields):
    prompt: str | list[str] | TokenIds | list[TokenIds] = Field(
        description="Text, token ids, or a list of either (one or more choices each)."
    )
    logprobs: Int = Field(
        default=None,
        description="Add the log-probabilities of the tokens and of the k (0-20) likeliest.",
    )
    echo: Flag = Field(None, description="Begin the text (and logprobs) with the prompt.")
    best_of: Int = Field(None, description="Must equal `n`.")
    suffix: Text = Field(None, description="Not served.")
    add_special_tokens: Flag = Field(
        None, description="Let the tokenizer add its begin-of-text token (default true)."
    )


class NativeSampling(Body):
    """`sampling_params` of /generate."""

    max_new_tokens: Int = Field(None, description="Most tokens to generate (default 128).")
    min_new_tokens: Int = Field(None, description="No end of text before this many tokens.")
    temperature: Number = Field(None, description="0 = greedy. Not sent: the model's default.")
    top_p: Number = Field(None, description="As in the OpenAI routes.")
    top_k: Int = Field(None, description="As in the OpenAI routes.")
    min_p: Number = Field(None, description="As in the OpenAI routes.")
    frequency_penalty: Number = Field(None, description="As in the OpenAI routes.")
    presence_penalty: Number = Field(None, description="As in the OpenAI routes.")
    repetition_penalty: Number = Field(None, description="As in the OpenAI routes.")
    logit_bias: dict[str, float] | None = Field(None, description="As in the OpenAI routes.")
    n: Int = Field(None, description="Number of answers per prompt.")
    sampling_seed: Int = Field(None, description="As `seed` in the OpenAI routes.")
    seed: Int = Field(None, description="As `sampling_seed`.")
    stop: str | list[str] | None = Field(None, description="Text that ends the answer.")
    stop_token_ids: list[int] | None = Field(None, description="Token ids that end the answer.")
    no_stop_trim: Flag = Field(None, description="Leave the stop text in the answer.")
    ignore_eos: Flag = Field(None, description="Go on after the model's end-of-text token.")
    skip_special_tokens: Flag = Field(None, description="Leave special tokens out of the text.")
    spaces_between_special_tokens: Flag = Field(None, description="As in the OpenAI routes.")
    json_schema: Text = Field(None, description="Not served yet.")
    regex: Text = Field(None, description="Not served yet.")
    ebnf: Text = Field(None, description="Not served yet.")
    structural_tag: Text = Field(None, description="Not served yet.")
    stop_regex: str | list[str] | None = Field(None, description="Not served yet.")


class GenerateRequest(Body):
    """SGLang's native request. Lists give a list of answers."""

    text: str | list[str] | None = Field(None, description="The prompt, or a list of prompts.")
    input_ids: TokenIds | list[TokenIds] | None = Field(
        None, description="Token ids in place of `text`."
    )
    sampling_params: NativeSampling | list[NativeSampling] | None = Field(
        None, description="One for all prompts, or one for each."
    )
    rid: str | list[str] | None = Field(None, description="Your id of this request.")
    stream: Flag = Field(None, description="Answer with server-sent events.")
    return_logprob: bool | list[bool] | None = Field(
        None, description="Add log-probabilities to `meta_info`."
    )
    logprob_start_len: int | list[int] | None = Field(
        default=None,
        description="Prompt position from which log-probabilities are given; -1 = none.",
    )
    top_logprobs_num: int | list[int] | None = Field(
        None, description="With `return_logprob`: also the k (0-20) likeliest."
    )
    return_text_in_logprobs: Flag = Field(None, description="Add the tokens' text to logprobs.")
    priority: Int = Field(None, description="Larger runs earlier, where priorities are enabled.")
    cache_salt: Text = Field(None, description="As in the OpenAI routes.")
    extra_key: Text = Field(None, description="As `cache_salt`.")
    timeout: Number = Field(None, description="Seconds after which the request ends unfinished.")
    lora_path: str | list[str | None] | None = Field(None, description="Not served yet.")
    custom_logit_processor: str | list[str | None] | None = Field(
        None, description="Not served yet."
    )
    return_hidden_states: bool | list[bool] | None = Field(None, description="Not served yet.")
    token_ids_logprob: list[Any] | None = Field(None, description="Not served yet.")
    input_embeds: list[Any] | None = Field(None, description="Not served.")
    image_data: Any = Field(None, description="Not served.")
    audio_data: Any = Field(None, description="Not served.")
    video_data: Any = Field(None, description="Not served.")


class TokenizeRequest(Body):
    """Text or a conversation to token ids (SGLang's and vLLM's fields)."""

    model: Text = Field(None, description="As in the OpenAI routes.")
    prompt: str | list[str] | None = Field(None, description="Text, or a list of texts.")
    messages: list[Message] | None = Field(None, description="A conversation in place of `prompt`.")
    add_special_tokens: Flag = Field(None, description="Let the tokenizer add its own tokens.")
    add_generation_prompt: Flag = Field(None, description="As in /v1/chat/completions.")
    continue_final_message: Flag = Field(None, description="As in /v1/chat/completions.")
    chat_template_kwargs: dict[str, Any] | None = Field(
        None, description="As in /v1/chat/completions."
    )


class DetokenizeRequest(Body):
    model: Text = Field(None, description="As in the OpenAI routes.")
    tokens: TokenIds | list[TokenIds] = Field(description="Token ids, or a list of such lists.")
    skip_special_tokens: Flag = Field(
        None, description="Leave special tokens out of the text (default true)."
    )


class AbortRequest(Body):
    rid: Annotated[str, Field(description="The id that the request was sent with.")] = ""
    abort_all: bool = Field(default=False, description="End every open request.")
