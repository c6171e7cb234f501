// Eight-lane helpers that the kernels share.
#pragma once
#include <cstdint>
#include <cstring>
#include <immintrin.h>

namespace {

typedef __m256 f8;

// bfloat16: the upper half of a float.
struct bf16 {
  uint16_t bits;
};

inline f8 load(const float* p) { return _mm256_loadu_ps(p); }
inline f8 load(const bf16* p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16));
}

// Eight floats rounded to bfloat16, to nearest and ties to even.
inline __m128i narrow(f8 v) {
#if defined(__AVX512BF16__) && defined(__AVX512VL__)
  return (__m128i)_mm256_cvtneps_pbh(v);
#else
  const __m256i bits = _mm256_castps_si256(v);
  const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  const __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(v, v, _CMP_UNORD_Q));
  rounded = _mm256_srli_epi32(_mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan), 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(rounded), _mm256_extracti128_si256(rounded, 1));
#endif
}

inline void store(float* p, f8 v) { _mm256_storeu_ps(p, v); }
inline void store(bf16* p, f8 v) { _mm_storeu_si128((__m128i*)p, narrow(v)); }

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
  const uint32_t bits = (uint32_t)x.bits << 16;
  float wide;
  memcpy(&wide, &bits, 4);
  return wide;
}
inline void put(float* p, float x) { *p = x; }
inline void put(bf16* p, float x) { p->bits = (uint16_t)_mm_cvtsi128_si32(narrow(_mm256_set1_ps(x))); }

// What a number becomes when it is stored and read again.
inline f8 rounded(f8 v, const float*) { return v; }
inline f8 rounded(f8 v, const bf16*) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow(v)), 16));
}
inline float rounded(float x, const float*) { return x; }
inline float rounded(float x, const bf16*) {
  bf16 kept;
  put(&kept, x);
  return widen(kept);
}

// Calls use with a null pointer to the type that a dtype's number names: 0 float, 1 bf16.
template <class Use>
inline void of_type(int dtype, Use use) {
  dtype ? use((bf16*)nullptr) : use((float*)nullptr);
}

// e^x within two units in the last place; 0 below -87.3 (float's normal range), x <= 88.
// Cody and Waite's reduction to [-ln 2 / 2, ln 2 / 2] and a Taylor polynomial of degree 6.
inline f8 exp8(f8 x) {
  x = _mm256_max_ps(x, _mm256_set1_ps(-88.0f));
  f8 n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)),
                         _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  f8 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  f8 p = _mm256_set1_ps(1.0f / 720);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 120));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 24));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f / 6));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(0.5f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.0f));
  __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  f8 result = _mm256_mul_ps(p, _mm256_castsi256_ps(power));
  return _mm256_and_ps(result, _mm256_cmp_ps(x, _mm256_set1_ps(-87.3f), _CMP_GE_OQ));
}

inline float sum8(f8 v) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_shuffle_ps(s, s, 1)));
}

inline float max8(f8 v) {
  __m128 s = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  s = _mm_max_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_max_ss(s, _mm_shuffle_ps(s, s, 1)));
}

// The sums of four vectors, in order.
inline __m128 sums4(const f8* v) {
  f8 all = _mm256_hadd_ps(_mm256_hadd_ps(v[0], v[1]), _mm256_hadd_ps(v[2], v[3]));
  return _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
}

}  // namespace
