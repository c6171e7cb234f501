// Eight bytes of e4m3 (OCP FP8, without infinities) to floats, exactly.
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

struct fp8 {
  uint8_t bits;
};

inline f8 load(const fp8* p) { return e4m3((const uint8_t*)p); }

}  // namespace
