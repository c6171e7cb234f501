"""A model told of without its weights is the model that loading gives: bytes, forms and routes."""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch
from tiny_glm import MODELS

from detour.errors import ConfigError
from detour.ops.device import Device, probe
from detour.worker.build import build_model
from detour.worker.outline import outline
from detour.worker.settings import WorkerSettings

FIXTURES = Path(__file__).parents[1] / "loading" / "fixtures"
H200 = Device(torch.device("cuda"), "NVIDIA H200", (9, 0), 232_448, 132, frozenset())
# zai-org/GLM-5 with routed experts in NVFP4, as its published checkpoints are.
GLM5 = {
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "vocab_size": 154_880,
    "hidden_size": 6144,
    "intermediate_size": 12_288,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 78,
    "first_k_dense_replace": 3,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.5,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 202_752,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "num_nextn_predict_layers": 1,
    "quantization_config": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "ignore": [
            *("lm_head", "model.embed_tokens*", "*self_attn*", "*mlp.gate", "*shared_experts*"),
            *(f"model.layers.{layer}.mlp*" for layer in range(3)),
        ],
    },
}


def config_file(folder, config):
    file = folder / "model.json"
    file.write_text(json.dumps(config))
    return file


def config_folder(folder, config):
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("export", sorted(folder.name for folder in FIXTURES.iterdir()))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_is_told_of_as_it_loads(export, dtype):
    settings = WorkerSettings(FIXTURES / export, device="cpu", dtype=dtype, progress=False)
    told, built = outline(settings, probe("cpu")), build_model(settings)
    loaded = [parameter.nbytes for parameter in built.site.parameters]
    assert [weight.nbytes for weight in told.weights] == loaded
    chosen = {key: route.current.name for key, route in told.routes.chosen.items()}
    assert {
        key: route.current.name for key, route in built.site.routes.chosen.items()
    }.items() <= chosen.items()


@pytest.mark.parametrize("export", sorted(folder.name for folder in FIXTURES.iterdir()))
def test_the_configuration_alone_tells_the_same(export, tmp_path):
    """As far as it can: what is packed, and what that takes."""
    file = tmp_path / "model.json"
    file.write_text((FIXTURES / export / "config.json").read_text())
    alone, there = (
        outline(WorkerSettings(path, dtype="bfloat16"), probe("cpu"))
        for path in (file, FIXTURES / export)
    )
    packed = [
        [(w.form, w.nbytes) for w in told.weights if w.form.startswith(("NV", "FP8"))]
        for told in (alone, there)
    ]
    assert packed[0] == packed[1] != []


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8_e4m3"])
def test_dummy_weights_are_told_of_as_they_are_made(name, kv_dtype, tmp_path):
    if kv_dtype != "auto" and "kv_lora_rank" not in MODELS[name]:
        pytest.skip("no latents")
    folder = config_folder(tmp_path, MODELS[name])
    settings = WorkerSettings(
        folder, device="cpu", dtype="bfloat16", kv_dtype=kv_dtype, load_format="dummy"
    )
    told, built = outline(settings, probe("cpu")), build_model(settings)
    assert told.weight_bytes == built.weight_bytes
    assert told.model.kv_spec == built.model.kv_spec


def test_glm5_at_eight_ranks(tmp_path):
    """The figures that its published checkpoints and serving logs show."""
    settings = WorkerSettings(config_file(tmp_path, GLM5), kv_dtype="fp8_e4m3")
    told = outline(settings, H200, ranks=8)
    assert 55 < told.weight_bytes / 2**30 < 56
    assert round(told.kv_bytes_per_token / 1024, 1) == 60.0
    parts, forms = Counter(), {}
    for weight in told.weights:
        parts[weight.part] += weight.nbytes / 1e9
        forms.setdefault(weight.part, set()).add(weight.form)
    assert 50.9 < parts["routed experts"] < 51.0 and forms["routed experts"] == {"NVFP4"}
    assert 5.3 < parts["attention"] < 5.5 and forms["attention"] == {"bfloat16"}
    assert set(parts) >= {"embedding", "output head", "indexer", "shared expert", "router"}
    experts = {route.current.name for (op, _), route in told.routes.chosen.items() if "moe" in op}
    assert experts == {"triton"}, "of the device that was asked about, not of this one"


def test_heads_that_ranks_cannot_share_are_a_sentence(tmp_path):
    settings = WorkerSettings(config_file(tmp_path, GLM5))
    with pytest.raises(ConfigError, match="cannot be shared by 7 ranks"):
        outline(settings, H200, ranks=7)
