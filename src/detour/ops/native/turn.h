// Rope on 2 * half numbers, from one place to another.
#pragma once
#include <cstdint>
#include "vector.h"

namespace {

// Pairs are (2i, 2i + 1) if interleaved, else (i, i + half).
template <class S, class T>
inline void turn(const S* x, const float* cos, const float* sin, int64_t half, bool interleaved, T* out) {
  for (int64_t i = 0; i < half; i++) {
    const int64_t a = interleaved ? 2 * i : i, b = interleaved ? 2 * i + 1 : i + half;
    const float one = widen(x[a]), two = widen(x[b]);
    put(out + a, one * cos[i] - two * sin[i]);
    put(out + b, two * cos[i] + one * sin[i]);
  }
}

}  // namespace
