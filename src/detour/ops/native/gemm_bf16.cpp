// y[M, N] = x[M, K] * W^T (+ bias) in bfloat16, through AVX512_BF16's products of pairs.
//
// As in gemm.cpp weights lie in panels of 16 outputs, packed or plain, and every output is one chain
// over k in ascending order whatever M is, here two inputs a link: a row's result is bit for bit the
// same alone and in a batch. Packed weights are expanded in float and rounded to bfloat16 once.
#include <cstdint>
#include <cstring>
#include <type_traits>
#include "pool.h"
#include "vector.h"

#ifdef __AVX512BF16__

namespace {

typedef __m512 f16;

constexpr int NR = 16;      // outputs a panel
constexpr int GROUP = 32;   // weights that share a scale
constexpr int AHEAD = 2048; // bytes
constexpr int KC = 256;     // inputs whose weights are expanded at a time: two panels of 8 KB
constexpr int MC = 192;     // rows that share expanded weights; their x stays in the second level
constexpr int MR = 12;      // rows a micro-kernel holds in registers, beside two panels

enum Kind : int { BF16 = 1, Q8_0 = 2, Q4_1 = 3 };

inline int64_t panel_bytes(int kind, int64_t K) {
  switch (kind) {
    case BF16: return K * NR * 2;
    case Q8_0: return K / GROUP * (NR * 2 + GROUP * NR);
    default: return K / GROUP * (NR * 4 + GROUP * NR / 2);
  }
}

inline f16 half16(const uint8_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }

inline __attribute__((always_inline)) void ask(const uint8_t* now, int bytes) {
#pragma GCC unroll 10
  for (int b = 0; b < bytes; b += 64) _mm_prefetch((const char*)(now + AHEAD + b), _MM_HINT_T0);
}

// Two inputs of 16 outputs, side by side.
inline __m512i pair(f16 even, f16 odd, __m512i order) {
  return _mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(odd, even));
}

inline __m512i pair_order() {
  alignas(64) uint16_t order[32];
  for (int i = 0; i < 16; i++) order[2 * i] = i, order[2 * i + 1] = 16 + i;
  return _mm512_load_si512(order);
}

// Calls use(k, w) for each even k of P neighbouring panels, w[p] the panel's inputs k and k + 1.
template <int KIND, int P, class Use>
inline __attribute__((always_inline)) void each_pair(const uint8_t* panel, int64_t stride, int64_t K, Use use) {
  __m512i w[P];
  if constexpr (KIND == BF16) {
    for (int64_t k = 0; k < K; k += 2, panel += NR * 4) {
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        ask(panel + p * stride, 64);
        w[p] = _mm512_loadu_si512(panel + p * stride);
      }
      use(k, w);
    }
    return;
  }
  const __m512i order = pair_order();
  f16 scale[P];
  if constexpr (KIND == Q8_0) {
    for (int64_t g = 0; g < K; g += GROUP) {
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        scale[p] = half16(panel + p * stride);
        ask(panel + p * stride, NR * 2 + GROUP * NR);
      }
      panel += NR * 2;
      for (int i = 0; i < GROUP; i += 2, panel += 2 * NR) {
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
          const __m128i* at = (const __m128i*)(panel + p * stride);
          const f16 even = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at)));
          const f16 odd = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(at + 1)));
          w[p] = pair(_mm512_mul_ps(even, scale[p]), _mm512_mul_ps(odd, scale[p]), order);
        }
        use(g + i, w);
      }
    }
  } else {
    // A 32-bit lane holds eight inputs of one output. The upper nibble of a byte is not shifted down
    // but read as 16 q and multiplied by scale / 16: powers of two, so the product is the same.
    const __m512i lower = _mm512_set1_epi32(15), upper = _mm512_set1_epi32(240);
    f16 fine[P], least[P];
    __m512i q[P];
    for (int64_t g = 0; g < K; g += GROUP) {
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) {
        scale[p] = half16(panel + p * stride);
        least[p] = half16(panel + p * stride + 32);
        fine[p] = _mm512_mul_ps(scale[p], _mm512_set1_ps(1.0f / 16));
        ask(panel + p * stride, NR * 4 + GROUP * NR / 2);
      }
      panel += NR * 4;
      for (int i = 0; i < GROUP; i += 8, panel += NR * 4) {
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) q[p] = _mm512_loadu_si512(panel + p * stride);
#pragma GCC unroll 4
        for (int two = 0; two < 8; two += 2) {
#pragma GCC unroll 8
          for (int p = 0; p < P; p++) {
            const f16 even = _mm512_cvtepi32_ps(_mm512_and_si512(q[p], lower));
            const f16 odd = _mm512_cvtepi32_ps(_mm512_and_si512(q[p], upper));
            w[p] = pair(_mm512_fmadd_ps(even, scale[p], least[p]), _mm512_fmadd_ps(odd, fine[p], least[p]),
                        order);
            q[p] = _mm512_srli_epi32(q[p], 8);
          }
          use(g + i + two, w);
        }
      }
    }
  }
}

inline void finish(bf16* y, const bf16* bias, int64_t left, f16 sum) {
  const __mmask16 some = left < NR ? (__mmask16)((1u << left) - 1) : (__mmask16)0xffff;
  if (bias) {
    const __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(some, bias));
    sum = _mm512_add_ps(sum, _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)));
  }
  _mm256_mask_storeu_epi16(y, some, (__m256i)_mm512_cvtneps_pbh(sum));
}

// x[k] and x[k + 1], for every lane.
inline __m512bh two_inputs(const bf16* x) {
  int both;
  memcpy(&both, x, 4);
  return (__m512bh)_mm512_set1_epi32(both);
}

struct Rows {
  const bf16* x;
  int64_t count, stride, K;
};

struct Out {
  bf16* y;  // of the first row and panel
  int64_t stride, left;  // left: outputs from the first panel on
  const bf16* bias;
};

// R rows against P panels, straight from their packed form.
template <int KIND, int R, int P>
__attribute__((noinline)) void few_rows(const Rows& rows, const uint8_t* panel, int64_t stride, const Out& out) {
  f16 sum[R][P];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++) sum[r][p] = _mm512_setzero_ps();
  const bf16* x = rows.x;
  const int64_t ldx = rows.stride;
  each_pair<KIND, P>(panel, stride, rows.K, [&](int64_t k, const __m512i* w) __attribute__((always_inline)) {
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const __m512bh a = two_inputs(x + r * ldx + k);
#pragma GCC unroll 8
      for (int p = 0; p < P; p++) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], (__m512bh)w[p], a);
    }
  });
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 8
    for (int p = 0; p < P; p++)
      finish(out.y + r * out.stride + p * NR, out.bias ? out.bias + p * NR : nullptr, out.left - p * NR,
             sum[r][p]);
}

// sums[R, P, 16] += x[R, K] * wide[P, K, 16], going on with each chain where it stopped.
template <int R, int P>
__attribute__((noinline)) void go_on(const bf16* x, int64_t ldx, int64_t K, const uint8_t* wide, int64_t stride,
                                     float* sums) {
  f16 sum[R][P];
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) sum[r][p] = _mm512_load_ps(sums + (r * P + p) * NR);
  for (int64_t k = 0; k < K; k += 2, wide += NR * 4) {
    __m512bh w[P];
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) w[p] = (__m512bh)_mm512_loadu_si512(wide + p * stride);
#pragma GCC unroll 12
    for (int r = 0; r < R; r++) {
      const __m512bh a = two_inputs(x + r * ldx + k);
#pragma GCC unroll 2
      for (int p = 0; p < P; p++) sum[r][p] = _mm512_dpbf16_ps(sum[r][p], w[p], a);
    }
  }
#pragma GCC unroll 12
  for (int r = 0; r < R; r++)
#pragma GCC unroll 2
    for (int p = 0; p < P; p++) _mm512_store_ps(sums + (r * P + p) * NR, sum[r][p]);
}

// Calls use(first, rows) with rows a compile-time number up to MOST: as few blocks as cover M rows, of even
// sizes.
template <int MOST, class Use>
inline void each_block(int64_t M, Use use) {
  const int64_t blocks = (M + MOST - 1) / MOST;
  for (int64_t m = 0, i = 0; i < blocks; i++) {
    const int64_t rows = M / blocks + (i < M % blocks);
    switch (rows) {
#define CASE(R) case R: if constexpr (MOST >= R) use(m, std::integral_constant<int, R>()); break;
      CASE(12) CASE(11) CASE(10) CASE(9) CASE(8) CASE(7) CASE(6) CASE(5) CASE(4) CASE(3) CASE(2)
#undef CASE
      default: use(m, std::integral_constant<int, 1>()); break;
    }
    m += rows;
  }
}

// Many rows against P panels: KC inputs' weights are expanded into the first cache level and used by all
// rows, whose sums wait in `sums`.
template <int KIND, int P>
void many_rows(const Rows& rows, const uint8_t* panel, int64_t stride, const Out& out) {
  alignas(64) static thread_local uint8_t expanded[P * KC * NR * 2];
  alignas(64) static thread_local float sums[MC * P * NR];
  memset(sums, 0, sizeof(float) * rows.count * P * NR);
  const int64_t chunk_bytes = panel_bytes(KIND, KC);
  for (int64_t k0 = 0; k0 < rows.K; k0 += KC, panel += chunk_bytes) {
    const int64_t depth = rows.K - k0 < KC ? rows.K - k0 : KC;
    const uint8_t* ready = panel;
    int64_t apart = stride;
    if constexpr (KIND != BF16) {
      ready = expanded, apart = KC * NR * 2;
      each_pair<KIND, P>(panel, stride, depth, [&](int64_t k, const __m512i* w) __attribute__((always_inline)) {
#pragma GCC unroll 2
        for (int p = 0; p < P; p++) _mm512_store_si512(expanded + p * apart + k * NR * 2, w[p]);
      });
    }
    each_block<MR>(rows.count, [&](int64_t m, auto block) {
      go_on<decltype(block)::value, P>(rows.x + m * rows.stride + k0, rows.stride, depth, ready, apart,
                                       sums + m * P * NR);
    });
  }
  for (int64_t m = 0; m < rows.count; m++)
    for (int p = 0; p < P; p++)
      finish(out.y + m * out.stride + p * NR, out.bias ? out.bias + p * NR : nullptr, out.left - p * NR,
             _mm512_load_ps(sums + (m * P + p) * NR));
}

// P neighbouring panels, all rows. Few rows expand the weights anew, in registers, in every block.
template <int KIND, int P>
void panels(const Rows& rows, const uint8_t* panel, int64_t stride, const Out& out) {
  if (rows.count <= 8) {
    each_block<8>(rows.count, [&](int64_t, auto block) {
      few_rows<KIND, decltype(block)::value, P>(rows, panel, stride, out);
    });
    return;
  }
  for (int64_t m = 0; m < rows.count; m += MC) {
    const int64_t count = rows.count - m < MC ? rows.count - m : MC;
    many_rows<KIND, P>({rows.x + m * rows.stride, count, rows.stride, rows.K}, panel, stride,
                       {out.y + m * out.stride, out.stride, out.left, out.bias});
  }
}

template <int KIND>
void gemm(const Rows& rows, const uint8_t* weights, int64_t N, const bf16* bias, bf16* y, int64_t ldy,
          int threads) {
  const int64_t count = (N + NR - 1) / NR, stride = panel_bytes(KIND, rows.K);
  // Pieces are of whole pairs of panels; to expand weights costs as much as some rows.
  pool::share_rows((count + 1) / 2, 4.0 * NR * (rows.count + 4) * rows.K, threads, [&](int64_t begin, int64_t end) {
    const int64_t last = 2 * end < count ? 2 * end : count;
    int64_t p = 2 * begin;
    const auto out = [&] { return Out{y + p * NR, ldy, N - p * NR, bias ? bias + p * NR : nullptr}; };
    if (rows.count == 1)  // four chains hide an addition's latency better than two
      for (; p + 4 <= last; p += 4) few_rows<KIND, 1, 4>(rows, weights + p * stride, stride, out());
    for (; p + 2 <= last; p += 2) panels<KIND, 2>(rows, weights + p * stride, stride, out());
    if (p < last) panels<KIND, 1>(rows, weights + p * stride, stride, out());
  });
}

}  // namespace

extern "C" void detour_gemm_bf16(const void* x, int64_t M, int64_t K, int64_t ldx, int kind,
                                 const uint8_t* weights, int64_t N, const void* bias, void* y, int64_t ldy,
                                 int threads) {
  const Rows rows = {(const bf16*)x, M, ldx, K};
  switch (kind) {
    case BF16: gemm<BF16>(rows, weights, N, (const bf16*)bias, (bf16*)y, ldy, threads); break;
    case Q8_0: gemm<Q8_0>(rows, weights, N, (const bf16*)bias, (bf16*)y, ldy, threads); break;
    default: gemm<Q4_1>(rows, weights, N, (const bf16*)bias, (bf16*)y, ldy, threads); break;
  }
}

#endif
