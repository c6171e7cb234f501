"""RMSNorm as a layer: a weight and the op."""

from torch import Tensor

from detour.layers.weight import Piece, Site
from detour.ops.norm import add_rms_norm, rms_norm


class RMSNorm:
    def __init__(self, site: Site, name: str, width: int, eps: float) -> None:
        self.weight = site.tensor((width,), Piece(f"{name}.weight", (width,)))
        self.eps = eps
        need = {"dtype": site.dtype, "width": width}
        self.norm = site.routes.route(rms_norm, need)
        self.add_norm = site.routes.route(add_rms_norm, need)

    def __call__(self, x: Tensor) -> Tensor:
        """[..., width] -> the same shape."""
        normed: Tensor = self.norm(x, self.weight.value, self.eps)
        return normed

    def after_adding(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual); neither argument is used afterwards."""
        result: tuple[Tensor, Tensor] = self.add_norm(x, residual, self.weight.value, self.eps)
        return result
