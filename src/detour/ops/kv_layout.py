"""KVLayout: what one cache row is, owned by the page pool's tensors and handed to every writer and reader."""

from dataclasses import dataclass

import torch

LATENT_BLOCK = 128  # numbers of a packed latent row that share a scale


@dataclass(frozen=True)
class KVLayout:
    """How a layer's KV lies in memory.

    name         grouped_query      keys and values, two tensors [pages, page_size, kv_heads, head_dim]
                 latent             one tensor [pages, page_size, 576] of bf16/float32: latent | rope key
                 latent_fp8_packed  one uint8 tensor [pages, page_size, 656]: 512 e4m3 | 4 fp32 scales | 64 bf16
                 index_keys         one tensor [pages, page_size, 128] floating
                 index_keys_fp8     one uint8 tensor [pages, page_size, 132]; a page is all its keys, then its scales
    """

    name: str
    dtype: torch.dtype  # of the stored numbers; uint8 for packed rows
    heads: int  # kv heads; 1 for latent and index rows
    width: int  # head_dim, or elements a row
    tensors: int  # 2 for grouped_query, else 1

    @property
    def bytes_per_token(self) -> int:
        """Bytes a token takes in one layer."""
        return self.tensors * self.heads * self.width * self.dtype.itemsize


def grouped_query(dtype: torch.dtype, kv_heads: int, head_dim: int) -> KVLayout:
    return KVLayout("grouped_query", dtype, kv_heads, head_dim, 2)


def latent(dtype: torch.dtype, rank: int, rope: int) -> KVLayout:
    """Rows of `rank` normalised latent numbers, then `rope` rotated key numbers."""
    return KVLayout("latent", dtype, 1, rank + rope, 1)


def latent_fp8_packed(rank: int, rope: int) -> KVLayout:
    """Rows of bytes: `rank` e4m3 | a float32 scale per LATENT_BLOCK of them | `rope` bfloat16."""
    width = rank + 4 * -(-rank // LATENT_BLOCK) + 2 * rope
    return KVLayout("latent_fp8_packed", torch.uint8, 1, width, 1)


def index_keys_fp8(width: int) -> KVLayout:
    """`width` e4m3 and one float32 scale a token; a page holds all its keys, then all its scales."""
    return KVLayout("index_keys_fp8", torch.uint8, 1, width + 4, 1)


def index_keys(dtype: torch.dtype, width: int) -> KVLayout:
    """Unquantised index keys [pages, page_size, width], where selections must be exact."""
    return KVLayout("index_keys", dtype, 1, width, 1)
