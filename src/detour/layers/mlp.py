"""The SwiGLU block of a dense layer (Shazeer 2020)."""

from torch import Tensor

from detour.layers.linear import Linear, Part
from detour.layers.weight import Site
from detour.ops.silu_mul import silu_mul


class GatedMLP:
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, site: Site, name: str, hidden: int, width: int, *, bias: bool) -> None:
        gate, up = (Part(f"{name}.{part}", width, width) for part in ("gate_proj", "up_proj"))
        self.gate_up = Linear(site, (gate, up), hidden, bias=bias, split="outputs")
        down = Part(f"{name}.down_proj", hidden, hidden)
        self.down = Linear(site, (down,), width, bias=bias, split="inputs")
        self.gated = site.routes.route(
            silu_mul, {"dtype": site.dtype, "width": self.gate_up.outputs // 2}
        )

    def __call__(self, x: Tensor) -> Tensor:
        """[T, hidden] -> [T, hidden]."""
        return self.down(self.gated(self.gate_up(x)))
