// Absorbed latent attention over packed rows (512 e4m3 | 4 float32 | 64 bfloat16), 8 heads a block.
//
// A warp is on its own: 16 rows at a time through its own shared buffers (cp.async), its own
// running softmax, its own 512 x 8 sums in registers; the warps of a block meet once, at the end.
// Rows are never widened in memory: both products read the bytes, the second one transposing them
// with byte permutes. A 16-byte read of a thread serves four products, so the reduced index runs in
// an order of its own (K_ORDER below), the same for rows and queries.
//
// Buffer row of logical row i: rho(i), which together with the stride of 672 bytes keeps every
// 16-byte read of a quarter warp on its own banks, along rows and across them.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned long long u64;

#define RANK 512
#define ROW 656
#define STRIDE 672
#define TILE 16
#define WIDE (RANK + 64)
#define HEADS 8
#define INFINITY __int_as_float(0x7F800000)
#define PART (RANK + 4)  // floats of one head's sums in shared memory

__device__ __forceinline__ u32 f16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
__device__ __forceinline__ u32 bf16x2(float low, float high) {
    u32 d;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(d) : "f"(high), "f"(low));
    return d;
}
// Four e4m3 to two pairs of float16: bytes 0, 1 and bytes 2, 3.
__device__ __forceinline__ void widen(u32 bytes, u32& low, u32& high) {
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, l; cvt.rn.f16x2.e4m3x2 %1, h; }"
        : "=r"(low), "=r"(high) : "r"(bytes));
}
__device__ __forceinline__ void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ void mma_bf16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
__device__ __forceinline__ u32 transpose(u32 a) {
    u32 d;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(d) : "r"(a));
    return d;
}
__device__ __forceinline__ float exp2_(float x) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
__device__ __forceinline__ uint4 read16(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}
__device__ __forceinline__ void copy16(u32 to, const void* from, u32 size) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(size) : "memory");
}
// Two numbers of a query.
__device__ __forceinline__ void query(u32 pair, float& low, float& high) {
#if Q_BF16
    low = __uint_as_float(pair << 16);
    high = __uint_as_float(pair & 0xFFFF0000u);
#else
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %2;\n"
        "cvt.f32.f16 %0, l; cvt.f32.f16 %1, h; }" : "=f"(low), "=f"(high) : "r"(pair));
#endif
}
__device__ __forceinline__ u32 rho(u32 i) {  // of 0 .. 15
    u32 t = (i & 7) >> 1;
    return (i & 8) + ((i & 1) ? 4 + ((t + 2) & 3) : t);
}

// The slot of row `at` of the token, -1 beyond its end.
__device__ __forceinline__ int slot_of(const int* places, int at, int end) {
    if (at >= end) return -1;
#if DENSE
    return places[at / PAGE] * PAGE + at % PAGE;
#else
    return places[at];
#endif
}

// Lane l < 16 holds the slot of buffer row l. 41 copies of 16 bytes a row; rows of slot -1 are zeroed.
__device__ __forceinline__ void fetch(u32 buffer, const char* cache, int slot, u32 lane) {
#pragma unroll
    for (int row = 0; row < TILE; row++) {
        int s = __shfl_sync(~0u, slot, row);
        const char* from = cache + (u64)(s < 0 ? 0 : s) * ROW;
        copy16(buffer + row * STRIDE + lane * 16, from + lane * 16, s < 0 ? 0 : 16);
    }
#pragma unroll
    for (int i = 0; i < 5; i++) {
        u32 index = i * 32 + lane, row = index / 9, chunk = 32 + index % 9;
        int s = __shfl_sync(~0u, slot, row & 15);
        const char* from = cache + (u64)(s < 0 ? 0 : s) * ROW;
        if (index < 144) copy16(buffer + row * STRIDE + chunk * 16, from + chunk * 16, s < 0 ? 0 : 16);
    }
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) latent_attention(
    const u16* q, const char* cache, u16* out, float* parts, float* sums, const int* slots,
    const int* counts, const long long* row_of_token, const long long* positions, const int* table,
    int stride, int pairs, int heads, float scale) {
    extern __shared__ __align__(128) char shared[];
    const u32 lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, t = lane & 3;
    const int token = blockIdx.x, split = blockIdx.y, first_head = blockIdx.z * HEADS;
    char* own = shared + warp * (STAGES * TILE * STRIDE);
    const u32 buffers = (u32)__cvta_generic_to_shared(own);
#if DENSE
    const int end = (int)positions[token] + 1;
    const int* places = table + row_of_token[token] * (u64)stride;
#else
    const int end = counts[token];
    const int* places = slots + token * (u64)stride;
#endif
    const int tiles = (end + TILE - 1) / TILE;
    const int each = (tiles + SPLITS * WARPS - 1) / (SPLITS * WARPS);
    const int begin = min(tiles, (int)(split * WARPS + warp) * each), stop = min(tiles, begin + each);
    const u32 at_row = lane & 15;
    // Buffer row r holds the tile's r-th row; logical row i of the products is buffer row rho(i).

    int next = begin < stop ? slot_of(places, begin * TILE + at_row, end) : -1;
#pragma unroll
    for (int stage = 0; stage < STAGES - 1; stage++) {
        if (begin + stage < stop) fetch(buffers + stage * TILE * STRIDE, cache, next, lane);
        asm volatile("cp.async.commit_group;");
        if (begin + stage + 1 < stop) next = slot_of(places, (begin + stage + 1) * TILE + at_row, end);
    }

    // Queries of head g in K_ORDER: of 64 numbers, product j of thread t takes 16 t + 4 j + 0 .. 3.
    const u16* head = q + ((u64)token * heads + first_head + g) * WIDE;
    u32 turned[2][2][2];
    u32 wanted[8][4][2];
    float unit;
    {
        float largest = 0.f, low, high;
#pragma unroll
        for (int c = 0; c < 8; c++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const uint4 four = *(const uint4*)(head + 64 * c + 16 * t + 8 * half);
                wanted[c][2 * half][0] = four.x;
                wanted[c][2 * half][1] = four.y;
                wanted[c][2 * half + 1][0] = four.z;
                wanted[c][2 * half + 1][1] = four.w;
            }
#pragma unroll
        for (int c = 0; c < 8; c++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                query(wanted[c][j / 2][j % 2], low, high);
                largest = fmaxf(largest, fmaxf(fabsf(low), fabsf(high)));
            }
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        // 2^-12 of the largest power of two below: float16 keeps 27 binary digits.
        const u32 bits = max(__float_as_uint(largest) & 0x7F800000u, 27u << 23) - (12u << 23);
        unit = __uint_as_float(bits);
        const float factor = __uint_as_float((254u << 23) - bits);  // 1 / unit
#pragma unroll
        for (int c = 0; c < 8; c++)
#pragma unroll
            for (int j = 0; j < 8; j++) {
                query(wanted[c][j / 2][j % 2], low, high);
                wanted[c][j / 2][j % 2] = f16x2(low * factor, high * factor);
            }
#pragma unroll
        for (int c = 0; c < 2; c++) {
            const uint4 four = *(const uint4*)(head + RANK + 32 * c + 8 * t);
            const u32 pairs_[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                query(pairs_[j], low, high);
                turned[c][j / 2][j % 2] = bf16x2(low, high);
            }
        }
    }
    const float unit0 = __shfl_sync(~0u, unit, 8 * t), unit1 = __shfl_sync(~0u, unit, 8 * t + 4);

    // State of heads 2 t and 2 t + 1.
    float top0 = -INFINITY, top1 = -INFINITY, total0 = 0.f, total1 = 0.f, level = 1.1754944e-38f;
    float sum[4][8][4];
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int e = 0; e < 4; e++) sum[b][i][e] = 0.f;

    const u32 along = rho(g) * STRIDE;  // rows g and g + 8 of the first product
    u32 stage = 0;
    for (int tile = begin; tile < stop; tile++) {
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 2) : "memory");
        __syncwarp();
        {
            u32 free = stage == 0 ? STAGES - 1 : stage - 1;
            if (tile + STAGES - 1 < stop) fetch(buffers + free * TILE * STRIDE, cache, next, lane);
            asm volatile("cp.async.commit_group;");
            if (tile + STAGES < stop) next = slot_of(places, (tile + STAGES) * TILE + at_row, end);
        }
        const u32 rows = buffers + stage * TILE * STRIDE;
        stage = stage == STAGES - 1 ? 0 : stage + 1;

        const uint4 sa = read16(rows + along + RANK), sb = read16(rows + along + 8 * STRIDE + RANK);
        const float scale_a[4] = {__uint_as_float(sa.x), __uint_as_float(sa.y), __uint_as_float(sa.z), __uint_as_float(sa.w)};
        const float scale_b[4] = {__uint_as_float(sb.x), __uint_as_float(sb.y), __uint_as_float(sb.z), __uint_as_float(sb.w)};
        float score[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
        for (int b = 0; b < 4; b++) {
            float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int half = 0; half < 2; half++) {
                const u32 from = rows + along + 128 * b + 64 * half + 16 * t;
                const uint4 x = read16(from), y = read16(from + 8 * STRIDE);
                const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                for (int j = 0; j < 4; j++) {
                    u32 a0, a1, a2, a3;
                    widen(xs[j], a0, a2);
                    widen(ys[j], a1, a3);
                    mma_f16(c, a0, a1, a2, a3, wanted[2 * b + half][j][0], wanted[2 * b + half][j][1]);
                }
            }
            score[0] += c[0] * scale_a[b];
            score[1] += c[1] * scale_a[b];
            score[2] += c[2] * scale_b[b];
            score[3] += c[3] * scale_b[b];
        }
        {
            float c[4] = {0.f, 0.f, 0.f, 0.f};
#pragma unroll
            for (int part = 0; part < 2; part++) {
                const u32 from = rows + along + RANK + 16 + 64 * part + 16 * t;
                const uint4 x = read16(from), y = read16(from + 8 * STRIDE);
                mma_bf16(c, x.x, y.x, x.y, y.y, turned[part][0][0], turned[part][0][1]);
                mma_bf16(c, x.z, y.z, x.w, y.w, turned[part][1][0], turned[part][1][1]);
            }
            const int place = tile * TILE + (int)rho(g);
            score[0] = place < end ? (score[0] * unit0 + c[0]) * scale : -INFINITY;
            score[1] = place < end ? (score[1] * unit1 + c[1]) * scale : -INFINITY;
            score[2] = place + 8 < end ? (score[2] * unit0 + c[2]) * scale : -INFINITY;
            score[3] = place + 8 < end ? (score[3] * unit1 + c[3]) * scale : -INFINITY;
        }

        float high0 = fmaxf(score[0], score[2]), high1 = fmaxf(score[1], score[3]);
#pragma unroll
        for (int mask = 4; mask < 32; mask *= 2) {
            high0 = fmaxf(high0, __shfl_xor_sync(~0u, high0, mask));
            high1 = fmaxf(high1, __shfl_xor_sync(~0u, high1, mask));
        }
        float most = fmaxf(fmaxf(scale_a[0], scale_a[1]), fmaxf(scale_a[2], scale_a[3]));
        most = fmaxf(most, fmaxf(fmaxf(scale_b[0], scale_b[1]), fmaxf(scale_b[2], scale_b[3])));
        const float raised = __uint_as_float(__reduce_max_sync(~0u, __float_as_uint(fmaxf(most, level))));
        high0 = fmaxf(high0, top0);
        high1 = fmaxf(high1, top1);
        if (__any_sync(~0u, high0 > top0 || high1 > top1 || raised > level)) {
            const float fade0 = exp2_(top0 - high0), fade1 = exp2_(top1 - high1), lower = level / raised;
            total0 *= fade0;
            total1 *= fade1;
#pragma unroll
            for (int b = 0; b < 4; b++)
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    sum[b][i][0] *= fade0 * lower;
                    sum[b][i][1] *= fade1 * lower;
                    sum[b][i][2] *= fade0 * lower;
                    sum[b][i][3] *= fade1 * lower;
                }
            top0 = high0;
            top1 = high1;
            level = raised;
        }
        const float p0 = exp2_(score[0] - top0), p1 = exp2_(score[1] - top1);
        const float p2 = exp2_(score[2] - top0), p3 = exp2_(score[3] - top1);
        total0 += p0 + p2;
        total1 += p1 + p3;
        const float less = 1.f / level;

        // Rows 2 t, 2 t + 1, 2 t + 8, 2 t + 9 of the second product, numbers 16 g .. of a block.
        const u32 across = rows + t * STRIDE + 16 * g;              // rho(2 t) = t
        const u32 beside = rows + (4 + ((t + 2) & 3)) * STRIDE + 16 * g;  // rho(2 t + 1)
#pragma unroll
        for (int b = 0; b < 4; b++) {
            const float fa = scale_a[b] * less, fb = scale_b[b] * less;
            const u32 b0 = transpose(f16x2(p0 * fa, p1 * fa)), b1 = transpose(f16x2(p2 * fb, p3 * fb));
            const uint4 x = read16(across + 128 * b), y = read16(beside + 128 * b);
            const uint4 z = read16(across + 128 * b + 8 * STRIDE), w = read16(beside + 128 * b + 8 * STRIDE);
            const u32 xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
            const u32 zs[4] = {z.x, z.y, z.z, z.w}, ws[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 a0, a1, a2, a3, c0, c1, c2, c3;
                widen(__byte_perm(xs[j], ys[j], 0x5140), a0, a1);
                widen(__byte_perm(xs[j], ys[j], 0x7362), a2, a3);
                widen(__byte_perm(zs[j], ws[j], 0x5140), c0, c1);
                widen(__byte_perm(zs[j], ws[j], 0x7362), c2, c3);
                mma_f16(sum[b][2 * j], a0, a1, c0, c1, b0, b1);
                mma_f16(sum[b][2 * j + 1], a2, a3, c2, c3, b0, b1);
            }
        }
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
#pragma unroll
    for (int mask = 4; mask < 32; mask *= 2) {
        total0 += __shfl_xor_sync(~0u, total0, mask);
        total1 += __shfl_xor_sync(~0u, total1, mask);
    }

    // The warps meet: every warp's tops and totals, then its sums scaled to the block's.
    __shared__ float tops[WARPS][HEADS], totals[WARPS][HEADS];
    if (g == 0) {
        tops[warp][2 * t] = top0;
        tops[warp][2 * t + 1] = top1;
        totals[warp][2 * t] = total0;
        totals[warp][2 * t + 1] = total1;
    }
    __syncthreads();
    float best0 = -INFINITY, best1 = -INFINITY, whole0 = 0.f, whole1 = 0.f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        best0 = fmaxf(best0, tops[w][2 * t]);
        best1 = fmaxf(best1, tops[w][2 * t + 1]);
    }
#pragma unroll
    for (int w = 0; w < WARPS; w++) {
        if (totals[w][2 * t] > 0.f) whole0 += totals[w][2 * t] * exp2_(tops[w][2 * t] - best0);
        if (totals[w][2 * t + 1] > 0.f) whole1 += totals[w][2 * t + 1] * exp2_(tops[w][2 * t + 1] - best1);
    }
    const float factor0 = total0 > 0.f ? exp2_(top0 - best0) * level / whole0 : 0.f;
    const float factor1 = total1 > 0.f ? exp2_(top1 - best1) * level / whole1 : 0.f;
    float* mine = (float*)own;
#pragma unroll
    for (int b = 0; b < 4; b++)
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const int at = 128 * b + 16 * g + 4 * j;
            *(float4*)(mine + 2 * t * PART + at) = make_float4(
                sum[b][2 * j][0] * factor0, sum[b][2 * j][2] * factor0,
                sum[b][2 * j + 1][0] * factor0, sum[b][2 * j + 1][2] * factor0);
            *(float4*)(mine + (2 * t + 1) * PART + at) = make_float4(
                sum[b][2 * j][1] * factor1, sum[b][2 * j][3] * factor1,
                sum[b][2 * j + 1][1] * factor1, sum[b][2 * j + 1][3] * factor1);
        }
    __syncthreads();
    const u64 pair = (u64)token * heads + first_head;
    for (int index = threadIdx.x; index < HEADS * RANK / 4; index += WARPS * 32) {
        const int h = index / (RANK / 4), at = index % (RANK / 4) * 4;
        float4 all = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
        for (int w = 0; w < WARPS; w++) {
            const float4 one = *(float4*)(shared + w * (STAGES * TILE * STRIDE) + (h * PART + at) * 4);
            all.x += one.x;
            all.y += one.y;
            all.z += one.z;
            all.w += one.w;
        }
#if SPLITS == 1
#if Q_BF16
        const uint2 packed = make_uint2(bf16x2(all.x, all.y), bf16x2(all.z, all.w));
#else
        const uint2 packed = make_uint2(f16x2(all.x, all.y), f16x2(all.z, all.w));
#endif
        *(uint2*)(out + (pair + h) * RANK + at) = packed;
#else
        *(float4*)(parts + ((u64)split * pairs + pair + h) * RANK + at) = all;
#endif
    }
#if SPLITS > 1
    if (warp == 0 && g == 0) {
        float* to = sums + (u64)split * pairs + pair + 2 * t;
        to[0] = whole0 > 0.f ? best0 + log2f(whole0) : -INFINITY;
        to[1] = whole1 > 0.f ? best1 + log2f(whole1) : -INFINITY;
    }
#endif
}
