// RMSNorm of one row, rounded as the separate steps of the op round.
#pragma once
#include <cmath>
#include <cstdint>
#include "vector.h"

namespace {

template <class S>
inline float square_sum(const S* x, int64_t width) {
  f8 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  int64_t i = 0;
  for (; i + 32 <= width; i += 32)
    for (int v = 0; v < 4; v++) {
      f8 a = load(x + i + 8 * v);
      sums[v] = _mm256_fmadd_ps(a, a, sums[v]);
    }
  for (; i + 8 <= width; i += 8) {
    f8 a = load(x + i);
    sums[0] = _mm256_fmadd_ps(a, a, sums[0]);
  }
  float total = sum8(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
  for (; i < width; i++) total += widen(x[i]) * widen(x[i]);
  return total;
}

template <class S>
inline void normalise(const S* x, const S* weight, float eps, int64_t width, S* out) {
  const float scale = 1.0f / std::sqrt(square_sum(x, width) / width + eps);
  const f8 scales = _mm256_set1_ps(scale);
  int64_t i = 0;
  for (; i + 8 <= width; i += 8)
    store(out + i, _mm256_mul_ps(rounded(_mm256_mul_ps(load(x + i), scales), x), load(weight + i)));
  for (; i < width; i++) put(out + i, rounded(widen(x[i]) * scale, x) * widen(weight[i]));
}

}  // namespace
