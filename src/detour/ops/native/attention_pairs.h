// Attention to one block of positions through AVX512_BF16's products of pairs: pairs of a head's numbers for
// the scores, pairs of positions for the sums, whose weights are rounded to bfloat16.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstring>
#include "attention_block.h"
#include "vector.h"

#ifdef __AVX512BF16__

namespace {

typedef __m512 f16;

inline __m512bh pairs(const bf16* p) { return (__m512bh)_mm512_loadu_si512(p); }

// As exp8.
inline f16 exp16(f16 x) {
  const __mmask16 seen = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_GE_OQ);
  x = _mm512_max_ps(x, _mm512_set1_ps(-88.0f));
  f16 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)),
                               _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  f16 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  f16 p = _mm512_set1_ps(1.0f / 720);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 120));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 24));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f / 6));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
  return _mm512_maskz_scalef_ps(seen, p, n);
}

// The sums of sixteen vectors, in order.
inline f16 sums16(const f16* v) {
  f16 two[8], four[4], eight[2];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    two[i] = _mm512_add_ps(_mm512_unpacklo_ps(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_ps(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    const __m512d a = _mm512_castps_pd(two[2 * i]), b = _mm512_castps_pd(two[2 * i + 1]);
    four[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(a, b)), _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)));
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    eight[i] = _mm512_add_ps(_mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0x88),
                             _mm512_shuffle_f32x4(four[2 * i], four[2 * i + 1], 0xdd));
  return _mm512_add_ps(_mm512_shuffle_f32x4(eight[0], eight[1], 0x88), _mm512_shuffle_f32x4(eight[0], eight[1], 0xdd));
}

// q . keys of sixteen keys given by their addresses.
template <int D>
inline f16 sixteen_scores(const bf16* q, const bf16* const* keys, int64_t width) {
  const int64_t depth = D ? D : width;
  f16 sums[16];
#pragma GCC unroll 16
  for (int j = 0; j < 16; j++) sums[j] = _mm512_setzero_ps();
#pragma GCC unroll 4
  for (int64_t i = 0; i < depth; i += 32) {
    const __m512bh a = pairs(q + i);
#pragma GCC unroll 16
    for (int j = 0; j < 16; j++) sums[j] = _mm512_dpbf16_ps(sums[j], a, pairs(keys[j] + i));
  }
  return sums16(sums);
}

// sums[h] = sums[h] * keep[h] + weights[h] . values for 64 numbers of H heads over the first n values. Two
// values side by side leave every 32 numbers as eights' first halves, then their second: see Pairs::deliver.
template <int H>
inline void gather64(const bf16 (*weights)[BLOCK], const bf16* const* values, int n, int64_t at,
                     int64_t width, const float* keep, float* out) {
  f16 sums[H][4];
#pragma GCC unroll 4
  for (int h = 0; h < H; h++)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++)
      sums[h][v] = _mm512_mul_ps(_mm512_set1_ps(keep[h]), _mm512_load_ps(out + h * width + at + 16 * v));
  for (int j = 0; j < n; j += 2) {
    const bf16 *even = values[j] + at, *odd = values[j + 1 < n ? j + 1 : j] + at;
    __m512bh both[4];
#pragma GCC unroll 2
    for (int half = 0; half < 2; half++) {
      const __m512i a = _mm512_loadu_si512(even + 32 * half), b = _mm512_loadu_si512(odd + 32 * half);
      both[2 * half] = (__m512bh)_mm512_unpacklo_epi16(a, b);
      both[2 * half + 1] = (__m512bh)_mm512_unpackhi_epi16(a, b);
    }
#pragma GCC unroll 4
    for (int h = 0; h < H; h++) {
      int two;
      memcpy(&two, weights[h] + j, 4);
      const __m512bh w = (__m512bh)_mm512_set1_epi32(two);
#pragma GCC unroll 4
      for (int v = 0; v < 4; v++) sums[h][v] = _mm512_dpbf16_ps(sums[h][v], both[v], w);
    }
  }
#pragma GCC unroll 4
  for (int h = 0; h < H; h++)
#pragma GCC unroll 4
    for (int v = 0; v < 4; v++) _mm512_store_ps(out + h * width + at + 16 * v, sums[h][v]);
}

// What attention.cpp's walk computes with: see there. A head's width is a multiple of 64.
template <int D>
struct Pairs {
  using Number = bf16;
  using Cached = bf16;
  using Query = bf16;

  static void take(const bf16* q, int64_t width, bf16* query) { memcpy(query, q, sizeof(bf16) * width); }

  template <int H>
  static __attribute__((noinline)) void block(const bf16* q, const bf16* const* keys,
                                              const bf16* const* values, int n, int64_t width, float scale,
                                              Running* states, float* sums) {
    alignas(64) bf16 weights[H][BLOCK];
    float keep[H];
    const __mmask16 seen[2] = {(__mmask16)(n >= 16 ? 0xffff : (1 << n) - 1),
                               (__mmask16)(n >= 32 ? 0xffff : n > 16 ? (1 << (n - 16)) - 1 : 0)};
    const f16 least = _mm512_set1_ps(-INFINITY), factor = _mm512_set1_ps(scale);
    for (int h = 0; h < H; h++) {
      f16 scores[2];
      for (int half = 0; half < 2; half++)
        scores[half] = seen[half] ? _mm512_mask_mul_ps(least, seen[half], factor,
                                                       sixteen_scores<D>(q + h * width, keys + 16 * half, width))
                                  : least;
      const float highest = std::max(states[h].highest, _mm512_reduce_max_ps(_mm512_max_ps(scores[0], scores[1])));
      const f16 shift = _mm512_set1_ps(highest);
      const f16 low = exp16(_mm512_sub_ps(scores[0], shift)), high = exp16(_mm512_sub_ps(scores[1], shift));
      const __m512i kept = (__m512i)_mm512_cvtne2ps_pbh(high, low);
      _mm512_store_si512(weights[h], kept);
      // The total is of what was kept, so that the shares come to one.
      const f16 even = _mm512_castsi512_ps(_mm512_slli_epi32(kept, 16));
      const f16 odd = _mm512_castsi512_ps(_mm512_and_si512(kept, _mm512_set1_epi32((int)0xffff0000)));
      keep[h] = _mm_cvtss_f32(_mm512_castps512_ps128(exp16(_mm512_set1_ps(states[h].highest - highest))));
      states[h] = {highest, states[h].total * keep[h] + _mm512_reduce_add_ps(_mm512_add_ps(even, odd))};
    }
    for (int64_t at = 0; at < (D ? D : width); at += 64) gather64<H>(weights, values, n, at, width, keep, sums);
  }

  static void deliver(const float* sums, float share, int64_t width, bf16* out) {
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11);
    const __m512i second = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const f16 factor = _mm512_set1_ps(share);
    for (int64_t i = 0; i < width; i += 32) {
      const __m512d a = _mm512_castps_pd(_mm512_mul_ps(factor, _mm512_load_ps(sums + i)));
      const __m512d b = _mm512_castps_pd(_mm512_mul_ps(factor, _mm512_load_ps(sums + i + 16)));
      const f16 low = _mm512_castpd_ps(_mm512_permutex2var_pd(a, first, b));
      const f16 high = _mm512_castpd_ps(_mm512_permutex2var_pd(a, second, b));
      _mm512_storeu_si512(out + i, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  }
};

}  // namespace

#endif
