"""Gumbel noise as a pure function of (seed, position, token id).

Counter-based: no state, no generator, so a request draws the same noise alone or in a batch, in the
first run of a step or the second, on any device. All integer arithmetic wraps modulo 2^32 or 2^64
and gives the same bits on a CPU and on CUDA.
"""

import torch
from torch import Tensor

# Published mixing constants: splitmix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number
# generators", 2014) for a row's key, the 32-bit finalisers of murmur3 and "lowbias32" for a token's
# number; written as signed numbers because torch's int32 and int64 are signed.
_GOLDEN64 = 0x9E3779B97F4A7C15 - 2**64
_SPLIT_A = 0xBF58476D1CE4E5B9 - 2**64
_SPLIT_B = 0x94D049BB133111EB - 2**64
_GOLDEN32 = 0x9E3779B9 - 2**32
_LOW_A = 0x7FEB352D
_LOW_B = 0x846CA68B - 2**32
_MURMUR_A = 0x85EBCA6B - 2**32
_MURMUR_B = 0xC2B2AE35 - 2**32

_NUMBERS = 2**31  # a token's number is uniform over [0, 2^31)
_BELOW_ONE = 1.0 - 2.0**-24


def _shift64(number: Tensor, bits: int) -> Tensor:
    shifted: Tensor = (number >> bits) & (2 ** (64 - bits) - 1)
    return shifted


def _split_mix(number: Tensor) -> Tensor:
    number = (number ^ _shift64(number, 30)) * _SPLIT_A
    number = (number ^ _shift64(number, 27)) * _SPLIT_B
    return number ^ _shift64(number, 31)


def row_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """seeds, positions int64 [R] -> int32 [R, 2]: 64 well-mixed bits per (seed, position)."""
    keys: Tensor = _split_mix(_split_mix(seeds + _GOLDEN64) + positions * _GOLDEN64)
    return keys[:, None].view(torch.int32)


def _fold(number: Tensor, bits: int) -> Tensor:
    """number ^= number >>> bits, in place, of int32."""
    return number.bitwise_xor_((number >> bits).bitwise_and_(2 ** (32 - bits) - 1))


def token_numbers(keys: Tensor, tokens: Tensor) -> Tensor:
    """keys int32 [R, 2], tokens int32 [V] or [R, K] -> int32 [R, V or K], uniform over [0, 2^31).

    The token id is spread first (murmur3's finaliser), then keyed by both halves of the row's key.
    """
    spread = tokens * _GOLDEN32
    spread = _fold(_fold(_fold(spread, 16).mul_(_MURMUR_A), 13).mul_(_MURMUR_B), 16)
    number = _fold(spread ^ keys[:, :1], 16).mul_(_LOW_A)
    number = _fold(number.add_(keys[:, 1:]), 15).mul_(_LOW_B)
    return _fold(number, 16).bitwise_and_(_NUMBERS - 1)


def gumbel(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Standard Gumbel noise, float32 [R, V or K].

    seeds, positions int64 [R]; tokens int32 [V] or [R, K].

    g = -log(-log(1 - v)) with v = (number + 1/2) / 2^31: written through 1 - v so that large noise,
    the kind that wins, comes from small v, where float32 is fine-grained. g lies in (-2.9, 22.2).
    """
    number = token_numbers(row_keys(seeds, positions), tokens)
    uniform = number.to(torch.float32).add_(0.5).mul_(1.0 / _NUMBERS).clamp_(max=_BELOW_ONE)
    return uniform.neg_().log1p_().neg_().log_().neg_()
