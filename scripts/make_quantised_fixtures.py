#!/usr/bin/env python3
"""Exports tiny quantised checkpoints with the packages that make the public ones: the test fixtures.

Each needs an environment of its own, apart from Detour's (neither package is a dependency):

    pip install torch transformers==5.24.0 accelerate nvidia-modelopt==0.47.0 requests pillow
    python scripts/make_quantised_fixtures.py modelopt tests/loading/fixtures

    pip install torch llmcompressor==0.14.0.1
    python scripts/make_quantised_fixtures.py compressed-tensors tests/loading/fixtures

Every folder gets the export as the package writes it, and `dequantised.safetensors`: what the
package itself makes of the packed weights; one has `original.safetensors`, the attention of layer 0
before it was quantised. Weights are random, with a few outliers; CPU suffices.
"""

import copy
import json
import shutil
import sys
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

TINY = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    # Wide enough for blocks of 128, the last of them not full.
    "llama-wide": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 160,
        "intermediate_size": 272,
        "num_hidden_layers": 1,
    },
    "qwen3_moe": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    # Experts alone are quantised, as the public GLM-5 checkpoints have it.
    "glm_moe_dsa": {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "num_key_value_heads": 4,
        "n_routed_experts": 4,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse"],
        "q_lora_rank": 32,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 16,
        "v_head_dim": 16,
        "index_n_heads": 16,
        "index_head_dim": 32,
        "index_topk": 16,
    },
}
Tensors = dict[str, torch.Tensor]


def model(name: str) -> transformers.PreTrainedModel:
    kind = name.split("-")[0]
    torch.manual_seed(20)
    values = {**TINY, **MODELS[name]}
    if kind == "glm_moe_dsa":
        del values["head_dim"]
    config = transformers.AutoConfig.for_model(kind, **values)
    made = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() > 1:
                outliers = (torch.rand_like(parameter, dtype=torch.float32) < 0.002) * 0.3
                parameter.add_(outliers * torch.randn_like(parameter))
    return made


def modules(tensors: Tensors, last: str) -> list[str]:
    """Modules with a tensor called `last`."""
    return sorted(name[: -len(last) - 1] for name in tensors if name.endswith(f".{last}"))


# --- nvidia-modelopt --------------------------------------------------------------------------------


def modelopt(folder: Path) -> None:
    import modelopt.torch.quantization as mtq  # noqa: PLC0415
    from modelopt.torch.export import export_hf_checkpoint  # noqa: PLC0415

    whole = mtq.NVFP4_DEFAULT_CFG
    experts = mtq.NVFP4_EXPERTS_ONLY_CFG
    for name, config in (("qwen3_moe", whole), ("glm_moe_dsa", experts), ("mixed", None)):
        made = model("qwen3_moe" if name == "mixed" else name)
        vocab = made.config.vocab_size

        def calibrate(module: torch.nn.Module, vocab: int = vocab) -> None:
            for _ in range(8):
                module(torch.randint(3, vocab, (2, 48)))

        first = "model.layers.0.self_attn."
        before = {n: t.clone() for n, t in made.state_dict().items() if n.startswith(first)}
        quantised = mtq.quantize(made, config or mixed(mtq), calibrate)
        target = folder / f"modelopt-{name}"
        shutil.rmtree(target, ignore_errors=True)
        export_hf_checkpoint(quantised, export_dir=target)
        if name == "qwen3_moe":
            save_file(before, target / "original.safetensors")
        finish(target, unpack_modelopt(load_file(target / "model.safetensors")))


def mixed(mtq) -> dict:  # type: ignore[no-untyped-def]
    """Experts in NVFP4, attention in FP8."""
    config = copy.deepcopy(mtq.NVFP4_EXPERTS_ONLY_CFG)
    fp8 = {"num_bits": (4, 3), "axis": None}
    for place in ("weight", "input"):
        name = f"*self_attn*{place}_quantizer"
        config["quant_cfg"].append({"quantizer_name": name, "cfg": fp8, "enable": True})
    return config


def unpack_modelopt(tensors: Tensors) -> Tensors:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor  # noqa: PLC0415

    out = {}
    for module in modules(tensors, "weight_scale"):
        packed, scale = tensors[f"{module}.weight"], tensors[f"{module}.weight_scale"]
        if packed.dtype != torch.uint8:
            out[f"{module}.weight"] = packed.float() * scale
            continue
        shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
        scales = {"scale": scale, "double_scale": tensors[f"{module}.weight_scale_2"]}
        whole = NVFP4QTensor(shape, torch.float32, packed)
        out[f"{module}.weight"] = whole.dequantize(torch.float32, block_sizes={-1: 16}, **scales)
    return out


# --- llm-compressor ---------------------------------------------------------------------------------


def compressed_tensors(folder: Path) -> None:
    from llmcompressor import oneshot  # noqa: PLC0415
    from llmcompressor.modifiers.quantization import QuantizationModifier  # noqa: PLC0415
    from tokenizers import Tokenizer, models  # noqa: PLC0415

    words = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words)
    for name, scheme in (
        ("qwen3_moe", "NVFP4A16"),
        ("llama", "FP8_DYNAMIC"),
        ("llama-wide", "FP8_BLOCK"),
    ):
        target = folder / f"compressed-{scheme.lower().replace('_', '-')}"
        with tempfile.TemporaryDirectory() as plain:
            model(name).save_pretrained(plain)
            tokenizer.save_pretrained(plain)
            made = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.bfloat16)
            ignore = ["lm_head", "re:.*mlp.gate$"]
            recipe = QuantizationModifier(targets="Linear", scheme=scheme, ignore=ignore)
            oneshot(model=made, recipe=recipe)
            shutil.rmtree(target, ignore_errors=True)
            made.save_pretrained(target, save_compressed=True)
        finish(target, unpack_compressed(target))


def unpack_compressed(target: Path) -> Tensors:
    from compressed_tensors.compressors import BaseCompressor  # noqa: PLC0415
    from compressed_tensors.quantization import QuantizationScheme  # noqa: PLC0415

    tensors = load_file(target / "model.safetensors")
    config = json.loads((target / "config.json").read_text())["quantization_config"]
    group = config["config_groups"]["group_0"]
    scheme = QuantizationScheme(**group)
    compressor = BaseCompressor.get_value_from_registry(group["format"])
    out = {}
    for module in modules(tensors, "weight_scale"):
        own = {name: tensors[name] for name in tensors if name.startswith(f"{module}.")}
        local = {name.removeprefix(f"{module}."): tensor for name, tensor in own.items()}
        out[f"{module}.weight"] = compressor.decompress(local, scheme)["weight"].contiguous()
    return out


def finish(target: Path, dequantised: Tensors) -> None:
    save_file(dequantised, target / "dequantised.safetensors")
    for file in target.iterdir():
        kept = ("config.json", "hf_quant_config.json")
        if file.name not in kept and file.suffix != ".safetensors":
            file.unlink()
        else:
            file.chmod(0o644)
    size = sum(file.stat().st_size for file in target.iterdir())
    print(f"{target}: {size:,} bytes, {len(dequantised)} quantised weights")


if __name__ == "__main__":
    {"modelopt": modelopt, "compressed-tensors": compressed_tensors}[sys.argv[1]](Path(sys.argv[2]))
