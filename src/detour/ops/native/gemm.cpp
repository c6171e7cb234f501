// y[M, N] = x[M, K] * W^T (+ bias): float32 activations, weights packed or plain, exact dequantisation.
//
// Weights lie in panels of 16 outputs. Every output is one chain of fused multiply-adds over k in
// ascending order, whatever M is, so a row's result does not depend on the rows computed beside it:
// bit for bit the same alone and in a batch.
//
// A weight is q * scale + minimum rounded to float32 once, also when it is expanded for many rows.
#include <cstdint>
#include <cstring>
#include <type_traits>
#include "pool.h"
#include "vector.h"

namespace {

constexpr int NR = 16;      // outputs a panel
constexpr int GROUP = 32;   // weights that share a scale
constexpr int MR = 6;       // rows a micro-kernel holds in registers
constexpr int AHEAD = 2048; // bytes
constexpr int KC = 256;     // inputs whose weights are expanded at a time: 16 KB
constexpr int MC = 96;      // rows that share expanded weights; their x stays in the second level

enum Kind : int { F32 = 0, BF16 = 1, Q8_0 = 2, Q4_1 = 3 };

inline int64_t panel_bytes(int kind, int64_t K) {
  switch (kind) {
    case F32: return K * NR * 4;
    case BF16: return K * NR * 2;
    case Q8_0: return K / GROUP * (NR * 2 + GROUP * NR);
    default: return K / GROUP * (NR * 4 + GROUP * NR / 2);
  }
}

inline f8 half8(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

// Asks for the weights that are read `AHEAD` bytes later. The processor's own prefetching stops at every
// 4 KB page, which packed weights are through too soon.
inline __attribute__((always_inline)) void ask(const uint8_t* now, int bytes) {
#pragma GCC unroll 10
  for (int b = 0; b < bytes; b += 64) _mm_prefetch((const char*)(now + AHEAD + b), _MM_HINT_T0);
}

// Calls use(k, w) for each k of P neighbouring panels, w the 2 P vectors of that k's weights.
template <int KIND, int P, class Use>
inline __attribute__((always_inline)) void each_k(const uint8_t* panel, int64_t K, Use use) {
  const int64_t stride = panel_bytes(KIND, K);
  f8 w[2 * P];
  if constexpr (KIND == F32) {
    for (int64_t k = 0; k < K; k++, panel += NR * 4) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; v++) {
        if (v % 2 == 0) ask(panel + v / 2 * stride, 64);
        w[v] = _mm256_loadu_ps((const float*)(panel + v / 2 * stride) + v % 2 * 8);
      }
      use(k, w);
    }
  } else if constexpr (KIND == BF16) {
    for (int64_t k = 0; k < K; k++, panel += NR * 2) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; v++) {
        const __m128i* at = (const __m128i*)(panel + v / 2 * stride + v % 2 * 16);
        if (v % 2 == 0 && k % 2 == 0) ask(panel + v / 2 * stride, 64);
        w[v] = _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(at)), 16));
      }
      use(k, w);
    }
  } else if constexpr (KIND == Q8_0) {
    f8 scale[2 * P];
    for (int64_t g = 0; g < K; g += GROUP) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; v++) scale[v] = half8(panel + v / 2 * stride + v % 2 * 16);
      for (int q = 0; q < P; q++) ask(panel + q * stride, NR * 2 + GROUP * NR);
      panel += NR * 2;
      for (int i = 0; i < GROUP; i++, panel += NR) {
#pragma GCC unroll 8
        for (int v = 0; v < 2 * P; v++) {
          __m128i q = _mm_loadl_epi64((const __m128i*)(panel + v / 2 * stride + v % 2 * 8));
          w[v] = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)), scale[v]);
        }
        use(g + i, w);
      }
    }
  } else {
    // A 32-bit lane holds eight inputs of one output. The upper nibble of a byte is not shifted down
    // but read as 16 q and multiplied by scale / 16: powers of two, so the product is the same.
    const __m256i lower = _mm256_set1_epi32(15), upper = _mm256_set1_epi32(240);
    f8 scale[2 * P], fine[2 * P], least[2 * P];
    __m256i q[2 * P];
    for (int64_t g = 0; g < K; g += GROUP) {
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; v++) {
        scale[v] = half8(panel + v / 2 * stride + v % 2 * 16);
        least[v] = half8(panel + v / 2 * stride + v % 2 * 16 + 32);
        fine[v] = _mm256_mul_ps(scale[v], _mm256_set1_ps(1.0f / 16));
      }
      for (int q = 0; q < P; q++) ask(panel + q * stride, NR * 4 + GROUP * NR / 2);
      panel += NR * 4;
      for (int i = 0; i < GROUP; i += 8, panel += NR * 4) {
#pragma GCC unroll 8
        for (int v = 0; v < 2 * P; v++)
          q[v] = _mm256_loadu_si256((const __m256i*)(panel + v / 2 * stride + v % 2 * 32));
#pragma GCC unroll 4
        for (int pair = 0; pair < 8; pair += 2) {
#pragma GCC unroll 8
          for (int v = 0; v < 2 * P; v++)
            w[v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(q[v], lower)), scale[v],
                                   least[v]);
          use(g + i + pair, w);
#pragma GCC unroll 8
          for (int v = 0; v < 2 * P; v++)
            w[v] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(q[v], upper)), fine[v],
                                   least[v]);
          use(g + i + pair + 1, w);
#pragma GCC unroll 8
          for (int v = 0; v < 2 * P; v++) q[v] = _mm256_srli_epi32(q[v], 8);
        }
      }
    }
  }
}

inline void store(float* y, const float* bias, int64_t left, f8 low, f8 high) {
  float out[NR];
  _mm256_storeu_ps(out, low);
  _mm256_storeu_ps(out + 8, high);
  if (bias) for (int i = 0; i < NR && i < left; i++) out[i] += bias[i];
  memcpy(y, out, sizeof(float) * (left < NR ? left : NR));
}

// `ROWS` rows against P panels, straight from their packed form.
template <int KIND, int ROWS, int P>
__attribute__((noinline)) void few_rows(const float* x, int64_t ldx, int64_t K, const uint8_t* panel, const float* bias,
              float* y, int64_t ldy, int64_t left) {
  f8 sum[ROWS][2 * P];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int v = 0; v < 2 * P; v++) sum[r][v] = _mm256_setzero_ps();
  each_k<KIND, P>(panel, K, [&](int64_t k, const f8* w) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      f8 a = _mm256_broadcast_ss(x + r * ldx + k);
#pragma GCC unroll 8
      for (int v = 0; v < 2 * P; v++) sum[r][v] = _mm256_fmadd_ps(a, w[v], sum[r][v]);
    }
  });
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
      store(y + r * ldy + p * NR, bias ? bias + p * NR : nullptr, left - p * NR, sum[r][2 * p],
            sum[r][2 * p + 1]);
}

// Rows a micro-kernel takes at once; four-bit weights need registers for their scales.
constexpr int block_rows(int kind) { return kind == Q4_1 ? 4 : MR; }

// Calls use(first, rows) with rows a compile-time number: the fewest blocks of at most MOST that cover
// M rows, of even sizes (32 rows are 6 6 5 5 5 5), since small blocks hide latencies badly.
template <int MOST, class Use>
inline void each_block(int64_t M, Use use) {
  const int64_t blocks = (M + MOST - 1) / MOST;
  for (int64_t m = 0, i = 0; i < blocks; i++) {
    const int64_t rows = M / blocks + (i < M % blocks);
    switch (rows) {
      case 6: if constexpr (MOST >= 6) use(m, std::integral_constant<int, 6>()); break;
      case 5: if constexpr (MOST >= 5) use(m, std::integral_constant<int, 5>()); break;
      case 4: use(m, std::integral_constant<int, 4>()); break;
      case 3: use(m, std::integral_constant<int, 3>()); break;
      case 2: use(m, std::integral_constant<int, 2>()); break;
      default: use(m, std::integral_constant<int, 1>()); break;
    }
    m += rows;
  }
}

// Few rows: every block of them expands the weights anew, in registers. One or two rows take panels
// in pairs, since a single one has too few chains to hide an addition's latency.
template <int KIND>
void direct(int64_t M, const float* x, int64_t ldx, int64_t K, const uint8_t* panels, int64_t N,
            const float* bias, float* y, int64_t ldy, int64_t first, int64_t last) {
  const int64_t stride = panel_bytes(KIND, K);
  const int step = M == 1 || (M == 2 && KIND != Q4_1) ? 2 : 1;
  for (int64_t p = first; p < last; p += step) {
    const uint8_t* panel = panels + p * stride;
    const float* b = bias ? bias + p * NR : nullptr;
    float* at = y + p * NR;
    const int64_t left = N - p * NR;
    if (p + step <= last && step == 2) {
      if (M == 1) few_rows<KIND, 1, 2>(x, ldx, K, panel, b, at, ldy, left);
      else few_rows<KIND, 2, 2>(x, ldx, K, panel, b, at, ldy, left);
    } else {
      each_block<block_rows(KIND)>(M, [&](int64_t m, auto rows) {
        few_rows<KIND, decltype(rows)::value, 1>(x + m * ldx, ldx, K, panel, b, at + m * ldy, ldy,
                                                 left);
      });
    }
  }
}

// sums[ROWS, 16] += x[ROWS, K] * wide[K, 16], going on with each chain where it stopped.
template <int ROWS>
__attribute__((noinline)) void go_on(const float* x, int64_t ldx, int64_t K, const float* wide,
                                     float* sums) {
  f8 sum[ROWS][2];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    sum[r][0] = _mm256_load_ps(sums + r * NR);
    sum[r][1] = _mm256_load_ps(sums + r * NR + 8);
  }
  for (int64_t k = 0; k < K; k++, wide += NR) {
    const f8 low = _mm256_load_ps(wide), high = _mm256_load_ps(wide + 8);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      f8 a = _mm256_broadcast_ss(x + r * ldx + k);
      sum[r][0] = _mm256_fmadd_ps(a, low, sum[r][0]);
      sum[r][1] = _mm256_fmadd_ps(a, high, sum[r][1]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) {
    _mm256_store_ps(sums + r * NR, sum[r][0]);
    _mm256_store_ps(sums + r * NR + 8, sum[r][1]);
  }
}

// Many rows against one panel: KC inputs' weights are expanded into the first cache level and used by
// all rows, whose sums wait in `sums`.
template <int KIND>
void many_rows(int64_t M, const float* x, int64_t ldx, int64_t K, const uint8_t* panel,
               const float* bias, float* y, int64_t ldy, int64_t left) {
  alignas(64) float wide[KC * NR], sums[MC * NR];
  memset(sums, 0, sizeof(float) * M * NR);
  const int64_t chunk_bytes = panel_bytes(KIND, KC);
  for (int64_t k0 = 0; k0 < K; k0 += KC, panel += chunk_bytes) {
    const int64_t depth = K - k0 < KC ? K - k0 : KC;
    const float* ready = (const float*)panel;
    if constexpr (KIND != F32) {
      ready = wide;
      each_k<KIND, 1>(panel, depth, [&](int64_t k, const f8* w) __attribute__((always_inline)) {
        _mm256_store_ps(wide + k * NR, w[0]);
        _mm256_store_ps(wide + k * NR + 8, w[1]);
      });
    }
    each_block<MR>(M, [&](int64_t m, auto rows) {
      go_on<decltype(rows)::value>(x + m * ldx + k0, ldx, depth, ready, sums + m * NR);
    });
  }
  for (int64_t m = 0; m < M; m++)
    store(y + m * ldy, bias, left, _mm256_load_ps(sums + m * NR), _mm256_load_ps(sums + m * NR + 8));
}

template <int KIND>
void gemm(const float* x, int64_t M, int64_t K, int64_t ldx, const uint8_t* panels, int64_t N,
          const float* bias, float* y, int64_t ldy, int threads) {
  const int64_t count = (N + NR - 1) / NR, stride = panel_bytes(KIND, K);
  // Pieces are of whole pairs of panels.
  pool::share_rows((count + 1) / 2, 4.0 * NR * M * K, threads, [&](int64_t begin, int64_t end) {
    const int64_t first = 2 * begin, last = 2 * end < count ? 2 * end : count;
    if (M <= 2 * block_rows(KIND)) {
      direct<KIND>(M, x, ldx, K, panels, N, bias, y, ldy, first, last);
      return;
    }
    for (int64_t m = 0; m < M; m += MC)
      for (int64_t p = first; p < last; p++)
        many_rows<KIND>(M - m < MC ? M - m : MC, x + m * ldx, ldx, K, panels + p * stride,
                        bias ? bias + p * NR : nullptr, y + m * ldy + p * NR, ldy, N - p * NR);
  });
}

}  // namespace

extern "C" {

int64_t detour_gemm_panel_bytes(int kind, int64_t K) { return panel_bytes(kind, K); }

void detour_gemm(const float* x, int64_t M, int64_t K, int64_t ldx, int kind, const uint8_t* panels,
                 int64_t N, const float* bias, float* y, int64_t ldy, int threads) {
  switch (kind) {
    case F32: gemm<F32>(x, M, K, ldx, panels, N, bias, y, ldy, threads); break;
    case BF16: gemm<BF16>(x, M, K, ldx, panels, N, bias, y, ldy, threads); break;
    case Q8_0: gemm<Q8_0>(x, M, K, ldx, panels, N, bias, y, ldy, threads); break;
    default: gemm<Q4_1>(x, M, K, ldx, panels, N, bias, y, ldy, threads); break;
  }
}
}
