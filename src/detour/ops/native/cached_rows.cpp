// What is written to the caches of latent attention and of its index, and the index's queries. Each token
// alone, on float or bf16 (`dtype`, see of_type), computed with in float.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>
#include <vector>
#include "e4m3.h"
#include "normalise.h"
#include "pool.h"
#include "turn.h"
#include "vector.h"

namespace {

template <class S, class C>
inline void copy(const S* from, int64_t count, C* to) {
  for (int64_t i = 0; i < count; i += 8) store(to + i, load(from + i));
}

template <class S>
inline float largest(const S* x, int64_t count) {
  f8 most = _mm256_setzero_ps();
  for (int64_t i = 0; i < count; i += 8) most = _mm256_max_ps(most, _mm256_andnot_ps(_mm256_set1_ps(-0.0f), load(x + i)));
  return max8(most);
}

template <class S>
inline void divide(const S* x, int64_t count, float scale, uint8_t* out) {
  for (int64_t i = 0; i < count; i += 8) store_e4m3(out + i, _mm256_div_ps(load(x + i), _mm256_set1_ps(scale)));
}

// rank numbers, then rope, as latent.cpp's Row has them.
template <class S>
void put_latent(const S* normal, const S* turned, int64_t rank, int64_t rope, int64_t block, int kind, uint8_t* at) {
  if (kind < 2) {
    of_type(kind, [&](auto* as) {
      using C = std::remove_pointer_t<decltype(as)>;
      copy(normal, rank, (C*)at);
      copy(turned, rope, (C*)at + rank);
    });
    return;
  }
  uint8_t* scales = at + rank;
  for (int64_t first = 0; first < rank; first += block, scales += 4) {
    const int64_t count = std::min(block, rank - first);
    const float most = largest(normal + first, count), scale = most > 0 ? most / 448.0f : 1.0f;
    divide(normal + first, count, scale, at + first);
    memcpy(scales, &scale, 4);
  }
  copy(turned, rope, (bf16*)scales);
}

// The least power of two that brings the largest number to 448 or below.
inline float power_scale(const float* x, int64_t count) {
  const float least = std::max(largest(x, count), 1e-4f) / 448.0f;
  uint32_t bits;
  memcpy(&bits, &least, 4);
  bits = (bits + 0x7fffff) & 0x7f800000;
  float scale;
  memcpy(&scale, &bits, 4);
  return scale;
}

// LayerNorm with weight and bias.
template <class S>
inline void centre(const S* x, const S* weight, const S* bias, float eps, int64_t width, float* out) {
  f8 sum = _mm256_setzero_ps(), squares = sum;
  for (int64_t i = 0; i < width; i += 8) sum = _mm256_add_ps(sum, load(x + i));
  const f8 mean = _mm256_set1_ps(sum8(sum) / width);
  for (int64_t i = 0; i < width; i += 8) {
    const f8 apart = _mm256_sub_ps(load(x + i), mean);
    squares = _mm256_fmadd_ps(apart, apart, squares);
  }
  const f8 scale = _mm256_set1_ps(1.0f / std::sqrt(sum8(squares) / width + eps));
  for (int64_t i = 0; i < width; i += 8)
    store(out + i, _mm256_fmadd_ps(_mm256_mul_ps(_mm256_sub_ps(load(x + i), mean), scale), load(weight + i), load(bias + i)));
}

}  // namespace

// kv [T, rank + rope], tokens `stride` apart; cos, sin [T, rope / 2]; rows of `row_bytes` at slots, see latent.cpp.
extern "C" void detour_latent_write(const void* kv, int64_t tokens, int64_t stride, const void* weight, float eps,
                                    const float* cos, const float* sin, int interleaved, int64_t rank, int64_t rope,
                                    void* cache, int64_t row_bytes, int64_t block, int kind, const int64_t* slots,
                                    int dtype, int threads) {
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    pool::share_rows(tokens, 8.0 * (rank + rope), threads, [&](int64_t first, int64_t last) {
      std::vector<S> normal(rank), turned(rope);
      for (int64_t t = first; t < last; t++) {
        const S* x = (const S*)kv + t * stride;
        normalise(x, (const S*)weight, eps, rank, normal.data());
        turn(x + rank, cos + t * rope / 2, sin + t * rope / 2, rope / 2, interleaved, turned.data());
        put_latent(normal.data(), turned.data(), rank, rope, block, kind, (uint8_t*)cache + slots[t] * row_bytes);
      }
    });
  });
}

// k [T, width], tokens `stride` apart; cos, sin [T, half]; cache as index.cpp's Keys.
extern "C" void detour_index_key(const void* k, int64_t tokens, int64_t stride, const void* weight, const void* bias,
                                 float eps, const float* cos, const float* sin, int64_t half, int interleaved,
                                 int64_t width, void* cache, int64_t page_size, int kind, const int64_t* slots,
                                 int dtype, int threads) {
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    pool::share_rows(tokens, 12.0 * width, threads, [&](int64_t first, int64_t last) {
      std::vector<float> key(width), turned(2 * half);
      for (int64_t t = first; t < last; t++) {
        centre((const S*)k + t * stride, (const S*)weight, (const S*)bias, eps, width, key.data());
        turn(key.data(), cos + t * half, sin + t * half, half, interleaved, turned.data());
        std::copy(turned.begin(), turned.end(), key.begin());
        const int64_t page = slots[t] / page_size, place = slots[t] % page_size;
        if (kind == 0) copy(key.data(), width, (float*)cache + slots[t] * width);
        if (kind == 1) copy(key.data(), width, (bf16*)cache + slots[t] * width);
        if (kind < 2) continue;
        uint8_t* packed = (uint8_t*)cache + page * page_size * (width + 4);
        const float scale = power_scale(key.data(), width);
        divide(key.data(), width, scale, packed + place * width);
        memcpy(packed + page_size * width + 4 * place, &scale, 4);
      }
    });
  });
}

// q [T, heads, width]; gate, weights [T, heads]; out as q, or (kind 2) e4m3 whose scale joins the weight.
extern "C" void detour_index_query(const void* q, const float* gate, int64_t tokens, int64_t heads, int64_t width,
                                   const float* cos, const float* sin, int64_t half, int interleaved, float share,
                                   void* out, float* weights, int kind, int dtype, int threads) {
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    pool::share_rows(tokens * heads, 6.0 * width, threads, [&](int64_t first, int64_t last) {
      std::vector<float> x(width), turned(2 * half);
      for (int64_t i = first; i < last; i++) {
        const int64_t t = i / heads;
        copy((const S*)q + i * width, width, x.data());
        turn(x.data(), cos + t * half, sin + t * half, half, interleaved, turned.data());
        std::copy(turned.begin(), turned.end(), x.begin());
        weights[i] = gate[i] * share;
        if (kind < 2) {
          copy(x.data(), width, (S*)out + i * width);
          continue;
        }
        const float scale = power_scale(x.data(), width);
        divide(x.data(), width, scale, (uint8_t*)out + i * width);
        weights[i] *= scale;
      }
    });
  });
}
