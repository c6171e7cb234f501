// Causal grouped-query attention over pages, float32.
//
// A query walks its sequence in blocks of 32 positions that start at multiples of 32, with the softmax
// kept running (Milakov and Gimelshein 2018). The walk is the same whatever is computed beside it: a
// token's result does not depend on the batch, on how its prompt was cut into chunks, or on pages.
#include <cmath>
#include <cstring>
#include <vector>
#include "vector.h"

namespace {

constexpr int BLOCK = 32;      // positions at a time
constexpr int QUERIES = 16;    // tokens of a sequence that share a walk

struct Cache {
  const float* keys;
  const float* values;
  int64_t page_size;
  int64_t row;  // numbers per position: kv_heads * head_dim
};

// scores[0..31] = scale * q . keys, for 32 keys given by their addresses.
template <int D>
inline void score(const float* q, const float* const* keys, int64_t width, float scale, float* scores) {
  const int64_t depth = D ? D : width;
  for (int j = 0; j < BLOCK; j += 8) {
    f8 sums[8];
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) sums[v] = _mm256_setzero_ps();
    for (int64_t i = 0; i < depth; i += 8) {
      const f8 a = _mm256_loadu_ps(q + i);
#pragma GCC unroll 8
      for (int v = 0; v < 8; v++)
        sums[v] = _mm256_fmadd_ps(a, _mm256_loadu_ps(keys[j + v] + i), sums[v]);
    }
    _mm256_store_ps(scores + j, _mm256_mul_ps(sums8(sums), _mm256_set1_ps(scale)));
  }
}

// out = out * keep + weights . values, over the first n values given by their addresses.
template <int D>
inline void gather(const float* weights, const float* const* values, int n, int64_t width, float keep,
                   float* out) {
  const f8 old = _mm256_set1_ps(keep);
  if constexpr (D == 64) {
    f8 sums[8];
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) sums[v] = _mm256_mul_ps(old, _mm256_load_ps(out + 8 * v));
    for (int j = 0; j < n; j++) {
      const f8 w = _mm256_broadcast_ss(weights + j);
#pragma GCC unroll 8
      for (int v = 0; v < 8; v++)
        sums[v] = _mm256_fmadd_ps(w, _mm256_loadu_ps(values[j] + 8 * v), sums[v]);
    }
#pragma GCC unroll 8
    for (int v = 0; v < 8; v++) _mm256_store_ps(out + 8 * v, sums[v]);
  } else {
    for (int64_t i = 0; i < width; i += 8) {
      f8 sum = _mm256_mul_ps(old, _mm256_load_ps(out + i));
      for (int j = 0; j < n; j++)
        sum = _mm256_fmadd_ps(_mm256_broadcast_ss(weights + j), _mm256_loadu_ps(values[j] + i), sum);
      _mm256_store_ps(out + i, sum);
    }
  }
}

// The running softmax of one query head of one token.
struct Running {
  float highest, total;
};

template <int D>
inline void walk_block(const float* q, const float* const* keys, const float* const* values, int n,
                       int64_t width, float scale, Running& state, float* out) {
  alignas(32) float scores[BLOCK];
  score<D>(q, keys, width, scale, scores);
  for (int j = n; j < BLOCK; j++) scores[j] = -INFINITY;
  f8 most = _mm256_max_ps(_mm256_max_ps(_mm256_load_ps(scores), _mm256_load_ps(scores + 8)),
                          _mm256_max_ps(_mm256_load_ps(scores + 16), _mm256_load_ps(scores + 24)));
  const float highest = std::max(state.highest, max8(most));
  f8 sum = _mm256_setzero_ps();
  for (int j = 0; j < BLOCK; j += 8) {
    f8 weight = exp8(_mm256_sub_ps(_mm256_load_ps(scores + j), _mm256_set1_ps(highest)));
    _mm256_store_ps(scores + j, weight);
    sum = _mm256_add_ps(sum, weight);
  }
  const float keep = std::exp(state.highest - highest);
  state.highest = highest;
  state.total = state.total * keep + sum8(sum);
  gather<D>(scores, values, n, width, keep, out);
}

// `count` tokens of one sequence, from position `start`, for query heads [first, last) of a kv head.
template <int D>
void walk(const Cache& cache, const int32_t* pages, int64_t start, int count, int first, int last,
          int64_t kv_head, int64_t width, float scale, const float* q, int64_t q_stride, float* out,
          int64_t out_stride) {
  const int heads = last - first;
  alignas(32) float sums[QUERIES * 16 * (D ? D : 256)];
  Running states[QUERIES * 16];
  for (int i = 0; i < count * heads; i++) states[i] = {-INFINITY, 0.0f};
  memset(sums, 0, sizeof(float) * count * heads * width);
  const int64_t length = start + count;
  const float *keys[BLOCK], *values[BLOCK];
  for (int64_t base = 0; base < length; base += BLOCK) {
    for (int j = 0; j < BLOCK; j++) {
      const int64_t position = base + j < length ? base + j : base;  // what is past the end is read by none
      const int64_t slot = pages[position / cache.page_size] * cache.page_size + position % cache.page_size;
      keys[j] = cache.keys + slot * cache.row + kv_head * width;
      values[j] = cache.values + slot * cache.row + kv_head * width;
    }
    for (int t = base > start ? base - start : 0; t < count; t++) {
      const int64_t seen = start + t + 1 - base;
      for (int h = 0; h < heads; h++)
        walk_block<D>(q + t * q_stride + (first + h) * width, keys, values,
                      seen < BLOCK ? seen : BLOCK, width, scale, states[t * heads + h],
                      sums + (t * heads + h) * width);
    }
  }
  for (int t = 0; t < count; t++)
    for (int h = 0; h < heads; h++) {
      const f8 share = _mm256_set1_ps(1.0f / states[t * heads + h].total);
      for (int64_t i = 0; i < width; i += 8)
        _mm256_storeu_ps(out + t * out_stride + (first + h) * width + i,
                         _mm256_mul_ps(share, _mm256_load_ps(sums + (t * heads + h) * width + i)));
    }
}

struct Task {
  int32_t row, token, start, count;  // of the batch; the step's token; its position; how many
};

}  // namespace

extern "C" {

// tasks [n, 4] int32: row, first token, its position, tokens (<= 16), longest first.
// q [T, heads, width] with tokens `q_stride` apart; out [T, heads, width], contiguous.
void detour_attention(const int32_t* tasks, int64_t n, const int32_t* page_table, int64_t table_stride,
                      const float* q, int64_t q_stride, const float* keys, const float* values,
                      int64_t page_size, int64_t heads, int64_t kv_heads, int64_t width, float scale,
                      float* out, int threads) {
  const Cache cache = {keys, values, page_size, kv_heads * width};
  const Task* all = (const Task*)tasks;
  const int group = heads / kv_heads;
  // Few sequences: every query head is a piece of work of its own, so that all threads have some.
  const int split = n * kv_heads < 4 * threads || group > 16 ? group : 1, piece = group / split;
  const int64_t pieces = n * kv_heads * split;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1)
  for (int64_t i = 0; i < pieces; i++) {
    const Task& task = all[i / (kv_heads * split)];
    const int64_t kv_head = i / split % kv_heads;
    const int first = kv_head * group + i % split * piece;
    auto run = width == 64 ? walk<64> : width == 128 ? walk<128> : walk<0>;
    run(cache, page_table + task.row * table_stride, task.start, task.count, first, first + piece,
        kv_head, width, scale, q + task.token * q_stride, q_stride,
        out + task.token * heads * width, heads * width);
  }
}
}
