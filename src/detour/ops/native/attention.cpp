// Causal grouped-query attention over pages, on float or bf16 (`dtype`, see of_type), computed in float. Keys
// and values may be the other of them, or e4m3 (`cached` is 2).
//
// A query walks its sequence in blocks of 32 positions that start at multiples of 32, with the softmax
// kept running (Milakov and Gimelshein 2018). The walk is the same whatever is computed beside it: a
// token's result does not depend on the batch, on how its prompt was cut into chunks, or on pages.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <vector>
#include "attention_pairs.h"
#include "attention_wide.h"
#include "e4m3.h"
#include "pool.h"
#include "vector.h"

namespace {

template <class S>
struct Cache {
  const S* keys;
  const S* values;
  int64_t page_size;
  int64_t row;  // numbers per position: kv_heads * head_dim
};

// All query heads of a token that share a kv head, up to three at a time: as many as registers hold.
template <class Kernel, class S>
inline void walk_heads(int heads, const typename Kernel::Query* q, const S* const* keys,
                       const S* const* values, int n, int64_t width, float scale, Running* states,
                       float* sums) {
  for (int h = 0; h < heads;) {
    const int some = std::min(heads - h, 3);
    auto run = some == 3   ? Kernel::template block<3>
               : some == 2 ? Kernel::template block<2>
                           : Kernel::template block<1>;
    run(q + h * width, keys, values, n, width, scale, states + h, sums + h * width);
    h += some;
  }
}

// A piece of work: `count` tokens of one sequence from position `start`, for query heads [first, last) of
// each kv head in [kv_first, kv_last). q and out point at the first token.
template <class S>
struct Piece {
  const int32_t* pages;
  int64_t start, q_stride, out_stride;
  int count, kv_first, kv_last, first, last, group;
  const S* q;
  S* out;
};

// Where the positions [base, base + 32) lie, in numbers from a cache's start.
template <class S>
inline void find(const Cache<S>& cache, const int32_t* pages, int64_t base, int64_t length, int64_t* places) {
  int64_t page = base / cache.page_size, offset = base % cache.page_size;
  for (int j = 0; j < BLOCK; j++) {
    if (base + j >= length) {  // past the end: read by none
      places[j] = places[0];
      continue;
    }
    places[j] = (pages[page] * cache.page_size + offset) * cache.row;
    if (++offset == cache.page_size) page++, offset = 0;
  }
}

// Asks for numbers that the next block reads: a sequence's pages lie anywhere, so the processor cannot.
template <class S>
inline void ask(const S* at, int64_t count) {
  for (int64_t i = 0; i < count; i += 64 / (int64_t)sizeof(S)) _mm_prefetch((const char*)(at + i), _MM_HINT_T1);
}

// The first float of `room` that a vector may be loaded from; there is space for `count` from there on.
inline float* aligned(std::vector<float>& room, int64_t count) {
  room.assign(count + 16, 0.0f);
  return (float*)(((uintptr_t)room.data() + 63) & ~(uintptr_t)63);
}

// A Kernel takes a query into its own form (take), goes on with H heads' sums over one block (block), and
// gives what the sums come to (deliver).
template <class Kernel, class S = typename Kernel::Number, class C = typename Kernel::Cached>
void walk(const Cache<C>& cache, const Piece<S>& piece, int64_t width, float scale) {
  thread_local std::vector<Running> states;
  thread_local std::vector<float> room, query_room;
  const int heads = piece.last - piece.first, kv_heads = piece.kv_last - piece.kv_first;
  const int64_t chains = (int64_t)piece.count * kv_heads * heads;
  states.assign(chains, {-INFINITY, 0.0f});
  float* sums = aligned(room, chains * width);
  auto* queries = (typename Kernel::Query*)aligned(query_room, chains * width);
  const auto place = [&](int64_t chain) {  // of a chain's head among its token's
    const int64_t kv = chain / heads % kv_heads, head = chain % heads;
    return ((piece.kv_first + kv) * piece.group + piece.first + head) * width;
  };
  for (int64_t chain = 0; chain < chains; chain++) {
    const int64_t token = chain / (kv_heads * heads);
    Kernel::take(piece.q + token * piece.q_stride + place(chain), width, queries + chain * width);
  }
  const int64_t length = piece.start + piece.count;
  const C *keys[BLOCK], *values[BLOCK];
  int64_t places[BLOCK], next[BLOCK];
  find(cache, piece.pages, 0, length, next);
  for (int64_t base = 0; base < length; base += BLOCK) {
    std::copy(next, next + BLOCK, places);
    if (base + BLOCK < length) find(cache, piece.pages, base + BLOCK, length, next);
    for (int kv = 0; kv < kv_heads; kv++) {
      for (int j = 0; j < BLOCK; j++) {
        keys[j] = cache.keys + places[j] + (piece.kv_first + kv) * width;
        values[j] = cache.values + places[j] + (piece.kv_first + kv) * width;
      }
      // A share of the next block, in the order it lies in memory.
      for (int j = BLOCK * kv / kv_heads; j < BLOCK * (kv + 1) / kv_heads; j++) {
        ask(cache.keys + next[j] + piece.kv_first * width, kv_heads * width);
        ask(cache.values + next[j] + piece.kv_first * width, kv_heads * width);
      }
      for (int t = base > piece.start ? base - piece.start : 0; t < piece.count; t++) {
        const int64_t seen = piece.start + t + 1 - base;
        const int64_t chain = (t * kv_heads + kv) * heads;
        walk_heads<Kernel>(heads, queries + chain * width, keys, values, seen < BLOCK ? seen : BLOCK, width, scale,
                      states.data() + chain, sums + chain * width);
      }
    }
  }
  for (int64_t chain = 0; chain < chains; chain++) {
    const int64_t token = chain / (kv_heads * heads);
    Kernel::deliver(sums + chain * width, 1.0f / states[chain].total, width,
                    piece.out + token * piece.out_stride + place(chain));
  }
}

struct Task {
  int32_t row, token, start, count;  // of the batch; the step's token; its position; how many
};

template <class S, class C>
auto kernel(int64_t width) {
#ifdef __AVX512BF16__
  if constexpr (std::is_same_v<S, bf16> && std::is_same_v<C, bf16>)
    if (width % 64 == 0) return width == 64 ? walk<Pairs<64>> : width == 128 ? walk<Pairs<128>> : walk<Pairs<0>>;
#endif
  return width == 64 ? walk<Wide<64, S, C>> : width == 128 ? walk<Wide<128, S, C>> : walk<Wide<0, S, C>>;
}

template <class S, class C>
void attend(const Task* tasks, int64_t n, const int32_t* page_table, int64_t table_stride, const S* q,
            int64_t q_stride, const Cache<C>& cache, int64_t heads, int64_t kv_heads, int64_t width,
            float scale, S* out, int threads) {
  const int group = heads / kv_heads;
  // Positions lie whole in memory, all kv heads together, so a piece takes them all where there are
  // pieces enough for the threads; else one kv head; else one query head.
  const int by_kv = n < 2 * threads ? kv_heads : 1;
  const int by_query = n * by_kv < 4 * threads && by_kv > 1 ? group : 1;
  pool::share(n * by_kv * by_query, threads, [&](int64_t i) {
    const Task& task = tasks[i / (by_kv * by_query)];
    const int kv = i / by_query % by_kv, query = i % by_query;
    const Piece<S> piece = {
        page_table + task.row * table_stride,
        task.start,
        q_stride,
        heads * width,
        task.count,
        by_kv > 1 ? kv : 0,
        by_kv > 1 ? kv + 1 : (int)kv_heads,
        by_query > 1 ? query : 0,
        by_query > 1 ? query + 1 : group,
        group,
        q + task.token * q_stride,
        out + task.token * heads * width,
    };
    kernel<S, C>(width)(cache, piece, width, scale);
  });
}

}  // namespace

// tasks [n, 4] int32: row, first token, its position, tokens (<= 16), longest first.
// q [T, heads, width] with tokens `q_stride` apart; out [T, heads, width], contiguous.
extern "C" void detour_attention(const int32_t* tasks, int64_t n, const int32_t* page_table,
                                 int64_t table_stride, const void* q, int64_t q_stride, const void* keys,
                                 const void* values, int64_t page_size, int64_t heads, int64_t kv_heads,
                                 int64_t width, float scale, void* out, int dtype, int cached, int threads) {
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    const auto run = [&](auto* kept) {
      using C = std::remove_pointer_t<decltype(kept)>;
      const Cache<C> cache = {(const C*)keys, (const C*)values, page_size, kv_heads * width};
      attend((const Task*)tasks, n, page_table, table_stride, (const S*)q, q_stride, cache, heads, kv_heads,
             width, scale, (S*)out, threads);
    };
    cached == 2 ? run((fp8*)nullptr) : of_type(cached, run);
  });
}
