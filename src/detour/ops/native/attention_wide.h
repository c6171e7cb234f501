// Attention to one block of positions through float arithmetic, on float or bf16 (AVX2).
#pragma once
#include <algorithm>
#include <cmath>
#include "attention_block.h"
#include "vector.h"

namespace {

// scores[h][0..31] = scale * q[h] . keys, for H query heads and 32 keys given by their addresses.
template <int D, int H, class S>
inline void score(const float* q, const S* const* keys, int64_t width, float scale,
                  float (*scores)[BLOCK]) {
  const int64_t depth = D ? D : width;
  for (int j = 0; j < BLOCK; j += 4) {
    f8 sums[H][4];
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) sums[h][v] = _mm256_setzero_ps();
    for (int64_t i = 0; i < depth; i += 8) {
      f8 a[H];
#pragma GCC unroll 4
      for (int h = 0; h < H; h++) a[h] = _mm256_loadu_ps(q + h * depth + i);
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) {
        const f8 key = load(keys[j + v] + i);
#pragma GCC unroll 4
        for (int h = 0; h < H; h++) sums[h][v] = _mm256_fmadd_ps(a[h], key, sums[h][v]);
      }
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; h++)
      _mm_store_ps(scores[h] + j, _mm_mul_ps(sums4(sums[h]), _mm_set1_ps(scale)));
  }
}

// out[h] = out[h] * keep[h] + weights[h] . values, over the first n values given by their addresses.
template <int V, int H, class S>
inline void gather_part(float (*weights)[BLOCK], const S* const* values, int n, int64_t width,
                        const float* keep, float* out) {
  f8 sums[H][V];
#pragma GCC unroll 4
  for (int h = 0; h < H; h++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++)
      sums[h][v] = _mm256_mul_ps(_mm256_set1_ps(keep[h]), _mm256_load_ps(out + h * width + 8 * v));
  for (int j = 0; j < n; j++) {
    f8 w[H];
#pragma GCC unroll 4
    for (int h = 0; h < H; h++) w[h] = _mm256_broadcast_ss(weights[h] + j);
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) {
      const f8 value = load(values[j] + 8 * v);
#pragma GCC unroll 4
      for (int h = 0; h < H; h++) sums[h][v] = _mm256_fmadd_ps(w[h], value, sums[h][v]);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; h++)
#pragma GCC unroll 4
    for (int v = 0; v < V; v++) _mm256_store_ps(out + h * width + 8 * v, sums[h][v]);
}

template <int H, class S>
inline void gather(float (*weights)[BLOCK], const S* const* values, int n, int64_t width,
                   const float* keep, float* out) {
  const S* moved[BLOCK];
  int64_t i = 0;
  for (; i + 32 <= width; i += 32) {
    for (int j = 0; j < n; j++) moved[j] = values[j] + i;
    gather_part<4, H>(weights, moved, n, width, keep, out + i);
  }
  for (; i < width; i += 8) {
    for (int j = 0; j < n; j++) moved[j] = values[j] + i;
    gather_part<1, H>(weights, moved, n, width, keep, out + i);
  }
}

// One block of positions for H query heads of a token, which share keys and values: n of them are seen.
template <int D, int H, class S>
__attribute__((noinline)) void walk_block(const float* q, const S* const* keys,
                                          const S* const* values, int n, int64_t width,
                                          float scale, Running* states, float* out) {
  alignas(32) float scores[H][BLOCK];
  float keep[H];
  score<D, H>(q, keys, width, scale, scores);
  for (int h = 0; h < H; h++) {
    float* row = scores[h];
    for (int j = n; j < BLOCK; j++) row[j] = -INFINITY;
    f8 most = _mm256_max_ps(_mm256_max_ps(_mm256_load_ps(row), _mm256_load_ps(row + 8)),
                            _mm256_max_ps(_mm256_load_ps(row + 16), _mm256_load_ps(row + 24)));
    const float highest = std::max(states[h].highest, max8(most));
    f8 sum = _mm256_setzero_ps();
    for (int j = 0; j < BLOCK; j += 8) {
      f8 weight = exp8(_mm256_sub_ps(_mm256_load_ps(row + j), _mm256_set1_ps(highest)));
      _mm256_store_ps(row + j, weight);
      sum = _mm256_add_ps(sum, weight);
    }
    keep[h] = _mm256_cvtss_f32(exp8(_mm256_set1_ps(states[h].highest - highest)));
    states[h] = {highest, states[h].total * keep[h] + sum8(sum)};
  }
  gather<H>(scores, values, n, width, keep, out);
}

// What attention.cpp's walk computes with: see there.
template <int D, class S, class C = S>
struct Wide {
  using Number = S;
  using Cached = C;
  using Query = float;

  static void take(const S* q, int64_t width, float* query) {
    for (int64_t i = 0; i < width; i += 8) store(query + i, load(q + i));
  }

  template <int H>
  static void block(const float* q, const C* const* keys, const C* const* values, int n, int64_t width,
                    float scale, Running* states, float* sums) {
    walk_block<D, H>(q, keys, values, n, width, scale, states, sums);
  }

  static void deliver(const float* sums, float share, int64_t width, S* out) {
    for (int64_t i = 0; i < width; i += 8)
      store(out + i, _mm256_mul_ps(_mm256_set1_ps(share), _mm256_load_ps(sums + i)));
  }
};

}  // namespace
