"""The embedded model as its GGUF packs it, against transformers on the same file expanded."""

from pathlib import Path

import gguf
import pytest
import torch
import transformers
from step_driver import Driver, make_runner

from detour.text.tokenizer import open_tokenizer

NAME = "smollm2-135m-instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
PLACES = (Path(__file__).parents[2] / ".cache", Path.home() / ".cache/detour")
FOUND = [place / NAME for place in PLACES if (place / NAME).is_file()]
QUESTION = (
    "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
    "<|im_end|>\n<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    "<|im_start|>assistant\n"
)


# GGUF's tensor names in transformers' words, "blk.<n>." aside.
NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
}


def expanded(path: Path) -> transformers.PreTrainedModel:
    """The file's weights in transformers' model, without our own reader."""
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        *layer, part = tensor.name.removesuffix(".weight").split(".")
        if part in ("attn_q", "attn_k"):  # llama.cpp lays the rotated pairs side by side
            values = values.reshape(-1, 32, 2, 576).swapaxes(1, 2).reshape(-1, 576)
        prefix = f"model.layers.{layer[1]}." if layer else ""
        weights[f"{prefix}{NAMES[part]}.weight"] = torch.from_numpy(values.copy())
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model = transformers.LlamaForCausalLM(config)
    model.load_state_dict(weights)
    return model.float().eval()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.skipif(not FOUND, reason="the embedded model was not fetched")
@pytest.mark.parametrize("chunk", [1000, 11])
def test_greedy_text_is_transformers(chunk):
    path = FOUND[0]
    oracle = expanded(path)
    tokenizer = open_tokenizer(path)
    ids = tokenizer.encode(QUESTION)
    with torch.inference_mode():
        logits = oracle(torch.tensor([ids])).logits[0]
        wanted = oracle.generate(
            torch.tensor([ids]),
            attention_mask=torch.ones(1, len(ids), dtype=torch.long),
            max_new_tokens=40,
            do_sample=False,
            repetition_penalty=1.0,
        )[0, len(ids) :].tolist()
    driver = Driver(make_runner(path))
    driver.admit(0, ids)
    got = driver.logits([(0, len(ids))])[0]
    assert (got - logits).abs().max() < 1e-3 * logits.abs().max()
    driver.admit(1, ids)
    while (left := len(ids) - driver.sequences[1].computed) > 0:
        driver.run([(1, min(chunk, left))])
    for _ in wanted[1:]:
        driver.run([(1, 1)])
    assert driver.sequences[1].known[len(ids) :] == wanted
    assert "Paris" in tokenizer.decode(wanted)
