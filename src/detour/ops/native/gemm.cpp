// y[M, N] = x[M, K] * W^T (+ bias): float32 activations, weights packed or plain, exact dequantisation.
//
// Weights lie in panels of 16 outputs. Every output is one chain of fused multiply-adds over k in
// ascending order, whatever M is, so a row's result does not depend on the rows computed beside it:
// bit for bit the same alone and in a batch.
//
// A weight is q * scale + minimum rounded to float32 once, also when it is expanded for many rows.
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace {

constexpr int NR = 16;      // outputs a panel
constexpr int GROUP = 32;   // weights that share a scale
constexpr int MR = 6;       // rows a micro-kernel holds in registers
constexpr int MC = 96;      // rows that share one expanded panel; x block stays in L2

enum Kind : int { F32 = 0, BF16 = 1, Q8_0 = 2, Q4_1 = 3 };

typedef __m256 f8;

inline int64_t panel_bytes(int kind, int64_t K) {
  switch (kind) {
    case F32: return K * NR * 4;
    case BF16: return K * NR * 2;
    case Q8_0: return K / GROUP * (NR * 2 + GROUP * NR);
    default: return K / GROUP * (NR * 4 + GROUP * NR / 2);
  }
}

inline f8 half8(const uint8_t* p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)); }

// Calls use(k, w_low, w_high) for each k of one panel, the 16 weights of that k in two vectors.
template <int KIND, class Use>
inline __attribute__((always_inline)) void each_k(const uint8_t* panel, int64_t K, Use use) {
  if constexpr (KIND == F32) {
    const float* w = (const float*)panel;
    for (int64_t k = 0; k < K; k++, w += NR) use(k, _mm256_loadu_ps(w), _mm256_loadu_ps(w + 8));
  } else if constexpr (KIND == BF16) {
    for (int64_t k = 0; k < K; k++, panel += NR * 2) {
      __m256i low = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)panel));
      __m256i high = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)(panel + 16)));
      use(k, _mm256_castsi256_ps(_mm256_slli_epi32(low, 16)),
          _mm256_castsi256_ps(_mm256_slli_epi32(high, 16)));
    }
  } else if constexpr (KIND == Q8_0) {
    for (int64_t g = 0; g < K; g += GROUP) {
      f8 scale0 = half8(panel), scale1 = half8(panel + 16);
      panel += NR * 2;
      for (int i = 0; i < GROUP; i++, panel += NR) {
        f8 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)panel)));
        f8 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(panel + 8))));
        use(g + i, _mm256_mul_ps(low, scale0), _mm256_mul_ps(high, scale1));
      }
    }
  } else {
    const __m256i mask = _mm256_set1_epi32(15);
    for (int64_t g = 0; g < K; g += GROUP) {
      f8 scale0 = half8(panel), scale1 = half8(panel + 16);
      f8 least0 = half8(panel + 32), least1 = half8(panel + 48);
      panel += NR * 4;
      for (int i = 0; i < GROUP; i += 2, panel += NR) {
        __m256i a = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)panel));
        __m256i b = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(panel + 8)));
        use(g + i, _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(a, mask)), scale0, least0),
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_and_si256(b, mask)), scale1, least1));
        use(g + i + 1, _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(a, 4)), scale0, least0),
            _mm256_fmadd_ps(_mm256_cvtepi32_ps(_mm256_srli_epi32(b, 4)), scale1, least1));
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

// `ROWS` rows against one panel, straight from its packed form.
template <int KIND, int ROWS>
void few_rows(const float* x, int64_t ldx, int64_t K, const uint8_t* panel, const float* bias,
              float* y, int64_t ldy, int64_t left) {
  f8 low[ROWS], high[ROWS];
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) low[r] = high[r] = _mm256_setzero_ps();
  each_k<KIND>(panel, K, [&](int64_t k, f8 w0, f8 w1) __attribute__((always_inline)) {
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
      f8 a = _mm256_broadcast_ss(x + r * ldx + k);
      low[r] = _mm256_fmadd_ps(a, w0, low[r]);
      high[r] = _mm256_fmadd_ps(a, w1, high[r]);
    }
  });
#pragma GCC unroll 8
  for (int r = 0; r < ROWS; r++) store(y + r * ldy, bias, left, low[r], high[r]);
}

template <int KIND>
void rows_of_panel(int64_t M, const float* x, int64_t ldx, int64_t K, const uint8_t* panel,
                   const float* bias, float* y, int64_t ldy, int64_t left) {
  // Blocks of six, the last two evened out: 8 rows are 4 + 4, not 6 + 2.
  for (int64_t m = 0; m < M;) {
    const int64_t rest = M - m, rows = rest <= MR ? rest : rest < 2 * MR ? (rest + 1) / 2 : MR;
    const float* xm = x + m * ldx;
    float* ym = y + m * ldy;
    switch (rows) {
      case 6: few_rows<KIND, 6>(xm, ldx, K, panel, bias, ym, ldy, left); break;
      case 5: few_rows<KIND, 5>(xm, ldx, K, panel, bias, ym, ldy, left); break;
      case 4: few_rows<KIND, 4>(xm, ldx, K, panel, bias, ym, ldy, left); break;
      case 3: few_rows<KIND, 3>(xm, ldx, K, panel, bias, ym, ldy, left); break;
      case 2: few_rows<KIND, 2>(xm, ldx, K, panel, bias, ym, ldy, left); break;
      default: few_rows<KIND, 1>(xm, ldx, K, panel, bias, ym, ldy, left); break;
    }
    m += rows;
  }
}

template <int KIND>
void gemm(const float* x, int64_t M, int64_t K, int64_t ldx, const uint8_t* panels, int64_t N,
          const float* bias, float* y, int64_t ldy, int threads) {
  const int64_t count = (N + NR - 1) / NR, stride = panel_bytes(KIND, K);
#pragma omp parallel num_threads(threads)
  {
    float* wide = M > MR && KIND != F32 ? (float*)_mm_malloc(sizeof(float) * K * NR, 64) : nullptr;
    for (int64_t m = 0; m < M; m += MC) {
      const int64_t rows = M - m < MC ? M - m : MC;
#pragma omp for schedule(static) nowait
      for (int64_t p = 0; p < count; p++) {
        const uint8_t* panel = panels + p * stride;
        const float* b = bias ? bias + p * NR : nullptr;
        const float* xm = x + m * ldx;
        float* ym = y + m * ldy + p * NR;
        if (wide) {
          each_k<KIND>(panel, K, [&](int64_t k, f8 w0, f8 w1) __attribute__((always_inline)) {
            _mm256_store_ps(wide + k * NR, w0);
            _mm256_store_ps(wide + k * NR + 8, w1);
          });
          rows_of_panel<F32>(rows, xm, ldx, K, (const uint8_t*)wide, b, ym, ldy, N - p * NR);
        } else {
          rows_of_panel<KIND>(rows, xm, ldx, K, panel, b, ym, ldy, N - p * NR);
        }
      }
    }
    if (wide) _mm_free(wide);
  }
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
