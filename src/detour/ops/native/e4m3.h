// Between eight bytes of e4m3 (OCP FP8, without infinities) and floats.
#pragma once
#include <cstdint>
#include "vector.h"

namespace {

// Sign and magnitude move to a float's bits; 2^120 mends the exponent's bias, subnormals too.
inline f8 e4m3(const uint8_t* p) {
  const __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
  const __m256i magnitude = _mm256_and_si256(bytes, _mm256_set1_epi32(0x7f));
  const __m256i sign = _mm256_slli_epi32(_mm256_and_si256(bytes, _mm256_set1_epi32(0x80)), 24);
  const f8 value = _mm256_mul_ps(_mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 20)), _mm256_set1_ps(0x1p120f));
  const __m256i nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(0x7f));
  return _mm256_or_ps(_mm256_or_ps(value, _mm256_castsi256_ps(nan)), _mm256_castsi256_ps(sign));
}

// Rounded to nearest, ties to even; what is too large becomes the largest, 448.
inline void store_e4m3(uint8_t* p, f8 v) {
  const f8 most = _mm256_set1_ps(448.0f), size = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), v);
  const f8 cut = _mm256_min_ps(size, most);
  const __m256i bits = _mm256_castps_si256(cut);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
  const __m256i up = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7ffff)), odd);
  const __m256i normal = _mm256_sub_epi32(_mm256_srli_epi32(up, 20), _mm256_set1_epi32((127 - 7) << 3));
  const __m256i small = _mm256_cvtps_epi32(_mm256_mul_ps(cut, _mm256_set1_ps(512.0f)));
  const __m256i tiny = _mm256_castps_si256(_mm256_cmp_ps(cut, _mm256_set1_ps(0.015625f), _CMP_LT_OQ));
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(_mm256_castps_si256(v), 24), _mm256_set1_epi32(0x80));
  __m256i code = _mm256_blendv_epi8(normal, small, tiny);
  code = _mm256_or_si256(_mm256_blendv_epi8(code, _mm256_set1_epi32(0x7f), nan), sign);
  const __m128i half = _mm_packus_epi32(_mm256_castsi256_si128(code), _mm256_extracti128_si256(code, 1));
  _mm_storel_epi64((__m128i*)p, _mm_packus_epi16(half, half));
}

struct fp8 {
  uint8_t bits;
};

inline f8 load(const fp8* p) { return e4m3((const uint8_t*)p); }

}  // namespace
