"""KVLayout: what one cache row is, owned by the page pool's tensors and handed to every writer and reader."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class KVLayout:
    """How a layer's KV lies in memory.

    name         grouped_query      keys and values, two tensors [pages, page_size, kv_heads, head_dim]
                 latent             one tensor [pages, page_size, 576] of bf16/float32: latent | rope key
                 latent_fp8_packed  one uint8 tensor [pages, page_size, 656]: 512 e4m3 | 4 fp32 scales | 64 bf16
                 index_keys_fp8     one uint8 tensor [pages, page_size * 132], page-planar: all keys, then all scales
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
