"""The command line: what users of other servers paste is understood, what nobody can mean is refused."""

import shlex
from dataclasses import fields

import pytest

from detour.config.accepted import ACCEPTED
from detour.config.environment import read_environment
from detour.config.options import DEFAULTS, OPTIONS, Config
from detour.config.parse import parse
from detour.errors import ConfigError

# Command lines of public scripts for SGLang and vLLM, as people paste them.
PUBLIC = """
--model-path zai-org/GLM-5 --served-model-name glm-5 --reasoning-parser glm45 --tool-call-parser glm47 --trust-remote-code
--model zai-org/GLM-5-FP8 --tensor-parallel-size 8 --mem-fraction-static 0.85 --max-running-requests 64
--model-path m --tp 8 --max-running-requests 512 --kv-cache-dtype bf16 --quantization modelopt_fp4
--model-path m --tp-size 8 --kv-cache-dtype fp8_e4m3 --attention-backend flashinfer
--model-path m --attention-backend nsa --nsa-prefill-backend trtllm --nsa-decode-backend trtllm
--model-path m --attention-backend dsa --dsa-prefill-backend flashmla_sparse --dsa-decode-backend=flashmla_kv
--model-path m --fp8-gemm-backend deep_gemm --fp4-gemm-backend flashinfer_cutlass --moe-runner-backend flashinfer_trtllm
--model-path m --moe-runner-backend flashinfer_cutlass
--model-path m --moe-runner-backend cutlass --ep 8
--model-path m --moe-runner-backend b12x --cuda-graph-max-bs 32
--model-path m --cuda-graph-bs 1 2 4 8 --disable-cuda-graph-padding
--model-path m --cuda-graph-bs-decode 1 2 4 --cuda-graph-max-bs-decode 64 --cuda-graph-config '{"decode": {"max_bs": 64}}'
--model-path m --cuda-graph-backend-decode=disabled --disable-cuda-graph
--model-path m --chunked-prefill-size 16384 --max-prefill-tokens 32768 --enable-mixed-chunk
--model-path m --enable-flashinfer-allreduce-fusion --disable-custom-all-reduce --enable-metrics --sleep-on-idle
--model-path m --disable-radix-cache --page-size 64 --watchdog-timeout 3600 --dist-timeout 10000
--model-path m --model-loader-extra-config '{"enable_multithread_load":true,"num_threads":16}'
--model-path m --json-model-override-args '{"index_topk_freq":4}'
--model-path m --speculative-algorithm NEXTN --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4
--model-path m --speculative-algorithm EAGLE --speculative-draft-model-path d --speculative-draft-model-quantization unquant
--model-path m --enable-hierarchical-cache --hicache-ratio 2.0 --hicache-size 100 --hicache-write-policy write_through
--model-path m --enable-hicache --hicache-io-backend kernel --hicache-mem-layout page_first --hicache-storage-backend mooncake
--model-path m --disaggregation-mode prefill --disaggregation-transfer-backend mooncake --disaggregation-bootstrap-port 8998
--model-path m --dp-size 8 --enable-dp-attention --attn-dp-size 8 --ep-size 8 --moe-a2a-backend deepep --deepep-mode auto
--model-path m --schedule-policy lpm --schedule-conservativeness 0.3 --radix-eviction-policy lfu
--model-path m --api-key k --admin-api-key a --random-seed 7 --log-level warning --host 0.0.0.0 --port 8000
--model-path m --load-format dummy --context-length 4096 --max-total-tokens 8192 --max-queued-requests 10
--model-path m --enable-deterministic-inference --disable-flashinfer-autotune --flashinfer-autotune-skip-ops a b
--model-path m --nnodes 2 --node-rank 0 --dist-init-addr 10.0.0.1:5000 --dsa-topk-backend torch --dsa-paged-mqa-logits-backend deepgemm
--model-path m --flashinfer-allreduce-fusion-backend auto --enforce-disable-flashinfer-allreduce-fusion
meta-llama/Llama-3.1-8B-Instruct --max-model-len 32k --max-num-seqs 256 --max-num-batched-tokens 8192
m --gpu-memory-utilization 0.9 --enable-prefix-caching --enable-chunked-prefill --tokenizer t --dtype bfloat16
m --no-enable-prefix-caching --uvicorn-log-level info --seed 0 --block-size 16 --swap-space 4 --enforce-eager
m -tp 4 -pp 2 --distributed-executor-backend mp --disable-log-requests --kv_cache_dtype fp8 --max_model_len 4096
m --enable-auto-tool-choice --tool-call-parser hermes --chat-template t.jinja --generation-config vllm
m --speculative-config '{"method":"ngram","num_speculative_tokens":3}' --hf-overrides '{"a": 1}' -O3
""".strip().splitlines()


@pytest.mark.parametrize("line", PUBLIC)
def test_public_command_lines_are_accepted(line):
    parsed = parse(shlex.split(line))
    assert all(notice.startswith("-") and notice.endswith(".") for notice in parsed.notices)


def test_every_flag_has_one_meaning():
    flags = [flag for option in OPTIONS.values() for flag in (*option.flags, *option.sets)]
    flags += [row.flag for row in ACCEPTED]
    assert sorted(flags) == sorted(set(flags))


@pytest.mark.parametrize("row", ACCEPTED, ids=lambda row: row.flag)
def test_an_accepted_flag_is_answered_with_one_line(row):
    values = {"switch": [], "values": ["7", "8"], "json": ["[7]"], "value": ["7"]}[row.takes]
    notices = parse([row.flag, *values]).notices
    if "on" in row.quiet:  # a switch that asks for what is done anyway
        assert notices == ()
        return
    (notice,) = notices
    assert notice == f"{' '.join([row.flag, *values])}: {row.instead}."


@pytest.mark.parametrize("name", OPTIONS)
def test_every_field_is_served_from_each_of_its_spellings(name):
    option, default = OPTIONS[name], DEFAULTS[name]
    value = {bool: "", str: "text", dict: '{"a": 1}', int: "3", float: "0.5"}[type(default)]
    if option.choices:
        value = option.choices[-1]
    partner = ["--ssl-keyfile", "k", "--ssl-certfile", "c"] if name.startswith("ssl") else []
    seen = set()
    for flag in option.flags:
        words = [flag] if option.switch else [flag, value]
        if name == "max_total_tokens":
            words = [flag, "300"]
        config = parse([*partner, *words]).config
        seen.add(str(config.value(name)))
    assert len(seen) == 1
    assert seen != {str(default)}


def test_defaults_are_quiet_and_never_none():
    parsed = parse([])
    assert parsed.config == Config()
    assert parsed.notices == ()
    assert all(parsed.config.value(field.name) is not None for field in fields(Config))


@pytest.mark.parametrize(
    "line",
    [
        "--tp 1",
        "--kv-cache-dtype auto",
        "--disaggregation-mode null",
        "--radix-eviction-policy lru",
    ],
)
def test_asking_for_what_is_done_anyway_is_quiet(line):
    assert parse(line.split()).notices == ()


def test_a_backend_of_attention_is_asked_for_in_every_form_of_it():
    wishes = parse(["--attention-backend", "triton"]).config.wishes()
    assert wishes == dict.fromkeys(["attention", "dense_mla", "sparse_mla"], "triton")


def test_a_notice_is_given_once():
    assert len(parse(["--tp", "2", "--tp", "2"]).notices) == 1


def test_the_last_word_wins():
    assert parse(["--port", "1", "--port=2"]).config.port == 2
    assert (
        parse(["--no-enable-prefix-caching", "--enable-prefix-caching"]).config.disable_radix_cache
        is False
    )


def test_a_value_of_another_server_is_answered_with_what_is_used():
    parsed = parse(["--schedule-policy", "dfs-weight"])
    assert parsed.config.schedule_policy == "lpm"
    assert parsed.notices == (
        "--schedule-policy dfs-weight: lpm is used instead: it is the cache-aware order that is here.",
    )


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (
            "--max-running-request 3",
            "There is no option --max-running-request. Did you mean --max-running-requests?",
        ),
        ("--zzzzqqqq", "There is no option --zzzzqqqq. --help lists those there are."),
        ("--port http", "--port takes a whole number, not 'http'."),
        ("--port 70000", "--port must be between 0 and 65535, got 70000."),
        ("--page-size 0", "--page-size must be between 1 and 4096, got 0."),
        (
            "--mem-fraction-static 1.5",
            "--mem-fraction-static must be between 0.0 and 1.0, got 1.5.",
        ),
        (
            "--mem-fraction-static nan",
            "--mem-fraction-static must be between 0.0 and 1.0, got nan.",
        ),
        (
            "--chunked-prefill-size -2",
            "--chunked-prefill-size must be positive, 0 (chosen) or -1 (no chunks).",
        ),
        (
            "--max-total-tokens 8",
            "--max-total-tokens (8) must hold at least one page of --page-size (16) tokens.",
        ),
        ("--dtype int8", "--dtype takes one of auto, bfloat16, float16, float32, not 'int8'."),
        (
            "--json-model-override-args [1]",
            "--json-model-override-args takes a JSON object, not '[1]'.",
        ),
        ("--model-loader-extra-config {", "--model-loader-extra-config takes JSON, not '{'."),
        ("--ssl-keyfile k", "--ssl-keyfile and --ssl-certfile must be given together."),
        ("--port", "Argument --port: expected one argument."),
        ("a b", "detour serve does not know what to do with 'b'."),
        (
            "--config /nowhere.yaml",
            "The configuration file /nowhere.yaml cannot be read: No such file or directory.",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_sentence(line, sentence):
    with pytest.raises(ConfigError) as error:
        parse(line.split())
    assert error.value.message == sentence


def test_a_file_of_options_stands_under_the_command_line(tmp_path):
    path = tmp_path / "server.yaml"
    path.write_text(
        "model: here\nport: 1234\nmax_running_requests: 8\ndisable-radix-cache: true\ntp: 4\n"
        "enable-metrics: false\njson-model-override-args: {num_hidden_layers: 2}\nserved-model-name: [a, b]\n"
    )
    parsed = parse(["--config", str(path), "--port", "99"])
    config = parsed.config
    assert (config.model, config.port, config.max_running_requests) == ("here", 99, 8)
    assert config.disable_radix_cache
    assert config.model_overrides == {"num_hidden_layers": 2}
    assert config.served_model_name == "a,b"
    assert [notice.split(":")[0] for notice in parsed.notices] == ["--tp 4"]
    assert parse(["there", f"--config={path}"]).config.model == "there"


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("portt: 3", "There is no option --portt. Did you mean --port?"),
        ("a: [", "is not YAML"),
        ("[1, 2]", "must hold a mapping"),
    ],
)
def test_a_wrong_file_is_refused_with_a_sentence(tmp_path, text, part):
    path = tmp_path / "server.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=part.replace("?", r"\?")):
        parse(["--config", str(path)])


def test_the_environment_is_read_once_and_whole():
    read = read_environment(
        {"HF_TOKEN": "t", "HF_HUB_OFFLINE": "1", "DETOUR_CACHE": "/c", "DETOUR_API_KEY": "k"}
    )
    assert (read.hub_token, read.hub_offline, str(read.cache_dir), read.api_key) == (
        "t",
        True,
        "/c",
        "k",
    )
    assert str(read_environment({"XDG_CACHE_HOME": "/x"}).cache_dir) == "/x/detour"
