"""The routed experts of one layer: how their weights are stored, and their product.

Knows no router and no shared expert. Ranks share the experts' widths.
"""

from torch import Tensor

from detour.layers.weight import Piece, Site
from detour.ops.moe import moe


class Experts:
    """`count` SwiGLU blocks [hidden -> width -> hidden] called `name`.0, `name`.1, ..."""

    def __init__(self, site: Site, name: str, hidden: int, width: int, count: int) -> None:
        share = site.group.share(width, "expert columns")
        own = width // share.parts
        gate_up, down = [], []
        for expert in range(count):
            prefix = f"{name}.{expert}"
            for place, part in enumerate(("gate_proj", "up_proj")):
                into = (expert, slice(place * own, (place + 1) * own))
                gate_up.append(
                    Piece(f"{prefix}.{part}.weight", (width, hidden), rows=share, into=into)
                )
            down.append(
                Piece(f"{prefix}.down_proj.weight", (hidden, width), columns=share, into=(expert,))
            )
        self.gate_up = site.tensor((count, 2 * own, hidden), *gate_up, spread=hidden**-0.5)
        self.down = site.tensor((count, hidden, own), *down, spread=width**-0.5)
        self.compute = site.routes.route(
            moe, {"dtype": site.dtype, "experts": count, "hidden": hidden, "width": own}
        )

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [T, hidden], weights [T, k] float32, chosen [T, k] -> [T, hidden] of this rank's widths.

        The ranks' results add up to the layer's.
        """
        result: Tensor = self.compute(x, self.gate_up.value, self.down.value, weights, chosen)
        return result
