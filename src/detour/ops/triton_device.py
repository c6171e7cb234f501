"""Whether Triton kernels can run on a device: a GPU, or a CPU that a test marks as interpreting them."""

from detour.ops.device import Device

# A test that sets TRITON_INTERPRET=1 adds this to Device.instructions; a server never does.
INTERPRETER = "triton_interpreter"

# e4m3 conversions in hardware came with this compute capability.
FP8 = (8, 9)


def triton_reasons(device: Device, capability: tuple[int, int] = (8, 0)) -> list[str]:
    """Why Triton kernels that need `capability` cannot run here; empty = they can."""
    if device.is_cuda:
        if device.capability < capability:
            wanted, found = (".".join(map(str, pair)) for pair in (capability, device.capability))
            return [f"its kernels need compute capability {wanted}, {device.name} has {found}"]
        return []
    if INTERPRETER in device.instructions:
        return []
    return ["Triton kernels need a CUDA device"]


def interprets(device: Device) -> bool:
    return not device.is_cuda
