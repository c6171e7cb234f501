"""Quantised checkpoints for tests: the tensors of a folder, packed as a public format packs them."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from detour.loading.scaled import pack_fp8, pack_nvfp4, unpack_scaled

Tensors = dict[str, torch.Tensor]
FP8 = torch.float8_e4m3fn


def nvfp4_modelopt(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """The tensors that stand for `module`.weight, and what they mean in float32."""
    packed = pack_nvfp4(weight)
    return {
        f"{module}.weight": packed.values,
        f"{module}.weight_scale": packed.scales,
        f"{module}.weight_scale_2": packed.of_row[0].clone(),
        f"{module}.input_scale": torch.tensor(0.5),
    }, unpack_scaled(packed)


def nvfp4_compressed(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """Its global scale, a power of two here, divides: so that both orders round alike."""
    packed = pack_nvfp4(weight, 6 * 448 * 2.0**-9)
    return {
        f"{module}.weight_packed": packed.values,
        f"{module}.weight_scale": packed.scales,
        f"{module}.weight_global_scale": 1 / packed.of_row[:1].clone(),
    }, unpack_scaled(packed)


def fp8_block(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    packed = pack_fp8(weight)
    return {
        f"{module}.weight": packed.values,
        f"{module}.weight_scale_inv": packed.scales,
    }, unpack_scaled(packed)


def fp8_tensor(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = weight.abs().max() / 448
    values = (weight / scale).to(FP8)
    return {
        f"{module}.weight": values,
        f"{module}.weight_scale": scale,
        f"{module}.input_scale": torch.tensor(0.25),
    }, values.float() * scale


def fp8_channel(module: str, weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    """compressed-tensors keeps such scales in bfloat16, a column of them."""
    scale = (weight.abs().amax(dim=1, keepdim=True) / 448).bfloat16()
    values = (weight / scale.float()).clamp(-448, 448).to(FP8)
    return {
        f"{module}.weight": values,
        f"{module}.weight_scale": scale,
    }, values.float() * scale.float()


Pack = Callable[[str, torch.Tensor], tuple[Tensors, torch.Tensor]]
PACKS: Mapping[str, Pack] = {
    "nvfp4-modelopt": nvfp4_modelopt,
    "nvfp4-compressed": nvfp4_compressed,
    "fp8-block": fp8_block,
    "fp8-tensor": fp8_tensor,
    "fp8-channel": fp8_channel,
}


def pack_folder(
    folder: Path, target: Path, pack: Pack, chosen: Callable[[str], bool] = lambda module: True
) -> Path:
    """`target` gets the quantised checkpoint; `target`-plain what its weights mean, in float32.

    chosen: which of the linear modules of the layers are packed.
    """
    packed: Tensors = {}
    plain: Tensors = {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        module = name.removesuffix(".weight")
        linear = tensor.dim() == 2 and ".layers." in name and not name.endswith("gate.weight")
        if linear and chosen(module):
            tensors, plain[name] = pack(module, tensor.float())
            packed |= tensors
        else:
            packed[name] = plain[name] = tensor
    for where, tensors in ((target, packed), (plain_of(target), plain)):
        where.mkdir(parents=True)
        save_file(tensors, where / "model.safetensors", metadata={"format": "pt"})
        (where / "config.json").write_bytes((folder / "config.json").read_bytes())
    return target


def plain_of(target: Path) -> Path:
    return target.with_name(f"{target.name}-plain")


def rewrite(folder: Path, change: Callable[[Tensors], None]) -> Path:
    """Let `change` alter the tensors of a folder of one file."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})
    return folder


def set_config(folder: Path, **fields) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))
    return folder
