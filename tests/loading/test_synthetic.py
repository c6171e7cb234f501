"""Tiny checkpoints: whole, the same for the same seed, and readable by transformers."""

import json

import pytest
import torch
from transformers import AutoTokenizer

from detour.loading.checkpoint import open_checkpoint
from detour.loading.synthetic import random_weight, write_checkpoint
from detour.loading.tiny_tokenizer import vocabulary
from detour.text.tokenizer import open_tokenizer

CONFIG = {
    "model_type": "llama",
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 320,
}
SHAPES = {"model.embed_tokens.weight": (320, 16), "model.norm.weight": (16,), "x.bias": (8,)}


def test_weights_depend_on_seed_and_name_alone(tmp_path):
    one = open_checkpoint(write_checkpoint(tmp_path / "a", CONFIG, SHAPES, seed=1))
    two = open_checkpoint(write_checkpoint(tmp_path / "b", CONFIG, SHAPES, seed=1, shards=2))
    other = open_checkpoint(write_checkpoint(tmp_path / "c", CONFIG, SHAPES, seed=2))
    for name in SHAPES:
        assert torch.equal(one.read(name), two.read(name))
        assert not torch.equal(one.read(name), other.read(name))
    assert torch.equal(one.read("x.bias"), random_weight("x.bias", (8,), 1))


def test_the_folder_is_a_model_of_its_type(tmp_path):
    folder = write_checkpoint(tmp_path, CONFIG, SHAPES, dtype=torch.bfloat16)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config["dtype"] == "bfloat16"
    assert checkpoint.read("x.bias").dtype == torch.bfloat16
    written = json.loads((folder / "config.json").read_text())
    tokenizer = open_tokenizer(folder)
    assert tokenizer.eos_ids == (3, 0)
    assert sorted(written["eos_token_id"]) == [0, 3] and written["bos_token_id"] == tokenizer.bos_id
    chat = [{"role": "user", "content": "Hi"}]
    oracle = AutoTokenizer.from_pretrained(folder)
    assert oracle.apply_chat_template(chat, tokenize=False).startswith("<|im_start|>user\nHi")


def test_the_vocabulary_must_fit(tmp_path):
    assert len(vocabulary()) == 300
    with pytest.raises(ValueError, match="at least 300, got 200"):
        write_checkpoint(tmp_path, {**CONFIG, "vocab_size": 200}, SHAPES)
