"""What every model offers to the worker. Knows no particular architecture."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from torch import Tensor

from detour.layers.weight import Site
from detour.ops.batch import Batch
from detour.ops.kv_layout import KVLayout

LayerKV = tuple[Tensor, ...]  # one layer's cache tensors, as its layouts say, one after the other


class Model(Protocol):
    """A causal language model on one rank.

    Built on a Site without memory; its parameters are then loaded or filled through the Site.
    """

    @property
    def vocab_size(self) -> int: ...

    @property
    def longest_context(self) -> int:
        """Tokens of one sequence that the checkpoint is made for."""
        ...

    @property
    def kv_spec(self) -> Sequence[tuple[KVLayout, ...]]:
        """What each layer stores per token; same order as `forward`'s `kv`."""
        ...

    @property
    def whole_until(self) -> int:
        """Tokens of context up to which tokens attend to all before them; 0 = they always do."""
        ...

    def plan(self, batch: Batch) -> Any:
        """What the layers of one step share; handed to `forward` with the same batch."""
        ...

    def forward(self, batch: Batch, plan: Any, kv: Sequence[LayerKV]) -> Tensor:
        """Hidden states [T, H] after the last norm; writes this step's KV."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[S, H] -> [S, vocab_size] float32."""
        ...

    def transient_bytes(self, tokens: int, context: int) -> int:
        """The most that a step of so many tokens takes because its sequences are so long.

        A trial step of short sequences does not show it.
        """
        ...

    def ignored(self, name: str) -> bool:
        """Whether a checkpoint may hold this tensor although the model has no place for it."""
        ...


class Architecture(Protocol):
    """What a module of this folder offers: `read` a configuration, `build` the model of it."""

    def read(self, config: Mapping[str, Any]) -> Any:
        """The module's own frozen configuration. Raises CheckpointError naming field and value."""
        ...

    def build(self, config: Any, site: Site, kv_dtype: Any) -> Model: ...
