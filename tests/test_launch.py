"""What the front finds out before an engine runs: its port, its model, its words to the person."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from detour.config.environment import read_environment
from detour.config.options import Config
from detour.engine.channel import Ready
from detour.errors import CheckpointError, ConfigError
from detour.launch import chat_template, listen, open_model, origins, welcome
from detour.text.reasoning import Thinking
from detour.text.tool_calls import find_tool_parser

READY = Ready(
    num_pages=65,
    page_size=16,
    max_slots=8,
    context_length=1024,
    vocab_size=320,
    kv_bytes_per_token=1000,
    eos_ids=(2,),
    weight_bytes=5_000_000,
    dtype="float32",
    device="cpu",
    backends={"gemm": "native"},
)


@pytest.fixture
def environment(tmp_path):
    return replace(read_environment({}), cache_dir=tmp_path / "cache", hub_offline=True)


def test_an_occupied_port_is_told():
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"Cannot listen on 127.0.0.1:{port}: Address already"
        ):
            listen("127.0.0.1", port)


@pytest.mark.parametrize(
    ("text", "names"),
    [("*", ("*",)), ("", ()), ("a, b", ("a", "b")), ('["http://x"]', ("http://x",))],
)
def test_origins(text, names):
    assert origins(text) == names


def test_origins_that_are_no_list():
    with pytest.raises(ConfigError, match="--allowed-origins takes a JSON list or names"):
        origins("[x")


def test_the_model_as_the_front_needs_it(tiny_llama, environment):
    config = Config(
        model=str(tiny_llama), served_model_name="a,b", api_key="k", request_timeout=9.0
    )
    model = open_model(config, environment)
    assert model.path == tiny_llama
    assert model.settings.names == ("a", "b")
    assert (model.settings.api_key, model.settings.default_deadline) == ("k", 9.0)
    assert model.settings.server_config["api_key"] == "***"
    assert model.tokenizer.decode(model.tokenizer.encode("abc")) == "abc"


def test_a_chat_template_of_ones_own(tiny_llama, environment, tmp_path):
    tokenizer = open_model(Config(model=str(tiny_llama)), environment).tokenizer
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0]['content'] }}!")
    template = chat_template(str(file), tokenizer)
    assert template.render([{"role": "user", "content": "hi"}], [], True, False, {}) == "hi!"
    with pytest.raises(ConfigError, match="--chat-template /no/file cannot be read"):
        chat_template("/no/file", tokenizer)


def test_parsers_are_found_by_name_or_by_the_template(tiny_llama, environment, tmp_path):
    template = tmp_path / "glm.jinja"
    template.write_text("<tool_call>{{ name }}<arg_key></think>")
    options = {"model": str(tiny_llama), "chat_template": str(template)}
    syntax = open_model(Config(**options), environment).settings.syntax
    assert syntax.tool_parser is find_tool_parser("glm47") and syntax.thinking is None
    syntax = open_model(Config(reasoning_parser="auto", **options), environment).settings.syntax
    assert syntax.thinking == Thinking()
    for wrong in ({"reasoning_parser": "glm99"}, {"tool_call_parser": "glm99"}):
        with pytest.raises(ConfigError, match="no .* parser 'glm99'; there are: auto, "):
            open_model(Config(**options, **wrong), environment)


def test_a_model_without_a_tokenizer_is_refused_unless_it_is_a_dummy(
    tiny_llama, environment, tmp_path
):
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(tiny_llama / "config.json", bare)
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        open_model(Config(model=str(bare)), environment)
    dummy = Config(model=str(bare), load_format="dummy")
    assert open_model(dummy, environment).tokenizer.vocab_size == 300
    large = replace(dummy, model_overrides={"vocab_size": 50000})
    with pytest.raises(CheckpointError, match="The embedded model is not in"):
        open_model(large, environment)
    small = replace(dummy, model_overrides={"vocab_size": 200})
    with pytest.raises(ConfigError, match="has 300 tokens where this model has 200"):
        open_model(small, environment)


def test_the_welcome_says_what_runs_and_a_line_to_try(tiny_llama, environment):
    config = Config(model=str(tiny_llama), api_key="secret")
    settings = open_model(config, environment).settings
    said = welcome(config, settings, READY, "http://127.0.0.1:1")
    assert f"serves {tiny_llama} at http://127.0.0.1:1" in said
    assert "1,024 tokens (1 MB), 8 sequences at once" in said
    assert "gemm native" in said
    assert "curl http://127.0.0.1:1/v1/chat/completions" in said
    assert "secret" not in said


def test_the_cache_folder_of_a_flag_wins(environment, tmp_path):
    with pytest.raises(CheckpointError, match=str(tmp_path / "mine")):
        open_model(Config(cache_dir=str(Path(tmp_path / "mine"))), environment)
