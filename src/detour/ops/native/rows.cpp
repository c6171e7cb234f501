// What is done to each token's numbers alone: norms, rotation, gate, the write to the cache.
// A token's result does not depend on the tokens beside it. Numbers are float or bf16 (`dtype`, see
// of_type), computed with in float.
#include <cmath>
#include <cstring>
#include <type_traits>
#include "normalise.h"
#include "pool.h"
#include "vector.h"

namespace {

template <class S>
inline void add(S* sum, const S* x, int64_t width) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) store(sum + i, _mm256_add_ps(load(sum + i), load(x + i)));
  for (; i < width; i++) put(sum + i, widen(sum[i]) + widen(x[i]));
}

// (a, b) turned by the angles whose cosines are c and sines are s, over `half` pairs.
template <class S>
inline void turn(S* a, S* b, const float* c, const float* s, int64_t half) {
  int64_t i = 0;
  for (; i + 8 <= half; i += 8) {
    const f8 first = load(a + i), second = load(b + i), cosine = load(c + i), sine = load(s + i);
    store(a + i, _mm256_fmsub_ps(first, cosine, _mm256_mul_ps(second, sine)));
    store(b + i, _mm256_fmadd_ps(second, cosine, _mm256_mul_ps(first, sine)));
  }
  for (; i < half; i++) {
    const float first = widen(a[i]), second = widen(b[i]);
    put(a + i, first * c[i] - second * s[i]);
    put(b + i, second * c[i] + first * s[i]);
  }
}

// 1 / (1 + e^-g) through e^-|g|, which cannot overflow.
inline f8 sigmoid(f8 g) {
  const f8 one = _mm256_set1_ps(1.0f), zero = _mm256_setzero_ps();
  f8 e = exp8(_mm256_or_ps(g, _mm256_set1_ps(-0.0f)));
  f8 top = _mm256_blendv_ps(one, e, _mm256_cmp_ps(g, zero, _CMP_LT_OQ));
  return _mm256_div_ps(top, _mm256_add_ps(one, e));
}

template <class S>
inline void gate(const S* gates, const S* up, int64_t width, S* out) {
  int64_t i = 0;
  for (; i + 8 <= width; i += 8) {
    f8 g = load(gates + i);
    store(out + i, _mm256_mul_ps(rounded(_mm256_mul_ps(g, sigmoid(g)), up), load(up + i)));
  }
  for (; i < width; i++) {
    const float g = widen(gates[i]);
    put(out + i, rounded(g / (1.0f + std::exp(-g)), up) * widen(up[i]));
  }
}

}  // namespace

extern "C" {

// x: [outer, inner, width] with strides; out: the same shape, contiguous.
void detour_rms_norm(const void* x, int64_t outer, int64_t inner, int64_t stride0, int64_t stride1,
                     int64_t width, const void* weight, float eps, void* out, int dtype, int threads) {
  const int64_t rows = outer * inner;
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    pool::share_rows(rows, 8.0 * width, threads, [&](int64_t first, int64_t last) {
      for (int64_t r = first; r < last; r++)
        normalise((const S*)x + r / inner * stride0 + r % inner * stride1, (const S*)weight, eps, width,
                  (S*)out + r * width);
    });
  });
}

// residual += x; x = norm(residual). Both [T, width], contiguous.
void detour_add_rms_norm(void* x, void* residual, int64_t T, int64_t width, const void* weight,
                         float eps, int dtype, int threads) {
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    pool::share_rows(T, 8.0 * width, threads, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++) {
        S *sum = (S*)residual + t * width, *out = (S*)x + t * width;
        add(sum, out, width);
        normalise(sum, (const S*)weight, eps, width, out);
      }
    });
  });
}

// x [T, heads, width], rotated in place; tokens `stride` apart. cos, sin [T, half].
void detour_rope(void* x, int64_t T, int64_t heads, int64_t width, int64_t stride, const float* cosine,
                 const float* sine, int64_t half, int dtype, int threads) {
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    pool::share_rows(T, 4.0 * heads * width, threads, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++)
        for (int64_t h = 0; h < heads; h++) {
          S* a = (S*)x + t * stride + h * width;
          turn(a, a + half, cosine + t * half, sine + t * half, half);
        }
    });
  });
}

// Rows of `width` numbers to cache[slots[t]], for keys and values. Tokens are `stride` apart.
void detour_kv_write(const void* keys, int64_t key_stride, const void* values, int64_t value_stride,
                     const int64_t* slots, int64_t T, int64_t width, void* key_cache, void* value_cache,
                     int dtype, int threads) {
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    pool::share_rows(T, 8.0 * width, threads, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++) {
        memcpy((S*)key_cache + slots[t] * width, (const S*)keys + t * key_stride, sizeof(S) * width);
        memcpy((S*)value_cache + slots[t] * width, (const S*)values + t * value_stride, sizeof(S) * width);
      }
    });
  });
}

// silu(x[:, :width]) * x[:, width:]; x [T, 2 width] and out [T, width], contiguous.
void detour_silu_mul(const void* x, int64_t T, int64_t width, void* out, int dtype, int threads) {
  of_type(dtype, [&](auto* as) {
    using S = std::remove_pointer_t<decltype(as)>;
    pool::share_rows(T, 16.0 * width, threads, [&](int64_t first, int64_t last) {
      for (int64_t t = first; t < last; t++) {
        const S* gates = (const S*)x + 2 * t * width;
        gate(gates, gates + width, width, (S*)out + t * width);
      }
    });
  });
}
}
