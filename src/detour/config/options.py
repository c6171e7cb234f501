"""Config: the options that are served, each with its spellings, default and help.

A field here is the only place that names its option: the command line, the configuration file,
`detour show flags` and docs/flags.md are made from it. 0, "" and -1 mean "not set" as each help
says; no field is ever None.
"""

from dataclasses import dataclass, fields
from typing import Any

from detour.config.option import Option, integer, json_object, option
from detour.config.other_values import (
    CACHE_AWARE,
    DTYPES,
    KV_TYPES,
    NO_SUCH_ORDER,
    OTHER_DEVICES,
    OTHER_FORMATS,
    OTHER_KV_TYPES,
)
from detour.config.ranges import RANGES
from detour.errors import ConfigError

EMBEDDED_MODEL = "smollm2-135m-instruct"
LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class Config:
    """What a server is told at its start. Raises ConfigError where values do not fit."""

    # --- model
    model: str = option(
        EMBEDDED_MODEL,
        "--model-path --model",
        "A folder with a checkpoint, a .gguf file, a hub id, or the embedded default.",
        group="model",
    )
    tokenizer_path: str = option(
        "",
        "--tokenizer-path --tokenizer",
        "Take the tokenizer from this folder or .gguf file instead.",
        group="model",
    )
    revision: str = option("", "--revision", "Branch, tag or commit of a hub id.", group="model")
    cache_dir: str = option(
        "",
        "--cache-dir --download-dir",
        "Where downloaded models are kept; default: $DETOUR_CACHE, else ~/.cache/detour.",
        group="model",
    )
    load_format: str = option(
        "auto",
        "--load-format",
        "auto reads what is there; dummy makes random weights from the configuration alone.",
        group="model",
        choices=("auto", "safetensors", "gguf", "dummy"),
        synonyms={"hf": "auto"},
        stand_ins=dict.fromkeys(
            OTHER_FORMATS, ("auto", "safetensors and GGUF files are what can be read")
        ),
    )
    quantization: str = option(
        "auto",
        "--quantization -q",
        "What the checkpoint must be quantised with; auto takes what it says and what its weights are.",
        group="model",
        choices=("auto", "modelopt", "modelopt_fp4", "modelopt_fp8", "fp8", "compressed-tensors"),
    )
    dtype: str = option(
        "auto",
        "--dtype",
        "Type to compute in; auto is the checkpoint's, or float32 on a CPU without fast bfloat16.",
        group="model",
        choices=("auto", "bfloat16", "float16", "float32"),
        synonyms=DTYPES,
    )
    kv_cache_dtype: str = option(
        "auto",
        "--kv-cache-dtype",
        "Type the KV cache is kept in; auto is the type the model computes in.",
        group="model",
        choices=("auto", "bfloat16", "float16", "float32", "fp8_e4m3"),
        synonyms=KV_TYPES,
        stand_ins=dict.fromkeys(OTHER_KV_TYPES, ("auto", "such a cache is not here yet")),
    )
    context_length: int = option(
        0,
        "--context-length --max-model-len",
        "Most tokens of one sequence, prompt and answer; 0 = what the model was made for.",
        group="model",
        convert=integer,
    )
    model_overrides: dict[str, Any] = option(
        {},
        "--json-model-override-args --hf-overrides",
        "JSON merged into the model's configuration before anything reads it.",
        group="model",
        convert=json_object,
    )
    chat_template: str = option(
        "",
        "--chat-template",
        "A file with a Jinja chat template to use instead of the model's.",
        group="model",
    )
    reasoning_parser: str = option(
        "",
        "--reasoning-parser",
        "Part thoughts from answers as this model family writes them; auto asks the template.",
        group="model",
    )
    tool_call_parser: str = option(
        "auto",
        "--tool-call-parser",
        "Read tool calls as this model family writes them; auto asks the template.",
        group="model",
    )
    served_model_name: str = option(
        "",
        "--served-model-name",
        "The name (or names) clients use for the model; default: the value of --model.",
        group="model",
        repeated=True,
    )
    sampling_defaults: str = option(
        "model",
        "--sampling-defaults --generation-config",
        "Source of sampling defaults: the model's generation_config.json, or OpenAI's values.",
        group="model",
        choices=("model", "openai"),
        synonyms={"auto": "model", "vllm": "openai"},
    )
    random_seed: int = option(
        -1,
        "--random-seed --seed",
        "Seed of requests that bring none, and of dummy weights; -1 = a new one each start.",
        group="model",
        convert=integer,
    )

    # --- scheduling and memory
    max_running_requests: int = option(
        0,
        "--max-running-requests --max-num-seqs",
        "Sequences computed at once; 0 = chosen for the device.",
        group="scheduling",
        convert=integer,
    )
    max_queued_requests: int = option(
        0,
        "--max-queued-requests",
        "Sequences that may wait; those beyond are answered 503. 0 = no limit.",
        group="scheduling",
        convert=integer,
    )
    max_total_tokens: int = option(
        0,
        "--max-total-tokens",
        "Tokens the KV cache holds; 0 = as many as the memory share allows.",
        group="scheduling",
        convert=integer,
    )
    mem_fraction_static: float = option(
        0.0,
        "--mem-fraction-static --gpu-memory-utilization",
        "Share of the device's memory for weights and KV cache; 0 = chosen for the device.",
        group="scheduling",
        convert=float,
    )
    chunked_prefill_size: int = option(
        0,
        "--chunked-prefill-size --max-num-batched-tokens",
        "Most tokens of a step; longer prompts are cut. 0 = chosen for the device, -1 = no cut.",
        group="scheduling",
        convert=integer,
    )
    max_prefill_tokens: int = option(
        16384,
        "--max-prefill-tokens",
        "Most prompt tokens of a step without chunks (a longer prompt goes alone).",
        group="scheduling",
        convert=integer,
    )
    page_size: int = option(
        16,
        "--page-size --block-size",
        "Tokens of a KV cache page.",
        group="scheduling",
        convert=integer,
    )
    schedule_policy: str = option(
        "fcfs",
        "--schedule-policy --scheduling-policy",
        "Order of waiting requests of one priority: by arrival, or longest cached prefix first.",
        group="scheduling",
        choices=("fcfs", "lpm"),
        synonyms={"priority": "fcfs"},
        stand_ins={
            "dfs-weight": CACHE_AWARE,
            "routing-key": CACHE_AWARE,
            "hrrn": CACHE_AWARE,
            "lof": NO_SUCH_ORDER,
            "random": NO_SUCH_ORDER,
            "shortest-prefill-first": NO_SUCH_ORDER,
        },
    )
    disable_radix_cache: bool = option(
        False,
        "--disable-radix-cache",
        "Share no cached prefixes between requests.",
        group="scheduling",
        sets={"--no-enable-prefix-caching": True, "--enable-prefix-caching": False},
    )
    schedule_conservativeness: float = option(
        1.0,
        "--schedule-conservativeness",
        "Scales the cache kept free for running sequences to grow; more = fewer preemptions.",
        group="scheduling",
        convert=float,
    )
    request_timeout: float = option(
        0.0,
        "--request-timeout",
        "Seconds after which a request ends; 0 = never. A request may ask for less.",
        group="scheduling",
        convert=float,
    )

    # --- device
    device: str = option(
        "auto",
        "--device",
        "auto is the GPU where there is one.",
        group="device",
        choices=("auto", "cpu", "cuda"),
        stand_ins=dict.fromkeys(OTHER_DEVICES, ("auto", "there is no code for that device")),
    )
    threads: int = option(
        0,
        "--threads",
        "CPU threads a step uses; 0 = measured at start.",
        group="device",
        convert=integer,
    )
    attention_backend: str = option(
        "",
        "--attention-backend",
        "Backend to try first for attention.",
        group="device",
        op="attention dense_mla sparse_mla",
    )
    disable_cuda_graph: bool = option(
        False,
        "--disable-cuda-graph --enforce-eager",
        "Launch the kernels of every decode step one by one.",
        group="device",
        sets={"--no-enforce-eager": False},
    )
    cuda_graph_backend_decode: str = option(
        "full",
        "--cuda-graph-backend-decode",
        "disabled is the same as --disable-cuda-graph.",
        group="device",
        choices=("full", "disabled"),
        stand_ins=dict.fromkeys(("breakable", "tc_piecewise"), ("full", "steps are kept whole")),
    )
    cuda_graph_max_bs: int = option(
        0,
        "--cuda-graph-max-bs --cuda-graph-max-bs-decode --max-cudagraph-capture-size",
        "Most sequences of a decode step kept as a CUDA graph; 0 = all that may run.",
        group="device",
        convert=integer,
    )
    cuda_graph_bs: str = option(
        "",
        "--cuda-graph-bs --cuda-graph-bs-decode --cuda-graph-sizes --cudagraph-capture-sizes",
        "Sequences of the decode steps kept as CUDA graphs; default: chosen up to the most.",
        group="device",
        repeated=True,
    )
    strict_backends: bool = option(
        False,
        "--strict-backends",
        "Refuse to start, instead of using another, where a backend asked for cannot serve.",
        group="device",
    )

    # --- server
    host: str = option("127.0.0.1", "--host", "Address to listen on.", group="server")
    port: int = option(
        30000, "--port", "Port to listen on; 0 = any free one.", group="server", convert=integer
    )
    api_key: str = option(
        "",
        "--api-key",
        "Clients must send it as a bearer token; default: $DETOUR_API_KEY.",
        group="server",
        secret=True,
    )
    admin_api_key: str = option(
        "",
        "--admin-api-key",
        "Key for the control routes, instead of --api-key.",
        group="server",
        secret=True,
    )
    root_path: str = option(
        "", "--fastapi-root-path --root-path", "Path under which a proxy serves us.", group="server"
    )
    allowed_origins: str = option(
        "*",
        "--allowed-origins",
        "Origins that browsers may call from: a JSON list, or names separated by commas.",
        group="server",
    )
    incremental_stream: bool = option(
        False,
        "--incremental-streaming-output --stream-output",
        "Chunks of a /generate stream hold the new text alone instead of all of it.",
        group="server",
    )
    ssl_keyfile: str = option("", "--ssl-keyfile", "Private key, for HTTPS.", group="server")
    ssl_certfile: str = option("", "--ssl-certfile", "Certificate, for HTTPS.", group="server")
    drain_timeout: float = option(
        30.0,
        "--drain-timeout",
        "Seconds open requests have to finish after SIGTERM or Ctrl-C.",
        group="server",
        convert=float,
    )
    watchdog_timeout: float = option(
        300.0,
        "--watchdog-timeout",
        "Seconds a step may take before the engine is started anew; 0 = any time.",
        group="server",
        convert=float,
    )
    log_level: str = option(
        "info", "--log-level", "How much is logged.", group="server", choices=LOG_LEVELS
    )
    log_level_http: str = option(
        "warning",
        "--log-level-http --uvicorn-log-level",
        "How much the HTTP server logs.",
        group="server",
        choices=LOG_LEVELS,
        synonyms={"trace": "debug"},
    )

    def __post_init__(self) -> None:
        for name, low, high in RANGES:
            value = self.value(name)
            if not low <= value <= high:
                raise ConfigError(
                    f"{flag_of(name)} must be between {low} and {high}, got {value}.", param=name
                )
        if self.chunked_prefill_size < -1:
            raise ConfigError(
                "--chunked-prefill-size must be positive, 0 (chosen) or -1 (no chunks)."
            )
        if 0 < self.max_total_tokens < self.page_size:
            raise ConfigError(
                f"--max-total-tokens ({self.max_total_tokens}) must hold at least one page "
                f"of --page-size ({self.page_size}) tokens."
            )
        if bool(self.ssl_keyfile) != bool(self.ssl_certfile):
            raise ConfigError("--ssl-keyfile and --ssl-certfile must be given together.")

    def value(self, name: str) -> Any:
        """The value of the field called `name`."""
        return vars(self)[name]

    def public_values(self) -> dict[str, Any]:
        """Every option by name, secrets hidden: for /server_info and `detour show config`."""
        return {
            name: "***" if value and OPTIONS[name].secret else value
            for name, value in vars(self).items()
        }

    def wishes(self) -> dict[str, str]:
        """Op -> the backend a flag asks for."""
        return {
            op: self.value(name)
            for name, option in OPTIONS.items()
            for op in option.op.split()
            if self.value(name)
        }


OPTIONS: dict[str, Option] = {field.name: field.metadata["option"] for field in fields(Config)}
DEFAULTS = {
    field.name: field.default_factory() if callable(field.default_factory) else field.default
    for field in fields(Config)
}


def flag_of(name: str) -> str:
    """The spelling of a field that we print."""
    return OPTIONS[name].flags[0]
