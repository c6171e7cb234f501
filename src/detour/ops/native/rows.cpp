// What is done to each token's numbers alone, float32: norms, rotation, gate, the write to the cache.
// A token's result does not depend on the tokens beside it.
#include <cmath>
#include <cstring>
#include "pool.h"
#include "vector.h"

namespace {

inline float square_sum(const float* x, int64_t width) {
  f8 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps()};
  int64_t i = 0;
  for (; i + 32 <= width; i += 32)
    for (int v = 0; v < 4; v++) {
      f8 a = _mm256_loadu_ps(x + i + 8 * v);
      sums[v] = _mm256_fmadd_ps(a, a, sums[v]);
    }
  for (; i + 8 <= width; i += 8) {
    f8 a = _mm256_loadu_ps(x + i);
    sums[0] = _mm256_fmadd_ps(a, a, sums[0]);
  }
  float total = sum8(_mm256_add_ps(_mm256_add_ps(sums[0], sums[1]), _mm256_add_ps(sums[2], sums[3])));
  for (; i < width; i++) total += x[i] * x[i];
  return total;
}

inline void normalise(const float* x, const float* weight, float eps, int64_t width, float* out) {
  const float scale = 1.0f / std::sqrt(square_sum(x, width) / width + eps);
  for (int64_t i = 0; i < width; i++) out[i] = x[i] * scale * weight[i];
}

}  // namespace

extern "C" {

// x: [outer, inner, width] with strides; out: the same shape, contiguous.
void detour_rms_norm(const float* x, int64_t outer, int64_t inner, int64_t stride0, int64_t stride1,
                     int64_t width, const float* weight, float eps, float* out, int threads) {
  const int64_t rows = outer * inner;
  pool::share_rows(rows, 8.0 * width, threads, [&](int64_t first, int64_t last) {
    for (int64_t r = first; r < last; r++)
      normalise(x + r / inner * stride0 + r % inner * stride1, weight, eps, width, out + r * width);
  });
}

// residual += x; x = norm(residual). Both [T, width], contiguous.
void detour_add_rms_norm(float* x, float* residual, int64_t T, int64_t width, const float* weight,
                         float eps, int threads) {
  pool::share_rows(T, 8.0 * width, threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      float* sum = residual + t * width;
      float* out = x + t * width;
      for (int64_t i = 0; i < width; i++) sum[i] += out[i];
      normalise(sum, weight, eps, width, out);
    }
  });
}

// x [T, heads, width], rotated in place; tokens `stride` apart. cos, sin [T, half].
void detour_rope(float* x, int64_t T, int64_t heads, int64_t width, int64_t stride,
                 const float* cosine, const float* sine, int64_t half, int threads) {
  pool::share_rows(T, 4.0 * heads * width, threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      const float *c = cosine + t * half, *s = sine + t * half;
      for (int64_t h = 0; h < heads; h++) {
        float* __restrict a = x + t * stride + h * width;
        float* __restrict b = a + half;
        for (int64_t i = 0; i < half; i++) {
          const float first = a[i], second = b[i];
          a[i] = first * c[i] - second * s[i];
          b[i] = second * c[i] + first * s[i];
        }
      }
    }
  });
}

// Rows of `width` numbers to cache[slots[t]], for keys and values. Tokens are `stride` apart.
void detour_kv_write(const float* keys, int64_t key_stride, const float* values, int64_t value_stride,
                     const int64_t* slots, int64_t T, int64_t width, float* key_cache,
                     float* value_cache, int threads) {
  pool::share_rows(T, 8.0 * width, threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      memcpy(key_cache + slots[t] * width, keys + t * key_stride, sizeof(float) * width);
      memcpy(value_cache + slots[t] * width, values + t * value_stride, sizeof(float) * width);
    }
  });
}

// silu(x[:, :width]) * x[:, width:]; x [T, 2 width] and out [T, width], contiguous.
void detour_silu_mul(const float* x, int64_t T, int64_t width, float* out, int threads) {
  pool::share_rows(T, 16.0 * width, threads, [&](int64_t first, int64_t last) {
    for (int64_t t = first; t < last; t++) {
      const float *gate = x + 2 * t * width, *up = gate + width;
      float* to = out + t * width;
      const f8 one = _mm256_set1_ps(1.0f), zero = _mm256_setzero_ps();
      int64_t i = 0;
      for (; i + 8 <= width; i += 8) {
        f8 g = _mm256_loadu_ps(gate + i);
        // 1 / (1 + e^-g) through e^-|g|, which cannot overflow.
        f8 e = exp8(_mm256_or_ps(g, _mm256_set1_ps(-0.0f)));
        f8 top = _mm256_blendv_ps(one, e, _mm256_cmp_ps(g, zero, _CMP_LT_OQ));
        f8 sigmoid = _mm256_div_ps(top, _mm256_add_ps(one, e));
        _mm256_storeu_ps(to + i, _mm256_mul_ps(_mm256_mul_ps(g, sigmoid), _mm256_loadu_ps(up + i)));
      }
      for (; i < width; i++) to[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    }
  });
}
}
