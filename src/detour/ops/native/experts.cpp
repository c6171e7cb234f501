// Routed experts on a CPU, on float or bf16 weights (`dtype`, see of_type), computed in float.
//
// Every product is eight chains over its inputs, whatever is computed beside it, and a token's experts are
// added in the order of their numbers: a token's result is the same bits in any batch.
#include <algorithm>
#include <type_traits>
#include <vector>
#include "pool.h"
#include "vector.h"

namespace {

constexpr int64_t ROWS = 32;  // of an expert's matrix that a piece of work takes

// out[n][i] = x[n] . w[i], for N inputs and four rows `width` apart.
template <int N, class S>
inline void dots(const float* const* x, const S* w, int64_t width, float (*out)[4]) {
  f8 sums[N][4];
#pragma GCC unroll 4
  for (int n = 0; n < N; n++)
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) sums[n][i] = _mm256_setzero_ps();
  for (int64_t k = 0; k < width; k += 8) {
    f8 a[N];
#pragma GCC unroll 4
    for (int n = 0; n < N; n++) a[n] = load(x[n] + k);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      const f8 b = load(w + i * width + k);
#pragma GCC unroll 4
      for (int n = 0; n < N; n++) sums[n][i] = _mm256_fmadd_ps(a[n], b, sums[n][i]);
    }
  }
#pragma GCC unroll 4
  for (int n = 0; n < N; n++) _mm_storeu_ps(out[n], sums4(sums[n]));
}

// The same for `count` inputs and each four of the rows [first, last): use(input, row, four products).
template <class S, class Use>
void multiply(const std::vector<const float*>& x, const S* w, int64_t first, int64_t last, int64_t width, Use use) {
  const int64_t count = x.size();
  for (int64_t row = first; row < last; row += 4)
    for (int64_t n = 0; n < count;) {
      float out[3][4];
      const int64_t some = std::min<int64_t>(count - n, 3);
      some == 3   ? dots<3>(&x[n], w + row * width, width, out)
      : some == 2 ? dots<2>(&x[n], w + row * width, width, out)
                  : dots<1>(&x[n], w + row * width, width, out);
      for (int64_t i = 0; i < some; i++) use(n + i, row, out[i]);
      n += some;
    }
}

// Which (token, place) pairs go to each expert, those of an expert one after the other.
struct Pairs {
  std::vector<int64_t> order, start, busy;  // pairs; [experts + 1]; experts that have any

  Pairs(const int64_t* experts, int64_t pairs, int64_t count) : order(pairs), start(count + 1) {
    for (int64_t i = 0; i < pairs; i++) start[experts[i] + 1]++;
    for (int64_t e = 0; e < count; e++) {
      if (start[e + 1]) busy.push_back(e);
      start[e + 1] += start[e];
    }
    std::vector<int64_t> next(start.begin(), start.end() - 1);
    for (int64_t i = 0; i < pairs; i++) order[next[experts[i]]++] = i;
  }
};

template <class S>
void compute(const S* x, int64_t tokens, int64_t hidden, int64_t width, const S* gate_up, const S* down,
             const float* weights, const int64_t* experts, int64_t top, int64_t count, S* out, int threads) {
  const Pairs pairs(experts, tokens * top, count);
  std::vector<float> wide(tokens * hidden), inner(tokens * top * width), outer(tokens * top * hidden);
  for (int64_t i = 0; i < tokens * hidden; i += 8) store(&wide[i], load(x + i));
  // Pieces of each busy expert's rows; use(expert, its pairs [begin, end), rows [first, last)).
  const auto each = [&](int64_t rows, auto use) {
    const int64_t parts = (rows + ROWS - 1) / ROWS;
    pool::share(parts * pairs.busy.size(), threads, [&](int64_t i) {
      const int64_t expert = pairs.busy[i / parts], first = i % parts * ROWS;
      std::vector<const float*> inputs;
      use(expert, pairs.start[expert], pairs.start[expert + 1], first, std::min(first + ROWS, rows), inputs);
    });
  };
  each(width, [&](int64_t expert, int64_t begin, int64_t end, int64_t first, int64_t last, auto& inputs) {
    for (int64_t p = begin; p < end; p++) inputs.push_back(&wide[pairs.order[p] / top * hidden]);
    const S* gate = gate_up + expert * 2 * width * hidden;
    multiply(inputs, gate, first, last, hidden, [&](int64_t n, int64_t row, const float* four) {
      std::copy(four, four + 4, &inner[pairs.order[begin + n] * width + row]);
    });
    multiply(inputs, gate + width * hidden, first, last, hidden, [&](int64_t n, int64_t row, const float* four) {
      float* to = &inner[pairs.order[begin + n] * width + row];
      alignas(32) float both[8] = {-to[0], -to[1], -to[2], -to[3]};
      _mm256_store_ps(both, exp8(_mm256_min_ps(_mm256_load_ps(both), _mm256_set1_ps(88.0f))));
      for (int i = 0; i < 4; i++) to[i] = to[i] / (1.0f + both[i]) * four[i];
    });
  });
  each(hidden, [&](int64_t expert, int64_t begin, int64_t end, int64_t first, int64_t last, auto& inputs) {
    for (int64_t p = begin; p < end; p++) inputs.push_back(&inner[pairs.order[p] * width]);
    multiply(inputs, down + expert * hidden * width, first, last, width, [&](int64_t n, int64_t row, const float* four) {
      std::copy(four, four + 4, &outer[pairs.order[begin + n] * hidden + row]);
    });
  });
  pool::share_rows(tokens, hidden * top * 2.0, threads, [&](int64_t first, int64_t last) {
    std::vector<int64_t> places(top);
    for (int64_t t = first; t < last; t++) {
      for (int64_t k = 0; k < top; k++) places[k] = k;
      std::sort(places.begin(), places.end(), [&](int64_t a, int64_t b) { return experts[t * top + a] < experts[t * top + b]; });
      for (int64_t i = 0; i < hidden; i += 8) {
        f8 sum = _mm256_setzero_ps();
        for (const int64_t k : places)
          sum = _mm256_fmadd_ps(_mm256_set1_ps(weights[t * top + k]), load(&outer[(t * top + k) * hidden + i]), sum);
        store(out + t * hidden + i, sum);
      }
    }
  });
}

}  // namespace

// x [tokens, hidden]; gate_up [count, 2 * width, hidden]; down [count, hidden, width]; weights, experts
// [tokens, top]; out [tokens, hidden]. hidden and width are multiples of 8.
extern "C" void detour_experts(const void* x, int64_t tokens, int64_t hidden, int64_t width, const void* gate_up,
                               const void* down, const float* weights, const int64_t* experts, int64_t top,
                               int64_t count, void* out, int dtype, int threads) {
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    compute((const S*)x, tokens, hidden, width, (const S*)gate_up, (const S*)down, weights, experts, top, count,
            (S*)out, threads);
  });
}
