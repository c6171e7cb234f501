// Latent attention over cached rows, and the way of queries into the latent space and of results out of
// it. Numbers are float or bf16 (`dtype`, see of_type), computed with in float.
//
// A token walks its rows in the order of their positions in blocks of 32, the softmax kept running, in
// dense and in sparse attention alike: where a token selects all that it sees, both give the same bits,
// and neither depends on the batch, on chunks or on pages.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>
#include "attention_wide.h"
#include "e4m3.h"
#include "pool.h"
#include "turn.h"
#include "vector.h"

namespace {

// How a cached row lies: rank + rope numbers of float (kind 0) or bf16 (1), or packed (2): rank bytes of
// e4m3, a float for each `block` of them, rope bf16.
struct Row {
  int64_t bytes, rank, rope, block;
  int kind;
};

template <class S>
inline void widen_all(const S* from, int64_t count, float* to) {
  for (int64_t i = 0; i < count; i += 8) store(to + i, load(from + i));
}

inline void widen_row(const Row& row, const uint8_t* at, float* to) {
  if (row.kind == 0) return widen_all((const float*)at, row.rank + row.rope, to);
  if (row.kind == 1) return widen_all((const bf16*)at, row.rank + row.rope, to);
  for (int64_t first = 0; first < row.rank; first += row.block) {
    float scale;
    memcpy(&scale, at + row.rank + first / row.block * 4, 4);
    const int64_t last = std::min(first + row.block, row.rank);
    for (int64_t i = first; i < last; i += 8)
      store(to + i, _mm256_mul_ps(e4m3(at + i), _mm256_set1_ps(scale)));
  }
  const int64_t scales = (row.rank + row.block - 1) / row.block;
  widen_all((const bf16*)(at + row.rank + 4 * scales), row.rope, to + row.rank);
}

// Where a token's rows lie: chosen slots in their order, or (slots null) the pages of a sequence.
struct Places {
  const int32_t* slots;
  const int32_t* pages;
  int64_t page_size;
  int64_t slot(int64_t i) const {
    return slots ? slots[i] : pages[i / page_size] * page_size + i % page_size;
  }
};

// The first float of `room` that a vector may be loaded from; there is space for `count` from there on.
inline float* aligned(std::vector<float>& room, int64_t count) {
  room.resize(count + 16);
  return (float*)(((uintptr_t)room.data() + 63) & ~(uintptr_t)63);
}

// `count` tokens, the first of which sees `seen` rows and each other one more; heads [first, last).
template <class S>
void walk(const Row& row, const uint8_t* cache, const Places& places, int64_t seen, int64_t count,
          const S* q, int64_t heads, int64_t first, int64_t last, float scale, S* out) {
  thread_local std::vector<float> row_room, query_room, sum_room;
  thread_local std::vector<Running> states;
  const int64_t width = row.rank + row.rope, some = last - first, chains = count * some;
  float* rows = aligned(row_room, BLOCK * width);
  float* queries = aligned(query_room, chains * width);
  float* sums = aligned(sum_room, chains * width);
  std::fill(sums, sums + chains * width, 0.0f);
  states.assign(chains, {-INFINITY, 0.0f});
  for (int64_t t = 0; t < count; t++)
    widen_all(q + (t * heads + first) * width, some * width, queries + t * some * width);
  const float* at[BLOCK];
  for (int j = 0; j < BLOCK; j++) at[j] = rows + j * width;
  const int64_t length = seen + count - 1;
  for (int64_t base = 0; base < length; base += BLOCK) {
    const int64_t here = std::min<int64_t>(BLOCK, length - base);
    for (int64_t j = 0; j < here; j++) widen_row(row, cache + places.slot(base + j) * row.bytes, rows + j * width);
    for (int64_t t = std::max<int64_t>(0, base + 1 - seen); t < count; t++) {
      const int n = std::min<int64_t>(BLOCK, seen + t - base);
      for (int64_t h = 0; h < some;) {
        const int64_t chain = t * some + h, three = std::min<int64_t>(some - h, 3);
        auto block = three == 3   ? Wide<0, float>::template block<3>
                     : three == 2 ? Wide<0, float>::template block<2>
                                  : Wide<0, float>::template block<1>;
        block(queries + chain * width, at, at, n, width, scale, &states[chain], sums + chain * width);
        h += three;
      }
    }
  }
  for (int64_t chain = 0; chain < chains; chain++) {
    const float share = states[chain].total > 0 ? 1.0f / states[chain].total : 0.0f;
    Wide<0, S>::deliver(sums + chain * width, share, row.rank,
                        out + (chain / some * heads + first + chain % some) * row.rank);
  }
}

// Calls use(token, first head, last head) so that there is work for all threads.
template <class Use>
void share_heads(int64_t tasks, int64_t heads, int threads, Use use) {
  const int64_t parts = threads > 1 && tasks < 4 * threads ? std::min<int64_t>(heads, 2 * threads) : 1;
  pool::share(tasks * parts, threads, [&](int64_t i) {
    const int64_t part = i % parts;
    use(i / parts, heads * part / parts, heads * (part + 1) / parts);
  });
}

// out[t][r] = sum over p of q[t][p] * keys[p][r], one chain over p, for N tokens.
template <int N, class S>
void absorb(const S* q, int64_t q_stride, const S* keys, int64_t plain, int64_t rank, S* out, int64_t out_stride) {
  for (int64_t r = 0; r < rank; r += 8) {
    f8 sums[N];
#pragma GCC unroll 8
    for (int t = 0; t < N; t++) sums[t] = _mm256_setzero_ps();
    for (int64_t p = 0; p < plain; p++) {
      const f8 key = load(keys + p * rank + r);
#pragma GCC unroll 8
      for (int t = 0; t < N; t++) sums[t] = _mm256_fmadd_ps(_mm256_set1_ps(widen(q[t * q_stride + p])), key, sums[t]);
    }
#pragma GCC unroll 8
    for (int t = 0; t < N; t++) store(out + t * out_stride + r, sums[t]);
  }
}

// out[t][v] = sum over r of latents[t][r] * values[v][r], eight chains over r, for N tokens.
template <int N, class S>
void expand(const S* latents, int64_t stride, const S* values, int64_t width, int64_t rank, S* out, int64_t out_stride) {
  for (int64_t v = 0; v < width; v += 4) {
    f8 sums[N][4];
#pragma GCC unroll 4
    for (int t = 0; t < N; t++)
#pragma GCC unroll 4
      for (int i = 0; i < 4; i++) sums[t][i] = _mm256_setzero_ps();
    for (int64_t r = 0; r < rank; r += 8) {
#pragma GCC unroll 4
      for (int t = 0; t < N; t++) {
        const f8 x = load(latents + t * stride + r);
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) sums[t][i] = _mm256_fmadd_ps(x, load(values + (v + i) * rank + r), sums[t][i]);
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < N; t++) {
      alignas(16) float four[4];
      _mm_store_ps(four, sums4(sums[t]));
      for (int i = 0; i < 4; i++) put(out + t * out_stride + v + i, four[i]);
    }
  }
}

constexpr int64_t TOKENS = 32;  // that meet a head's matrix while it lies near

}  // namespace

// Dense: tasks [n, 4] int32 (row, first token, its position, tokens). Sparse: n tokens, `slots` [n, stride]
// int32 of which the first counts[i] are rows. q [T, heads, rank + rope], out [T, heads, rank], contiguous.
extern "C" void detour_latent_attention(const int32_t* tasks, int64_t n, const int32_t* table, int64_t stride,
                                        int64_t page_size, const int32_t* counts, const void* q, int64_t heads,
                                        int64_t rank, int64_t rope, const void* cache, int64_t row_bytes,
                                        int64_t block, int kind, float scale, void* out, int dtype, int threads) {
  const Row row = {row_bytes, rank, rope, block, kind};
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    share_heads(n, heads, threads, [&](int64_t i, int64_t first, int64_t last) {
      const int32_t one[4] = {(int32_t)i, (int32_t)i, counts ? counts[i] - 1 : 0, 1};
      const int32_t* task = counts ? one : tasks + 4 * i;
      const int32_t* places = table + task[0] * stride;
      const Places rows = {counts ? places : nullptr, places, page_size};
      walk(row, (const uint8_t*)cache, rows, task[2] + 1, task[3], (const S*)q + task[1] * heads * (rank + rope),
           heads, first, last, scale, (S*)out + task[1] * heads * rank);
    });
  });
}

// q [T, heads, plain + rope]; keys: heads `key_stride` numbers apart of [plain, rank]; out [T, heads, rank + rope].
extern "C" void detour_latent_query(const void* q, int64_t tokens, const void* keys, int64_t key_stride, int64_t heads,
                                    int64_t plain, int64_t rank, int64_t rope, const float* cos, const float* sin,
                                    int interleaved, void* out, int dtype, int threads) {
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    const int64_t groups = (tokens + TOKENS - 1) / TOKENS, from = heads * (plain + rope), to = heads * (rank + rope);
    pool::share(heads * groups, threads, [&](int64_t i) {
      const int64_t head = i % heads, last = std::min((i / heads + 1) * TOKENS, tokens);
      const S* matrix = (const S*)keys + head * key_stride;
      for (int64_t t = i / heads * TOKENS; t < last;) {
        const S* x = (const S*)q + t * from + head * (plain + rope);
        S* y = (S*)out + t * to + head * (rank + rope);
        const int64_t some = last - t >= 4 ? 4 : 1;
        some == 4 ? absorb<4>(x, from, matrix, plain, rank, y, to) : absorb<1>(x, from, matrix, plain, rank, y, to);
        for (int64_t k = 0; k < some; k++)
          turn(x + k * from + plain, cos + (t + k) * rope / 2, sin + (t + k) * rope / 2, rope / 2, interleaved,
               y + k * to + rank);
        t += some;
      }
    });
  });
}

// latents [T, heads, rank]; values: heads `value_stride` numbers apart of [width, rank]; out [T, heads, width].
extern "C" void detour_latent_value(const void* latents, int64_t tokens, const void* values, int64_t value_stride,
                                    int64_t heads, int64_t width, int64_t rank, void* out, int dtype, int threads) {
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    const int64_t groups = (tokens + TOKENS - 1) / TOKENS;
    pool::share(heads * groups, threads, [&](int64_t i) {
      const int64_t head = i % heads, last = std::min((i / heads + 1) * TOKENS, tokens);
      const S* matrix = (const S*)values + head * value_stride;
      for (int64_t t = i / heads * TOKENS; t < last;) {
        const S* x = (const S*)latents + (t * heads + head) * rank;
        S* y = (S*)out + (t * heads + head) * width;
        const int64_t some = last - t >= 2 ? 2 : 1;
        some == 2 ? expand<2>(x, heads * rank, matrix, width, rank, y, heads * width)
                  : expand<1>(x, heads * rank, matrix, width, rank, y, heads * width);
        t += some;
      }
    });
  });
}
