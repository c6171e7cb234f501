// Sampling, a row a task: greedy choice with a check for finite logits; filters and Gumbel-max.
//
// The noise is that of ops/sampling/noise.py, bit for bit in its integers.
#include <algorithm>
#include <cmath>
#include <vector>
#include "pool.h"
#include "vector.h"

namespace {

inline uint64_t split_mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
  return x ^ (x >> 31);
}

inline __m256i fold(__m256i x, int bits) { return _mm256_xor_si256(x, _mm256_srli_epi32(x, bits)); }

inline __m256i times(__m256i x, uint32_t factor) {
  return _mm256_mullo_epi32(x, _mm256_set1_epi32((int)factor));
}

// A token id, spread: the part of the noise that all rows share.
inline __m256i spread(__m256i token) {
  __m256i x = fold(times(token, 0x9E3779B9u), 16);
  x = fold(times(x, 0x85EBCA6Bu), 13);
  return fold(times(x, 0xC2B2AE35u), 16);
}

// The 31-bit numbers of eight tokens under a row's key.
inline __m256i numbers(__m256i spread_token, __m256i low, __m256i high) {
  __m256i x = times(fold(_mm256_xor_si256(spread_token, low), 16), 0x7FEB352Du);
  x = times(fold(_mm256_add_epi32(x, high), 15), 0x846CA68Bu);
  return _mm256_and_si256(fold(x, 16), _mm256_set1_epi32(0x7FFFFFFF));
}

inline float gumbel(int32_t number) {
  const float uniform = std::min(((float)number + 0.5f) * 0x1p-31f, 1.0f - 0x1p-24f);
  return -std::log(-std::log1p(-uniform));
}

struct Filter {
  float temperature, top_p, min_p;
  int64_t top_k;
};

double weight_of_all(const float* scaled, int64_t vocab, float highest) {
  __m256d low = _mm256_setzero_pd(), high = _mm256_setzero_pd();
  int64_t i = 0;
  for (; i + 8 <= vocab; i += 8) {
    f8 e = exp8(_mm256_sub_ps(_mm256_loadu_ps(scaled + i), _mm256_set1_ps(highest)));
    low = _mm256_add_pd(low, _mm256_cvtps_pd(_mm256_castps256_ps128(e)));
    high = _mm256_add_pd(high, _mm256_cvtps_pd(_mm256_extractf128_ps(e, 1)));
  }
  low = _mm256_add_pd(low, high);
  double total = low[0] + low[1] + low[2] + low[3];
  for (; i < vocab; i++) total += std::exp(scaled[i] - highest);
  return total;
}

// The smallest scaled logit that passes top-k and top-p; `scaled` has `vocab` numbers, `highest` the
// largest. Sums run from the largest down in double, as the reference's do.
float ordered_floor(const float* scaled, int64_t vocab, float highest, const Filter& filter) {
  double total = 0;
  const bool every = filter.top_k >= vocab;
  if (every) total = weight_of_all(scaled, vocab, highest);
  std::vector<float> values;
  for (float depth = 8;; depth *= 4) {
    values.clear();
    for (int64_t i = 0; i < vocab; i++)
      if (scaled[i] >= highest - depth) values.push_back(scaled[i]);
    const bool all = (int64_t)values.size() == vocab || depth > 1e9f;
    const int64_t wanted = std::min(filter.top_k, vocab);
    if (!every && (int64_t)values.size() < wanted && !all) continue;
    const int64_t most = std::min<int64_t>(wanted, values.size());
    if (most == 0) return -INFINITY;  // NaN: the row is flagged elsewhere
    if (most < (int64_t)values.size())
      std::nth_element(values.begin(), values.begin() + most - 1, values.end(), std::greater<float>());
    if (filter.top_p >= 1) return *std::min_element(values.begin(), values.begin() + most);
    std::sort(values.begin(), values.begin() + most, std::greater<float>());
    if (!every) {
      total = 0;
      for (int64_t i = 0; i < most; i++) total += std::exp((double)(values[i] - highest));
    }
    double before = 0;
    const double limit = (double)filter.top_p * total;
    for (int64_t i = 0; i < most; i++) {
      if (before >= limit) return values[i - 1];
      before += std::exp((double)(values[i] - highest));
    }
    if (before >= limit || all || !every) return values[most - 1];
  }
}

int64_t draw_row(const float* logits, int64_t vocab, const Filter& filter, uint64_t key,
                 float* scaled) {
  const f8 temperature = _mm256_set1_ps(filter.temperature);
  float highest = -INFINITY;
  f8 most = _mm256_set1_ps(-INFINITY);
  int64_t i = 0;
  for (; i + 8 <= vocab; i += 8) {
    f8 z = _mm256_div_ps(_mm256_loadu_ps(logits + i), temperature);
    _mm256_storeu_ps(scaled + i, z);
    most = _mm256_max_ps(z, most);
  }
  highest = max8(most);
  for (; i < vocab; i++) highest = std::max(highest, scaled[i] = logits[i] / filter.temperature);
  float floor = highest + std::log(filter.min_p);
  if (filter.top_k < vocab || filter.top_p < 1)
    floor = std::max(floor, ordered_floor(scaled, vocab, highest, filter));

  // A token is looked at closely only if it could win: its noise is at most -log of its uniform
  // number, which the exponent of that number bounds.
  float best = -INFINITY;
  int64_t token = 0;
  const __m256i low = _mm256_set1_epi32((int)key), high = _mm256_set1_epi32((int)(key >> 32));
  const f8 least = _mm256_set1_ps(floor);
  alignas(32) int32_t number[8];
  for (i = 0; i < vocab; i += 8) {
    if (i + 8 <= vocab) {
      const f8 z = _mm256_loadu_ps(scaled + i);
      const f8 kept = _mm256_cmp_ps(z, least, _CMP_GE_OQ);
      if (!_mm256_movemask_ps(kept)) continue;
      const __m256i ids = _mm256_add_epi32(_mm256_set1_epi32((int)i),
                                           _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
      const __m256i n = numbers(spread(ids), low, high);
      const f8 uniform = _mm256_add_ps(_mm256_cvtepi32_ps(n), _mm256_set1_ps(0.5f));
      const __m256i power = _mm256_srli_epi32(_mm256_castps_si256(uniform), 23);  // 127 + floor(log2)
      const f8 bound = _mm256_mul_ps(
          _mm256_cvtepi32_ps(_mm256_sub_epi32(_mm256_set1_epi32(127 + 31), power)),
          _mm256_set1_ps(0.69314724f));  // a little above ln 2
      const f8 possible = _mm256_cmp_ps(_mm256_add_ps(z, bound), _mm256_set1_ps(best), _CMP_GE_OQ);
      int mask = _mm256_movemask_ps(_mm256_and_ps(kept, possible));
      if (!mask) continue;
      _mm256_store_si256((__m256i*)number, n);
      for (; mask; mask &= mask - 1) {
        const int lane = __builtin_ctz(mask);
        const float score = scaled[i + lane] + gumbel(number[lane]);
        if (score > best) best = score, token = i + lane;
      }
    } else {
      _mm256_store_si256((__m256i*)number,
                         numbers(spread(_mm256_add_epi32(_mm256_set1_epi32((int)i),
                                                         _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7))),
                                 low, high));
      for (int lane = 0; i + lane < vocab; lane++) {
        const float z = scaled[i + lane];
        if (!(z >= floor)) continue;
        const float score = z + gumbel(number[lane]);
        if (score > best) best = score, token = i + lane;
      }
    }
  }
  return token;
}

}  // namespace

extern "C" {

// Per row of logits [R, vocab]: the first index of the largest, and whether all are finite.
void detour_greedy(const float* logits, int64_t R, int64_t vocab, int64_t* tokens, uint8_t* finite,
                   int threads) {
  pool::share(R, threads, [&](int64_t r) {
    const float* row = logits + r * vocab;
    const f8 sign = _mm256_set1_ps(-0.0f), infinite = _mm256_set1_ps(INFINITY);
    f8 most[2] = {_mm256_set1_ps(-INFINITY), _mm256_set1_ps(-INFINITY)}, fine = _mm256_cmp_ps(sign, sign, _CMP_EQ_OQ);
    int64_t i = 0;
    for (; i + 16 <= vocab; i += 16)
      for (int v = 0; v < 2; v++) {
        f8 z = _mm256_loadu_ps(row + i + 8 * v);
        most[v] = _mm256_max_ps(z, most[v]);
        fine = _mm256_and_ps(fine, _mm256_cmp_ps(_mm256_andnot_ps(sign, z), infinite, _CMP_LT_OQ));
      }
    float highest = max8(_mm256_max_ps(most[0], most[1]));
    bool all = _mm256_movemask_ps(fine) == 255;
    for (; i < vocab; i++) {
      highest = std::max(highest, row[i]);
      all = all && std::fabs(row[i]) < INFINITY;
    }
    int64_t at = 0;
    while (at < vocab && row[at] != highest) at++;
    tokens[r] = at < vocab ? at : 0;
    finite[r] = all;
  });
}

// The op `draw`: all arguments as there; scratch [R, vocab].
void detour_draw(const float* logits, int64_t R, int64_t vocab, const float* temperature,
                 const int64_t* top_k, const float* top_p, const float* min_p, const int64_t* seeds,
                 const int64_t* positions, float* scratch, int64_t* tokens, int threads) {
  pool::share(R, threads, [&](int64_t r) {
    const uint64_t golden = 0x9E3779B97F4A7C15ull;
    const uint64_t key = split_mix(split_mix((uint64_t)seeds[r] + golden) + (uint64_t)positions[r] * golden);
    tokens[r] = draw_row(logits + r * vocab, vocab, {temperature[r], top_p[r], min_p[r], top_k[r]}, key,
                         scratch + r * vocab);
  });
}
}
