/* What a decoder layer does on CPU: norms, rotary positions, paged attention, gated activations, products with fp16
 * weights. Compiled when the package is installed; called through ctypes with plain addresses.
 *
 * Every function computes each row by itself, in an order that only the row decides: contraction is off, each fused
 * multiply-add is written out, sums run over fixed lanes. So a row has the same bits beside any neighbours, and on any
 * processor with fused multiply-add. Strides and sizes count floats where nothing else
 * is said. Nothing is allocated here.
 */

#include <stdint.h>
#include <string.h>
#ifdef __AVX512F__
#include <cpuid.h>
#include <immintrin.h>
#endif

#define LANES 16
#define CACHE_LINE 64
#define PANEL 32       /* columns of a product that are computed together */
#define PREFETCH_BYTES 2048 /* how far ahead of a product its weights are asked for */
#define AHEAD 32       /* keys asked for before they are needed */
#define VALUE_TILE 128 /* keys whose values are summed before they join the total; decides rounding */
#define MAX_ROWS 96    /* query rows (token x head of one KV head) that share one pass over the cache */

/* Rows whose sums are kept in registers. Bits do not depend on it. */
#ifdef __AVX512F__
#define BLOCK_ROWS 12
#else
#define BLOCK_ROWS 6
#endif

typedef float vec __attribute__((ext_vector_type(LANES)));
typedef _Float16 hvec __attribute__((ext_vector_type(LANES)));
typedef int32_t ivec __attribute__((ext_vector_type(LANES)));

static inline int64_t less(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t more(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

static inline vec load(const float *from) {
    vec v;
    memcpy(&v, from, sizeof v);
    return v;
}

static inline void store(float *to, vec v) { memcpy(to, &v, sizeof v); }

static inline vec fma_(vec a, vec b, vec c) { return __builtin_elementwise_fma(a, b, c); }

static inline vec all(float x) { return (vec)(x); }

static inline vec select(ivec mask, vec yes, vec no) { return mask ? yes : no; }

/* The first `n` floats, zeros behind them. */
static inline vec load_part(const float *from, int64_t n) {
    vec v = {};
    memcpy(&v, from, (size_t)n * sizeof(float));
    return v;
}

/* The first `n` of a cached head's numbers from the d-th on, zeros behind them; stored in 16 bits if `half`. */
static inline __attribute__((always_inline)) vec load_cached(const char *head, int64_t d, int64_t n, int half) {
    if (!half) return n == LANES ? load((const float *)head + d) : load_part((const float *)head + d, n);
    hvec h = {};
    if (n == LANES) /* a constant size is one instruction */
        memcpy(&h, (const _Float16 *)head + d, sizeof h);
    else
        memcpy(&h, (const _Float16 *)head + d, (size_t)n * sizeof(_Float16));
    return __builtin_convertvector(h, vec);
}

/* Numbers beyond 16 bits become the largest there is, not infinite. */
static inline hvec to_half(vec v) {
    v = select(v > all(65504.0f), all(65504.0f), v);
    v = select(v < all(-65504.0f), all(-65504.0f), v);
    return __builtin_convertvector(v, hvec);
}

static inline float sum_lanes(vec v) {
    float part[LANES];
    store(part, v);
    for (int width = LANES / 2; width > 0; width /= 2)
        for (int i = 0; i < width; i++) part[i] += part[i + width];
    return part[0];
}

static inline float max_lanes(vec v) {
    float best = v[0];
    for (int i = 1; i < LANES; i++)
        if (best == best && !(v[i] <= best)) best = v[i]; /* keeps a NaN */
    return best;
}

/* e^x to about 1 ulp: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. Below -87 it stays at e^-87; NaN stays NaN. */
static inline vec exp_(vec x) {
    x = select(x < all(-87.0f), all(-87.0f), x);
    x = select(x > all(88.0f), all(88.0f), x);
    const vec magic = all(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
    vec n = fma_(x, all(1.44269504f), magic) - magic;
    vec r = fma_(n, all(-0.693359375f), x);
    r = fma_(n, all(2.12194440e-4f), r);
    vec p = all(1.9875691500e-4f);
    p = fma_(p, r, all(1.3981999507e-3f));
    p = fma_(p, r, all(8.3334519073e-3f));
    p = fma_(p, r, all(4.1665795894e-2f));
    p = fma_(p, r, all(1.6666665459e-1f));
    p = fma_(p, r, all(5.0000001201e-1f));
    p = fma_(p * r, r, r) + all(1.0f);
    ivec whole = __builtin_convertvector(select(x == x, n, all(0.0f)), ivec);
    whole = (whole + 127) << 23;
    vec power;
    memcpy(&power, &whole, sizeof power);
    return p * power;
}

/* Which source this was compiled from. */
uint32_t hr_source(void) { return HR_SOURCE; }

/* Root-mean-square norm (Zhang, Sennrich 2019). x, out: [rows, size]; out = x / sqrt(mean(x^2) + eps) * weight.
 * With `delta`, [rows, size], x += delta comes first. */
void hr_rms_norm(float *x, const float *delta, const float *weight, float eps, float *out, int64_t rows, int64_t size) {
    int64_t whole = size - size % LANES, rest = size % LANES;
    for (int64_t row = 0; row < rows; row++, x += size, out += size) {
        vec sum = {};
        if (delta) {
            for (int64_t i = 0; i < whole; i += LANES) store(x + i, load(x + i) + load(delta + i));
            for (int64_t i = whole; i < size; i++) x[i] += delta[i];
            delta += size;
        }
        for (int64_t i = 0; i < whole; i += LANES) {
            vec v = load(x + i);
            sum = fma_(v, v, sum);
        }
        vec tail = load_part(x + whole, rest);
        sum = fma_(tail, tail, sum);
        float scale = 1.0f / __builtin_sqrtf(sum_lanes(sum) / (float)size + eps);
        for (int64_t i = 0; i < whole; i += LANES) store(out + i, load(x + i) * all(scale) * load(weight + i));
        for (int64_t i = whole; i < size; i++) out[i] = x[i] * scale * weight[i];
    }
}

/* The same norm over each head, in place (Qwen 3). x: [rows, heads, head_dim] with `row_stride` between rows. */
void hr_norm_heads(float *x, const float *weight, float eps, int64_t rows, int64_t row_stride, int64_t heads,
                   int64_t head_dim) {
    for (int64_t row = 0; row < rows; row++, x += row_stride)
        for (int64_t head = 0; head < heads; head++)
            hr_rms_norm(x + head * head_dim, 0, weight, eps, x + head * head_dim, 1, head_dim);
}

/* silu(gate) * up (Shazeer 2020). gate_up: [rows, 2 * size], out: [rows, size]. */
void hr_silu_mul(const float *gate_up, float *out, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++, gate_up += 2 * size, out += size)
        for (int64_t i = 0; i < size; i += LANES) {
            int64_t n = size - i < LANES ? size - i : LANES;
            vec gate = load_part(gate_up + i, n), up = load_part(gate_up + size + i, n);
            vec value = gate / (all(1.0f) + exp_(-gate)) * up;
            memcpy(out + i, &value, (size_t)n * sizeof(float));
        }
}

/* Scales each row to a largest magnitude of 1: out = x / scale, scales[row] = max |x| (1 for a row of zeros). */
void hr_unit_rows(const float *x, float *out, float *scales, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++, x += size, out += size) {
        vec most = {};
        for (int64_t i = 0; i < size; i += LANES) {
            vec v = load_part(x + i, size - i < LANES ? size - i : LANES);
            v = __builtin_elementwise_abs(v);
            most = select((v <= most) | (most != most), most, v); /* keeps a NaN */
        }
        float scale = max_lanes(most);
        if (scale == 0.0f) scale = 1.0f;
        scales[row] = scale;
        vec inverse = all(1.0f / scale);
        for (int64_t i = 0; i < size; i += LANES) {
            int64_t n = size - i < LANES ? size - i : LANES;
            vec v = load_part(x + i, n) * inverse;
            memcpy(out + i, &v, (size_t)n * sizeof(float));
        }
    }
}

/* y[row] = y[row] * scales[row] + bias. y: [rows, size]; bias: [size] or null. */
void hr_scale_rows(float *y, const float *scales, const float *bias, int64_t rows, int64_t size) {
    for (int64_t row = 0; row < rows; row++, y += size)
        for (int64_t i = 0; i < size; i += LANES) {
            int64_t n = size - i < LANES ? size - i : LANES;
            vec v = load_part(y + i, n) * all(scales[row]);
            if (bias) v += load_part(bias + i, n);
            memcpy(y + i, &v, (size_t)n * sizeof(float));
        }
}

/* Rotary positions (Su et al. 2021), halves rotated against each other, in place. x: [rows, heads, head_dim] with
 * `row_stride` between rows; cos, sin: [rows, rotary]; the first `rotary` numbers of a head turn. */
void hr_rotate(float *x, const float *cos, const float *sin, int64_t rows, int64_t row_stride, int64_t heads,
               int64_t head_dim, int64_t rotary) {
    int64_t half = rotary / 2;
    for (int64_t row = 0; row < rows; row++, x += row_stride, cos += rotary, sin += rotary)
        for (int64_t head = 0; head < heads; head++) {
            float *low = x + head * head_dim, *high = low + half;
            for (int64_t i = 0; i < half; i += LANES) {
                int64_t n = half - i < LANES ? half - i : LANES;
                vec a = load_part(low + i, n), b = load_part(high + i, n);
                vec new_a = a * load_part(cos + i, n) - b * load_part(sin + i, n);
                vec new_b = b * load_part(cos + half + i, n) + a * load_part(sin + half + i, n);
                memcpy(low + i, &new_a, (size_t)n * sizeof(float));
                memcpy(high + i, &new_b, (size_t)n * sizeof(float));
            }
        }
}

/* c[rows][32] += a[rows][n] * b[n][32], the products of each element added in order; b is fp16 if `half`. `vectors` of
 * b's row are worked on at a time: as many as the registers hold sums for. */
static inline __attribute__((always_inline)) void multiply(int rows, int vectors, const float *a, int64_t a_stride,
                                                           const char *b, int64_t b_stride, int half, int64_t n,
                                                           float *c, int64_t c_stride) {
    for (int column = 0; column < PANEL; column += vectors * LANES, c += vectors * LANES) {
        vec sum[BLOCK_ROWS][2];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) sum[r][v] = load(c + r * c_stride + v * LANES);
        const char *row = b;
        for (int64_t k = 0; k < n; k++, row += b_stride) {
            vec right[2];
            if (half) __builtin_prefetch(row + PREFETCH_BYTES);
            for (int v = 0; v < vectors; v++) right[v] = load_cached(row, column + v * LANES, LANES, half);
            for (int r = 0; r < rows; r++) {
                vec left = all(a[r * a_stride + k]);
                for (int v = 0; v < vectors; v++) sum[r][v] = fma_(left, right[v], sum[r][v]);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < vectors; v++) store(c + r * c_stride + v * LANES, sum[r][v]);
    }
}

/* A constant number of rows keeps the sums in registers, as long as the functions below are not inlined. */
#define ROWS(n) \
    case n: multiply(n, WIDE(n), a, a_stride, b, b_stride, half, k, c, c_stride); break;
#if BLOCK_ROWS == 12
#define WIDE(n) 2
#define ALL_ROWS ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6) ROWS(7) ROWS(8) ROWS(9) ROWS(10) ROWS(11) ROWS(12)
#else
#define WIDE(n) (n <= 2 ? 2 : 1)
#define ALL_ROWS ROWS(1) ROWS(2) ROWS(3) ROWS(4) ROWS(5) ROWS(6)
#endif

/* `b_stride` counts floats. */
static __attribute__((noinline)) void multiply_block(int rows, const float *a, int64_t a_stride, const float *b_floats,
                                                     int64_t b_stride, int64_t k, float *c, int64_t c_stride) {
    const char *b = (const char *)b_floats;
    const int half = 0;
    b_stride *= sizeof(float);
    switch (rows) { ALL_ROWS }
}

static __attribute__((noinline)) void multiply_half(int rows, const float *a, int64_t a_stride, const char *b,
                                                    int64_t k, float *c, int64_t c_stride) {
    const int64_t b_stride = PANEL * sizeof(_Float16);
    const int half = 1;
    switch (rows) { ALL_ROWS }
}

/* out = x * weight^T + bias. x: [rows, depth]; weight: [ceil(size / 32)][depth][32] fp16, zeros behind the last column;
 * bias: [size] or null; out: [rows, size]. Each output is one sum in order, whatever the number of rows. */
void hr_linear_half(const float *x, const char *weight, const float *bias, float *out, int64_t rows, int64_t depth,
                    int64_t size) {
    float edge[BLOCK_ROWS * PANEL];
    for (int64_t column = 0; column < size; column += PANEL, weight += depth * PANEL * (int64_t)sizeof(_Float16)) {
        int64_t columns = less(PANEL, size - column);
        for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
            int64_t count = less(BLOCK_ROWS, rows - r), stride = columns == PANEL ? size : PANEL;
            float *to = out + r * size + column, *c = columns == PANEL ? to : edge;
            for (int64_t i = 0; i < count; i++) memset(c + i * stride, 0, PANEL * sizeof(float));
            multiply_half((int)count, x + r * depth, depth, weight, depth, c, stride);
            for (int64_t i = 0; c == edge && i < count; i++)
                memcpy(to + i * size, c + i * stride, (size_t)columns * sizeof(float));
            for (int64_t i = 0; bias && i < count; i++)
                for (int64_t j = 0; j < columns; j++) to[i * size + j] += bias[column + j];
        }
    }
}

#ifdef __AVX512F__
/* Products of bytes, summed in 32 bits by one instruction: AVX-512 VNNI, which not all processors of this library have. */
#define BYTES __attribute__((target("avx512vnni")))

int32_t hr_has_byte_products(void) {
    unsigned a, b, c = 0, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (c & bit_AVX512VNNI);
}

/* A row in steps of its largest magnitude / LEVELS, from -LEVELS to LEVELS, stored with ZERO added. Returns that
 * magnitude; 1 for a row of zeros. NaN stays NaN. */
#define LEVELS 127
#define ZERO 128
static float to_bytes(const float *x, uint8_t *bytes, int64_t size) {
    vec most = {};
    for (int64_t i = 0; i < size; i += LANES) {
        vec v = __builtin_elementwise_abs(load_part(x + i, less(LANES, size - i)));
        most = select((v <= most) | (most != most), most, v);
    }
    float scale = max_lanes(most);
    if (scale == 0.0f) scale = 1.0f;
    const vec magic = all(12582912.0f), factor = all(LEVELS / scale); /* 1.5 * 2^23: adding it rounds to an integer */
    for (int64_t i = 0; i < size; i += LANES) {
        int64_t n = less(LANES, size - i);
        vec v = load_part(x + i, n) * factor + magic;
        ivec whole;
        memcpy(&whole, &v, sizeof whole);
        typedef uint8_t bvec __attribute__((ext_vector_type(LANES)));
        bvec b = __builtin_convertvector(whole - 0x4B400000 + ZERO, bvec);
        memcpy(bytes + i, &b, (size_t)n);
    }
    return scale;
}

/* sum[rows][32] of a[rows][4 * n] and b[n][32][4]. */
static inline __attribute__((always_inline)) BYTES void add_bytes(int rows, const uint8_t *a, int64_t a_stride, const char *b,
                                                            int64_t n, int32_t *sums) {
    __m512i sum[BLOCK_ROWS][2];
    for (int r = 0; r < rows; r++) sum[r][0] = sum[r][1] = _mm512_setzero_si512();
    for (int64_t k = 0; k < n; k++, b += 4 * PANEL) {
        __builtin_prefetch(b + PREFETCH_BYTES);
        __builtin_prefetch(b + PREFETCH_BYTES + CACHE_LINE);
        __m512i low = _mm512_loadu_si512(b), high = _mm512_loadu_si512(b + CACHE_LINE);
        for (int r = 0; r < rows; r++) {
            int32_t four;
            memcpy(&four, a + r * a_stride + 4 * k, sizeof four);
            __m512i left = _mm512_set1_epi32(four);
            sum[r][0] = _mm512_dpbusd_epi32(sum[r][0], left, low);
            sum[r][1] = _mm512_dpbusd_epi32(sum[r][1], left, high);
        }
    }
    for (int r = 0; r < rows; r++) {
        _mm512_storeu_si512(sums + r * PANEL, sum[r][0]);
        _mm512_storeu_si512(sums + r * PANEL + LANES, sum[r][1]);
    }
}

#define BYTE_ROWS(n) \
    case n: add_bytes(n, a, a_stride, b, k, sums); break;
static __attribute__((noinline)) BYTES void multiply_bytes(int rows, const uint8_t *a, int64_t a_stride, const char *b,
                                                      int64_t k, int32_t *sums) {
    switch (rows) {
        BYTE_ROWS(1) BYTE_ROWS(2) BYTE_ROWS(3) BYTE_ROWS(4) BYTE_ROWS(5) BYTE_ROWS(6)
        BYTE_ROWS(7) BYTE_ROWS(8) BYTE_ROWS(9) BYTE_ROWS(10) BYTE_ROWS(11) BYTE_ROWS(12)
    }
}

/* out = x * weight^T + bias, in 8 bits: each row of x in steps of its own, each output's weights in steps of `scales`.
 * x: [rows, depth]; weight: [ceil(size / 32)][ceil(depth / 4)][32][4] int8, zeros where there is none; scales, bias, sums
 * (of each output's bytes): [ceil(size / 32) * 32], bias may be null; bytes, row_scales: room for
 * [rows, ceil(depth / 4) * 4] and [rows]; out: [rows, size]. The sums are exact. */
void hr_linear_bytes(const float *x, const char *weight, const float *scales, const int32_t *sums, const float *bias,
                     float *out, uint8_t *bytes, float *row_scales, int64_t rows, int64_t depth, int64_t size) {
    int32_t found[BLOCK_ROWS * PANEL];
    int64_t padded = up(depth, 4);
    for (int64_t r = 0; r < rows; r++) {
        row_scales[r] = to_bytes(x + r * depth, bytes + r * padded, depth);
        memset(bytes + r * padded + depth, ZERO, (size_t)(padded - depth));
    }
    for (int64_t column = 0; column < size; column += PANEL, weight += padded * PANEL) {
        int64_t columns = less(PANEL, size - column);
        for (int64_t r = 0; r < rows; r += BLOCK_ROWS) {
            int64_t count = less(BLOCK_ROWS, rows - r);
            multiply_bytes((int)count, bytes + r * padded, padded, weight, padded / 4, found);
            for (int64_t i = 0; i < count; i++) {
                float step = row_scales[r + i] / LEVELS, *to = out + (r + i) * size + column;
                for (int64_t j = 0; j < columns; j++) {
                    float value = (float)(found[i * PANEL + j] - ZERO * sums[column + j]) * (scales[column + j] * step);
                    to[j] = bias ? value + bias[column + j] : value;
                }
            }
        }
    }
}
#else
int32_t hr_has_byte_products(void) { return 0; }
#endif

/* One layer's description, the same for every call of a model, and one batch's, the same for every layer. */
typedef struct {
    char *keys, *values; /* K and V of this layer in block 0; a block holds [block_tokens][kv_heads][head_dim] */
    int64_t element_bytes; /* 4: fp32, 2: fp16 */
    int64_t block_tokens, block_stride /* bytes */, kv_heads, head_dim, share; /* share: query heads of a KV head */
    int64_t window; /* 0: none */
    float scaling, softcap; /* 0: none */
} layer_t;

typedef struct {
    const int64_t *sequences; /* [n, 4]: first row of the batch, new tokens, start position, offset into `blocks` */
    const int64_t *blocks;
    int64_t n;
    float *scratch; /* one stretch for each thread */
    int64_t scratch_stride;
} batch_t;

/* Query rows that share a pass over the cache: for each of `heads` KV heads from `head` on, rows [begin, begin + rows) of
 * one sequence. Row r is new token r / share, query head r % share of the KV head. */
typedef struct {
    int64_t head, heads, begin, rows;
} part_t;

/* Where head `head` of `n` tokens from `first` on lies, given K or V of the layer. */
static inline void find(const layer_t *layer, const int64_t *blocks, const char *kv, int64_t head, int64_t first,
                        int64_t n, const char **rows) {
    int64_t stride = layer->kv_heads * layer->head_dim * layer->element_bytes, inside = first % layer->block_tokens;
    kv += head * layer->head_dim * layer->element_bytes;
    blocks += first / layer->block_tokens;
    const char *block = kv + *blocks * layer->block_stride;
    for (int64_t k = 0; k < n; k++, inside++) {
        if (inside == layer->block_tokens) inside = 0, block = kv + *++blocks * layer->block_stride;
        rows[k] = block + inside * stride;
    }
}

/* The vectors' numbers pairwise: a0 b0 a1 b1 ... from the lower or the upper halves. */
static inline vec zip_low(vec a, vec b) {
    return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}

static inline vec zip_high(vec a, vec b) {
    return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
}

/* Two vectors' lanes added pairwise: half as many partial sums of each, side by side. */
static inline vec fold(vec a, vec b) { return zip_low(a, b) + zip_high(a, b); }

/* Asks for all that `part` will read of the `n` tokens from `first` on, given K or V of the layer: memory is slower than
 * what is done with its contents. */
static inline void fetch(const layer_t *layer, const int64_t *blocks, const char *kv, const part_t *part, int64_t first,
                         int64_t n) {
    const char *rows[VALUE_TILE];
    int64_t bytes = part->heads * layer->head_dim * layer->element_bytes;
    if (n > 0) find(layer, blocks, kv, part->head, first, n, rows);
    for (int64_t k = 0; k < n; k++)
        for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch(rows[k] + i, 0, 2);
}

/* n <= 16 keys: out [16][deep], zeros behind each and behind the n-th. Key k stands where folding brings it to lane k. */
static inline __attribute__((always_inline)) void unpack_keys(const char **keys, int64_t n, int64_t head_dim, int half,
                                                              float *out, int64_t deep) {
    static const int64_t place[LANES] = {0, 8, 4, 12, 2, 10, 6, 14, 1, 9, 5, 13, 3, 11, 7, 15};
    if (n == LANES && head_dim == deep) {
        for (int64_t k = 0; k < LANES; k++)
            for (int64_t d = 0; d < deep; d += LANES)
                store(out + place[k] * deep + d, load_cached(keys[k], d, LANES, half));
        return;
    }
    for (int64_t k = 0; k < LANES; k++)
        for (int64_t d = 0; d < deep; d += LANES)
            store(out + place[k] * deep + d,
                  k < n ? load_cached(keys[k], d, less(LANES, head_dim - d), half) : all(0.0f));
}

/* q.k of one query with 16 keys. A sum runs over the lanes' vectors in order, then over the lanes by folding. */
static inline __attribute__((always_inline)) vec dot(const float *q, const float *key, int vectors) {
    vec sum = load(q) * load(key);
    for (int i = 1; i < vectors; i++) sum = fma_(load(q + i * LANES), load(key + i * LANES), sum);
    return sum;
}

static inline __attribute__((always_inline)) vec dots(const float *q, const float *keys, int vectors) {
    const int64_t deep = vectors * LANES;
    vec four[4];
    for (int i = 0; i < 4; i++, keys += 4 * deep)
        four[i] = fold(fold(dot(q, keys, vectors), dot(q, keys + deep, vectors)),
                       fold(dot(q, keys + 2 * deep, vectors), dot(q, keys + 3 * deep, vectors)));
    return fold(fold(four[0], four[1]), fold(four[2], four[3]));
}

/* scores[row][16] = q[row] . keys for `rows` queries [rows][deep]. */
static void score(const float *q, int64_t rows, const float *keys, int64_t deep, float *scores, int64_t stride) {
    for (int64_t r = 0; r < rows; r++, q += deep, scores += stride)
        switch (deep / LANES) { /* a constant count is unrolled */
        case 4: store(scores, dots(q, keys, 4)); break;
        case 8: store(scores, dots(q, keys, 8)); break;
        default: store(scores, dots(q, keys, (int)(deep / LANES)));
        }
}

/* n values: out [n][width], zeros behind head_dim. */
static inline __attribute__((always_inline)) void unpack_values(const char **values, int64_t n, int64_t head_dim,
                                                                int half, float *out, int64_t width) {
    for (int64_t k = 0; k < n; k++, out += width)
        if (head_dim == width)
            for (int64_t d = 0; d < width; d += LANES) store(out + d, load_cached(values[k], d, LANES, half));
        else
            for (int64_t d = 0; d < width; d += LANES)
                store(out + d, load_cached(values[k], d, less(LANES, more(0, head_dim - d)), half));
}

/* scores [first .. last] of one row -> their softmax without the division; everything else in [begin, end), which are
 * multiples of 16, becomes 0. Returns 1 / sum. */
static float softmax(float *scores, int64_t begin, int64_t end, int64_t first, int64_t last, float softcap) {
    const ivec lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const vec never = all(-__builtin_inff());
    vec most = never, sum = {};
    for (int64_t i = begin; i < end; i += LANES) {
        vec s = load(scores + i);
        if (softcap > 0.0f) { /* softcap * tanh(s / softcap) */
            vec e = exp_(s * all(2.0f / softcap));
            s = all(softcap) - all(2.0f * softcap) / (e + all(1.0f));
        }
        if (i < first || i + LANES - 1 > last) {
            ivec key = lane + (int32_t)i;
            s = select((key >= (int32_t)first) & (key <= (int32_t)last), s, never);
        }
        store(scores + i, s);
        most = select(s <= most, most, s);
    }
    vec best = all(max_lanes(most));
    for (int64_t i = begin; i < end; i += LANES) {
        vec e = exp_(load(scores + i) - best);
        if (i < first || i + LANES - 1 > last) {
            ivec key = lane + (int32_t)i;
            e = select((key >= (int32_t)first) & (key <= (int32_t)last), e, all(0.0f));
        }
        store(scores + i, e);
        sum += e;
    }
    return 1.0f / sum_lanes(sum);
}

/* How many floats of scratch `hr_attend` wants for sequences of up to `longest` tokens. */
int64_t hr_attend_scratch(int64_t longest, int64_t head_dim) {
    int64_t deep = up(head_dim, LANES), width = up(head_dim, PANEL);
    return MAX_ROWS * (up(longest, VALUE_TILE) + deep + width) + LANES * deep + VALUE_TILE * width;
}

/* What one row may see of [low, high). */
static inline void bounds(const layer_t *layer, int64_t position, int64_t *low, int64_t *high) {
    if (layer->window) *low = more(*low, position - layer->window + 1);
    *high = less(*high, position + 1);
}

/* out[row][width] += probabilities times the `n` unpacked `values`, from position `tile` on. Sums of a tile join the total
 * as one, which keeps long sums exact. A row meets nothing that it may not see: 0 * NaN is not 0. */
static void add_values(const layer_t *layer, int64_t start, const part_t *part, const float *scores, int64_t context,
                       const float *values, int64_t tile, int64_t n, float *total, int64_t width) {
    for (int64_t r = 0; r < part->rows; r += BLOCK_ROWS) {
        int64_t count = less(BLOCK_ROWS, part->rows - r);
        int64_t low[BLOCK_ROWS], high[BLOCK_ROWS], common_low = tile, common_high = tile + n;
        for (int64_t i = 0; i < count; i++) {
            low[i] = tile, high[i] = tile + n;
            bounds(layer, start + (part->begin + r + i) / layer->share, low + i, high + i);
            common_low = more(common_low, low[i]), common_high = less(common_high, high[i]);
        }
        if (common_low >= common_high) common_low = common_high = tile; /* nothing in common: each row alone */
        for (int64_t d = 0; d < width; d += PANEL) {
            float sum[BLOCK_ROWS * PANEL] = {0};
            const float *at_tile = values + d, *p = scores + r * context;
            if (common_low < common_high) {
                for (int64_t i = 0; i < count; i++)
                    multiply_block(1, p + i * context + low[i], context, at_tile + (low[i] - tile) * width, width,
                                   common_low - low[i], sum + i * PANEL, PANEL);
                multiply_block((int)count, p + common_low, context, at_tile + (common_low - tile) * width, width,
                               common_high - common_low, sum, PANEL);
            }
            for (int64_t i = 0; i < count; i++) {
                int64_t next = common_low < common_high ? common_high : low[i];
                multiply_block(1, p + i * context + next, context, at_tile + (next - tile) * width, width,
                               high[i] - next, sum + i * PANEL, PANEL);
                float *to = total + (r + i) * width + d;
                for (int64_t j = 0; j < PANEL; j += LANES) store(to + j, load(to + j) + load(sum + i * PANEL + j));
            }
        }
    }
}

static void attend_part(const layer_t *layer, const int64_t *blocks, int64_t start, const part_t *part, const float *q,
                        int64_t token_stride, int64_t head_stride, float *out, float *scratch) {
    int64_t head_dim = layer->head_dim, share = layer->share, rows = part->rows;
    int64_t deep = up(head_dim, LANES), width = up(head_dim, PANEL);
    int64_t newest = start + (part->begin + rows - 1) / share, oldest = start + part->begin / share;
    int64_t context = up(newest + 1, VALUE_TILE), end = up(newest + 1, LANES);
    int64_t from = layer->window ? more(0, oldest - layer->window + 1) / VALUE_TILE * VALUE_TILE : 0;
    float *scaled = scratch, *total = scaled + MAX_ROWS * deep, *keys = total + MAX_ROWS * width;
    float *values = keys + LANES * deep, *scores = values + VALUE_TILE * width;
    float inverse[MAX_ROWS];
    const char *at[VALUE_TILE];
    int half = layer->element_bytes == sizeof(_Float16);

    for (int64_t h = 0; h < part->heads; h++)
        for (int64_t r = 0; r < rows; r++) {
            int64_t token = (part->begin + r) / share, head = (part->head + h) * share + (part->begin + r) % share;
            const float *source = q + token * token_stride + head * head_stride;
            float *to = scaled + (h * rows + r) * deep;
            for (int64_t d = 0; d < deep; d++) to[d] = d < head_dim ? source[d] * layer->scaling : 0.0f;
        }
    for (int64_t tile = from; tile <= newest; tile += LANES) {
        int64_t n = less(LANES, newest + 1 - tile);
        fetch(layer, blocks, layer->keys, part, tile + AHEAD, less(LANES, newest + 1 - tile - AHEAD));
        for (int64_t h = 0; h < part->heads; h++) {
            find(layer, blocks, layer->keys, part->head + h, tile, n, at);
            if (half)
                unpack_keys(at, n, head_dim, 1, keys, deep);
            else
                unpack_keys(at, n, head_dim, 0, keys, deep);
            score(scaled + h * rows * deep, rows, keys, deep, scores + h * rows * context + tile, context);
        }
    }
    fetch(layer, blocks, layer->values, part, from, less(AHEAD, newest + 1 - from));
    for (int64_t r = 0; r < part->heads * rows; r++) {
        int64_t first = 0, last = end;
        bounds(layer, start + (part->begin + r % rows) / share, &first, &last);
        inverse[r] = softmax(scores + r * context, from, end, first, last - 1, layer->softcap);
    }
    memset(total, 0, (size_t)(part->heads * rows * width) * sizeof(float));
    for (int64_t tile = from; tile <= newest; tile += VALUE_TILE) {
        int64_t n = less(VALUE_TILE, newest + 1 - tile);
        for (int64_t h = 0; h < part->heads; h++) {
            find(layer, blocks, layer->values, part->head + h, tile, n, at);
            for (int64_t i = 0; i < n; i += LANES) {
                if (h == 0)
                    fetch(layer, blocks, layer->values, part, tile + i + AHEAD, less(LANES, newest + 1 - tile - i - AHEAD));
                if (half)
                    unpack_values(at + i, less(LANES, n - i), head_dim, 1, values + i * width, width);
                else
                    unpack_values(at + i, less(LANES, n - i), head_dim, 0, values + i * width, width);
            }
            add_values(layer, start, part, scores + h * rows * context, context, values, tile, n,
                       total + h * rows * width, width);
        }
    }
    for (int64_t h = 0; h < part->heads; h++)
        for (int64_t r = 0; r < rows; r++) {
            int64_t token = (part->begin + r) / share, head = (part->head + h) * share + (part->begin + r) % share;
            float *to = out + (token * layer->kv_heads * share + head) * head_dim;
            const float *sum = total + (h * rows + r) * width;
            for (int64_t d = 0; d < head_dim; d++) to[d] = sum[d] * inverse[h * rows + r];
        }
}

static inline void store_cached(char *head, const float *from, int64_t head_dim, int half) {
    if (!half) {
        memcpy(head, from, (size_t)head_dim * sizeof(float));
        return;
    }
    for (int64_t d = 0; d < head_dim; d += LANES) {
        int64_t n = less(LANES, head_dim - d);
        hvec h = to_half(load_part(from + d, n));
        memcpy((_Float16 *)head + d, &h, (size_t)n * sizeof(_Float16));
    }
}

/* Stores the batch's new K and V. k, v: [tokens, kv_heads, head_dim] with strides. */
void hr_write_kv(const layer_t *layer, const batch_t *batch, const float *k, const float *v, int64_t token_stride,
                 int64_t head_stride) {
    int half = layer->element_bytes == sizeof(_Float16);
    int64_t head_bytes = layer->head_dim * layer->element_bytes;
    for (int64_t s = 0; s < batch->n; s++) {
        const int64_t *sequence = batch->sequences + 4 * s, *blocks = batch->blocks + sequence[3];
        for (int64_t i = 0; i < sequence[1]; i++) {
            int64_t position = sequence[2] + i, row = (sequence[0] + i) * token_stride;
            int64_t to = blocks[position / layer->block_tokens] * layer->block_stride +
                         position % layer->block_tokens * layer->kv_heads * head_bytes;
            for (int64_t head = 0; head < layer->kv_heads; head++, to += head_bytes) {
                store_cached(layer->keys + to, k + row + head * head_stride, layer->head_dim, half);
                store_cached(layer->values + to, v + row + head * head_stride, layer->head_dim, half);
            }
        }
    }
}

/* Attention of the batch's rows over all that their sequences hold up to themselves (or the window of it).
 * q: [tokens, kv_heads * share, head_dim] with strides; out: [tokens, kv_heads * share * head_dim].
 * `threads` calls with `thread` = 0, 1, ... may run at the same time and do the work together. */
void hr_attend(const layer_t *layer, const batch_t *batch, const float *q, int64_t token_stride, int64_t head_stride,
               float *out, int64_t thread, int64_t threads) {
    int64_t unit = 0;
    for (int64_t s = 0; s < batch->n; s++) {
        const int64_t *sequence = batch->sequences + 4 * s, *blocks = batch->blocks + sequence[3];
        const float *first_q = q + sequence[0] * token_stride;
        float *first_out = out + sequence[0] * layer->kv_heads * layer->share * layer->head_dim;
        int64_t rows = sequence[1] * layer->share;
        /* Few rows read each token's heads in one go, unless threads would have nothing to do. */
        int together = rows * layer->kv_heads <= MAX_ROWS && (threads == 1 || batch->n >= threads);
        int64_t heads = together ? layer->kv_heads : 1;
        for (int64_t head = 0; head < layer->kv_heads; head += heads)
            for (int64_t begin = 0; begin < rows; begin += MAX_ROWS) {
                if (unit++ % threads != thread) continue;
                part_t part = {head, heads, begin, less(MAX_ROWS, rows - begin)};
                attend_part(layer, blocks, sequence[2], &part, first_q, token_stride, head_stride, first_out,
                            batch->scratch + thread * batch->scratch_stride);
            }
    }
}
