// The lightning indexer's scores on a CPU, in float. A score is one chain over a head's numbers, then one
// over heads, whatever is computed beside it.
#include <algorithm>
#include <type_traits>
#include <vector>
#include "e4m3.h"
#include "pool.h"
#include "vector.h"

namespace {

constexpr int KEYS = 16;       // positions at a time: two vectors
constexpr int64_t SPAN = 512;  // positions of a piece of work

// Index keys of `width` float (kind 0) or bf16 (1) numbers, or (2) pages of all their e4m3 keys, then a
// float for each key.
struct Keys {
  const uint8_t* cache;
  int64_t width, page_size;
  int kind;
};

// The key at a slot into column `j` of turned [width][KEYS].
inline void turn_key(const Keys& keys, int64_t slot, int j, float* turned) {
  alignas(32) float key[8];
  const int64_t width = keys.width, page = slot / keys.page_size, place = slot % keys.page_size;
  const uint8_t* packed = keys.cache + page * keys.page_size * (width + 4);
  float scale = 1.0f;
  if (keys.kind == 2) memcpy(&scale, packed + keys.page_size * width + 4 * place, 4);
  for (int64_t i = 0; i < width; i += 8) {
    const f8 v = keys.kind == 0   ? load((const float*)keys.cache + slot * width + i)
                 : keys.kind == 1 ? load((const bf16*)keys.cache + slot * width + i)
                                  : _mm256_mul_ps(e4m3(packed + place * width + i), _mm256_set1_ps(scale));
    _mm256_store_ps(key, v);
    for (int k = 0; k < 8; k++) turned[(i + k) * KEYS + j] = key[k];
  }
}

// scores[j] = sum over heads of weight[h] * relu(q[h] . key j); heads in groups of four.
inline void score(const float* q, const float* weight, const float* turned, int64_t heads, int64_t width,
                  float* scores) {
  const f8 zero = _mm256_setzero_ps();
  f8 total[2] = {zero, zero};
  for (int64_t h = 0; h < heads; h += 4) {
    f8 sums[4][2] = {{zero, zero}, {zero, zero}, {zero, zero}, {zero, zero}};
    for (int64_t i = 0; i < width; i++) {
      const f8 one = _mm256_load_ps(turned + i * KEYS), two = _mm256_load_ps(turned + i * KEYS + 8);
#pragma GCC unroll 4
      for (int k = 0; k < 4; k++) {
        const f8 x = _mm256_broadcast_ss(q + (h + k) * width + i);
        sums[k][0] = _mm256_fmadd_ps(x, one, sums[k][0]);
        sums[k][1] = _mm256_fmadd_ps(x, two, sums[k][1]);
      }
    }
#pragma GCC unroll 4
    for (int k = 0; k < 4; k++) {
      const f8 w = _mm256_broadcast_ss(weight + h + k);
      for (int v = 0; v < 2; v++) total[v] = _mm256_fmadd_ps(w, _mm256_max_ps(sums[k][v], zero), total[v]);
    }
  }
  _mm256_store_ps(scores, total[0]);
  _mm256_store_ps(scores + 8, total[1]);
}

inline void widen_queries(const void* q, int64_t first, int64_t count, int kind, float* out) {
  for (int64_t i = 0; i < count; i += 8)
    store(out + i, kind == 0   ? load((const float*)q + first + i)
                   : kind == 1 ? load((const bf16*)q + first + i)
                               : e4m3((const uint8_t*)q + first + i));
}

}  // namespace

// tasks [n, 4] int32: row, first token, its position, tokens. q [T, heads, width] of `q_kind` as Keys.kind,
// weight [T, heads]; out [T, columns], of which a token's own positions are written.
extern "C" void detour_index_scores(const int32_t* tasks, int64_t n, const int32_t* table, int64_t stride,
                                    int64_t page_size, const void* q, int q_kind, const float* weight, int64_t heads,
                                    int64_t width, const void* cache, int kind, float* out, int64_t columns,
                                    int threads) {
  const Keys keys = {(const uint8_t*)cache, width, page_size, kind};
  const int64_t spans = (columns + SPAN - 1) / SPAN;
  pool::share(n * spans, threads, [&](int64_t piece) {
    const int32_t* task = tasks + piece / spans * 4;
    const int64_t begin = piece % spans * SPAN, length = task[2] + task[3];
    const int64_t end = std::min(begin + SPAN, length);
    if (begin >= end) return;
    thread_local std::vector<float> query_room, key_room;
    query_room.resize(task[3] * heads * width);
    key_room.resize(KEYS * width + 8);
    float* turned = (float*)(((uintptr_t)key_room.data() + 31) & ~(uintptr_t)31);
    widen_queries(q, task[1] * heads * width, task[3] * heads * width, q_kind, query_room.data());
    for (int64_t base = begin; base < end; base += KEYS) {
      const int here = std::min<int64_t>(KEYS, end - base);
      for (int j = 0; j < KEYS; j++) {
        const int64_t at = base + std::min(j, here - 1);
        turn_key(keys, table[task[0] * stride + at / page_size] * page_size + at % page_size, j, turned);
      }
      for (int64_t t = std::max<int64_t>(0, base - task[2]); t < task[3]; t++) {
        alignas(32) float scores[KEYS];
        const int64_t token = task[1] + t;
        score(query_room.data() + t * heads * width, weight + token * heads, turned, heads, width, scores);
        std::copy(scores, scores + here, out + token * columns + base);
      }
    }
  });
}
