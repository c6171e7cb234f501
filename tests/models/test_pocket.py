"""The pocket model's training code: what it trains is the architecture that is served."""

import importlib
import json
import random
from pathlib import Path

import pytest
import torch
import transformers

from detour.text.tool_calls import find_tool_parser
from detour.text.tool_schema import Tools

SCRIPTS = Path(__file__).parents[2] / "scripts" / "pocket"


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.mark.parametrize("phase", ["dense", "sparse"])
def test_training_computes_what_transformers_does(script, phase, tmp_path):
    """A failure here is the trainer's mathematics, or a name or shape of what it saves."""
    config = script("presets").config(64, 3, 4, (4, 32), (16, 128))
    config["index_topk"] = 16 if phase == "sparse" else 128
    model = script("model").PocketGlm(config).eval()
    for one in model.parameters():
        torch.nn.init.normal_(one, std=0.3) if one.dim() == 1 else None
    script("train").export(model, tmp_path)
    oracle = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    saved = {k: v.float() for k, v in oracle.state_dict().items()}
    assert saved and oracle.config.index_topk == config["index_topk"]
    for name, module in oracle.named_modules():
        if name.endswith(("q_a_layernorm", "kv_a_layernorm")):
            module.variance_epsilon = config["rms_norm_eps"]  # see models/glm_moe_dsa.py
    rounded = {k: v.bfloat16().float() for k, v in model.state_dict().items()}
    rounded |= {k: v for k, v in model.state_dict().items() if k.endswith("correction_bias")}
    model.load_state_dict(rounded)
    ids = torch.randint(7, 1280, (2, 50), generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        found = model.lm_head(model(ids, phase)[0])
        wanted = oracle(ids).logits
    assert torch.allclose(found, wanted, atol=2e-4)


def test_the_indexer_alone_learns_while_it_is_distilled(script):
    model = script("model").PocketGlm(script("presets").config(64, 2, 4, (4, 32), (8, 64)))
    training = script("train").Training(model, [])
    for name, one in model.named_parameters():
        one.requires_grad_(".indexer." in name)
    ids = torch.randint(7, 1280, (2, 40), generator=torch.Generator().manual_seed(1))
    loss = training.model(ids, "distil")[1]
    loss.backward()
    assert loss.item() > 0
    for name, one in model.named_parameters():
        assert (one.grad is not None) == (".indexer." in name), name


@pytest.mark.slow
def test_answers_are_counted_whole_and_prompts_hardly(script, tmp_path):
    """What the model has to say, with the mark that ends its turn, weighs 1; no more does."""
    tokenizer = script("markup").write(tmp_path)
    encoder = script("batches").Encoder(tokenizer)
    task = script("tasks").Task(
        "recall",
        [
            {"role": "user", "content": "ant: 5, bee: fox\nWhat is bee?"},
            {"role": "assistant", "content": "fox", "reasoning_content": "bee: fox"},
        ],
    )
    ids, weights = encoder.encode(task, True, random.Random(1))
    told = [token for token, weight in zip(ids[1:], weights, strict=True) if weight == 1.0]
    text = tokenizer.decode(told, skip_special_tokens=False)
    assert text == "bee: fox</think>fox<|user|>"


def test_calls_are_written_as_the_parser_reads_them(script):
    markup, tasks = script("markup"), script("tasks")
    parser = find_tool_parser("auto", markup.TEMPLATE)
    assert parser is find_tool_parser("glm47")
    source = random.Random(2)
    for _ in range(20):
        task = tasks.calls(source, 300)
        if not task.messages[-1].get("tool_calls"):
            continue
        text = markup.render(task).rpartition("</think>")[2].removesuffix("<|observation|>")
        reading = parser(Tools(task.tools))
        pieces = [*reading.push(text), *reading.finish()]
        arguments = "".join(p.text for p in pieces if p.kind == "arguments")
        wanted = task.messages[-1]["tool_calls"][0]["function"]["arguments"]
        assert json.loads(arguments) == wanted


def test_a_sum_is_worked_out_digit_by_digit(script):
    assert script("tasks").column_sum(47, 38) == "7+8+0=15,4+3+1=8"
    assert script("tasks").column_sum(0, 0) == "0+0+0=0"
