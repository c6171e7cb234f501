// What this processor can do at most, for benchmarks to be held against.
#include <chrono>
#include "pool.h"
#include "vector.h"

extern "C" {

// Writes floating-point operations per second of `threads` threads that only multiply and add.
void detour_fma_rate(double* rate, int threads) {
  const int64_t turns = 4000000;
  const auto begun = std::chrono::steady_clock::now();
  pool::share(threads, threads, [&](int64_t) {
    f8 chains[10];
    for (int v = 0; v < 10; v++) chains[v] = _mm256_set1_ps(1.0f + v);
    const f8 factor = _mm256_set1_ps(0.999f), step = _mm256_set1_ps(0.001f);
    for (int64_t i = 0; i < turns; i++) {
#pragma GCC unroll 10
      for (int v = 0; v < 10; v++) chains[v] = _mm256_fmadd_ps(chains[v], factor, step);
      asm volatile("" : "+x"(chains[0]), "+x"(chains[9]));
    }
    for (int v = 0; v < 10; v++) asm volatile("" ::"x"(chains[v]));
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  *rate = 160.0 * turns * threads / took.count();
}

// The same of bfloat16 products of pairs; 0 where the processor has none.
void detour_bf16_rate(double* rate, int threads) {
  *rate = 0;
#ifdef __AVX512BF16__
  const int64_t turns = 4000000;
  const auto begun = std::chrono::steady_clock::now();
  pool::share(threads, threads, [&](int64_t) {
    __m512 chains[10];
    for (int v = 0; v < 10; v++) chains[v] = _mm512_set1_ps(1.0f + v);
    const __m512bh factor = (__m512bh)_mm512_set1_epi32(0x3f003f00);
    for (int64_t i = 0; i < turns; i++) {
#pragma GCC unroll 10
      for (int v = 0; v < 10; v++) chains[v] = _mm512_dpbf16_ps(chains[v], factor, factor);
      asm volatile("" : "+v"(chains[0]), "+v"(chains[9]));
    }
    for (int v = 0; v < 10; v++) asm volatile("" ::"v"(chains[v]));
  });
  const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begun;
  *rate = 640.0 * turns * threads / took.count();
#endif
}
}
