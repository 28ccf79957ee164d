/* One forward pass of a Qwen3, Qwen2 or Llama decoder on a CPU, in float32, over a paged KV pool.
 *
 * Made for few rows: decoding, verifying, branches that join. Weights are read once for up to MAX_ROWS rows, from panels of
 * PANEL outputs, in 16 bits where they may be: half as much to read; or in 8, with rows rounded likewise.
 *
 * Every row is computed by the same operations in the same order whatever stands beside it and however a prompt is cut: batch,
 * chunks, prefix reuse, drafts and threads change no bit of a result.
 */
#include "native.h"

#include <math.h>
#include <string.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#define AHEAD 64 /* rows of a panel: weights come from a far cache, and its own prefetcher starts anew with every page */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));
typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));
typedef int8_t bvec __attribute__((vector_size(LANES)));
typedef int16_t shvec __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline))

/* One function for each level of instructions; the loader picks the machine's. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#elif defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)  && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

enum Format { FLOAT32, BFLOAT16, FLOAT16, INT8 };

typedef struct {
    int64_t num_inputs, num_outputs; /* of a gated product: the outputs after gating */
    int64_t format;                  /* of the panels: enum Format */
    const void *panels;              /* [panels, num_inputs, PANEL]; INT8: [panels, ceil(inputs / 4), PANEL, 4], 128 more each */
    const float *bias;               /* [outputs] or NULL */
    const float *scales;             /* [panels, PANEL]; INT8 alone: what 1 stands for */
} Matrix;

typedef struct {
    const float *input_norm, *mlp_norm; /* [hidden] */
    const float *q_norm, *k_norm;       /* [head_dim] or NULL */
    Matrix qkv, output, gate_up, down;
} Layer;

typedef struct {
    int64_t num_layers, hidden_size, num_heads, num_kv_heads, head_dim, inner_size;
    float eps;
    const Layer *layers;
    const float *cosines, *sines; /* [positions, head_dim / 2] */
    const void *embedding;        /* [vocabulary, hidden]; NULL: the head's weights are the embedding too */
    int64_t embedding_format;
    const float *norm; /* [hidden] */
    Matrix head;
} Model;

typedef struct {
    float *blocks; /* [layers, blocks, kv_heads]: keys [head_dim, slots], then values [slots, head_dim] */
    int64_t num_blocks, tokens_per_block, num_slots; /* slots: tokens_per_block, rounded up to LANES */
} Pool;

typedef struct {
    int64_t num_chunks, num_rows, num_logits;
    const int64_t *tokens;                  /* [rows] */
    const int64_t *starts, *counts;         /* [chunks]: position of the first row, rows */
    const int64_t *first_blocks, *blocks;   /* [chunks]: where a chunk's blocks begin in blocks */
    const int64_t *logit_rows;              /* [num_logits] */
    float *logits;                          /* [num_logits, vocabulary] */
    float *scratch;                         /* floats: see decoder_scratch */
} Batch;

/* Sequences that decode on their own until something happens. */
typedef struct {
    int64_t num_sequences, max_steps;
    int64_t *tokens, *starts;             /* [sequences]: the next token to compute and its position; they move on */
    const int64_t *ones, *places;         /* [sequences]: 1, 1, ... and 0, 1, ... */
    const int64_t *first_blocks, *blocks; /* as in Batch, for max_steps more tokens */
    const int64_t *top_ks, *offsets;      /* [sequences]; offset: output tokens so far */
    const uint64_t *seeds;                /* [sequences] */
    const double *temperatures, *top_ps;  /* [sequences] */
    const uint64_t *ends;                 /* [sequences]: address of one byte a token, not 0 where it may end a run; or 0 */
    int64_t *drawn;                       /* [max_steps, sequences] */
    double *log_probs;                    /* [max_steps, sequences], of the model itself; or NULL */
    float *logits, *scratch;              /* [sequences, vocabulary]; as in Batch */
    void *candidates;
    const volatile int32_t *interrupt; /* not 0: somebody waits */
} Run;

enum Store { SET, ADD, GATED };

/* Rows in eight bits, each by its own largest entry. */
typedef struct {
    int8_t *bytes;  /* [rows, rounded_stride(inputs)], zero beyond the inputs */
    float *scales;  /* [rows]: what 1 stands for; not a number where an entry is not finite */
    int32_t *sums;  /* [rows]: of the bytes */
} Rounded;

INLINE vec loaded(const float *from) {
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* LANES numbers from place at on. A float16 is the upper half of a float32 but for three bits of exponent, which a product makes
 * up for; weights are finite. */
INLINE vec widened(const void *from, int64_t at, enum Format format) {
    if (format == FLOAT32) return loaded((const float *)from + at);
    hvec half;
    memcpy(&half, (const uint16_t *)from + at, sizeof half);
    uvec bits;
    if (format == BFLOAT16) {
        bits = __builtin_convertvector(half, uvec) << 16;
    } else {
        bits = ((uvec)__builtin_convertvector((shvec)half, ivec) << 13) & 0x8fffffffu;
    }
    vec value;
    memcpy(&value, &bits, sizeof value);
    return format == FLOAT16 ? value * 0x1p112f : value;
}

INLINE void stored(float *to, vec value) { memcpy(to, &value, sizeof value); }

#define FOLD(v, mask) ((v) + __builtin_shuffle((v), mask))

INLINE float total(vec v) {
    v = FOLD(v, ((ivec){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = FOLD(v, ((ivec){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = FOLD(v, ((ivec){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    v = FOLD(v, ((ivec){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return v[0];
}

INLINE vec larger(vec a, vec b) {
    ivec first = a > b;
    return (vec)(((ivec)a & first) | ((ivec)b & ~first));
}

INLINE float largest(vec v) {
    v = larger(v, __builtin_shuffle(v, (ivec){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = larger(v, __builtin_shuffle(v, (ivec){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = larger(v, __builtin_shuffle(v, (ivec){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    v = larger(v, __builtin_shuffle(v, (ivec){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return v[0];
}

/* e^x to 2 units in the last place; x is at most some 80 */
INLINE vec exponential(vec x) {
    const vec magic = (vec){} + 12582912.0f;
    ivec low = x > -87.0f;
    x = (vec)((ivec)x & low) + (vec)((ivec)((vec){} - 87.0f) & ~low);
    vec turns = (x * 1.44269504f + magic) - magic;
    vec r = x - turns * 0.693359375f;
    r = r + turns * 2.12194440e-4f;
    vec p = (vec){} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(turns, ivec) + 127) << 23;
    vec scale;
    memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

INLINE void store_part(float *to, vec value, int64_t count) {
    float part[LANES];
    memcpy(part, &value, sizeof part);
    memcpy(to, part, sizeof(float) * (size_t)(count < LANES ? count : LANES));
}

INLINE void panel_rows(const void *panel, enum Format format, int num_rows, int64_t depth, const float *x, int64_t x_stride,
                       vec sums[MAX_ROWS][2]) {
    vec a[MAX_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++) a[r][0] = a[r][1] = (vec){};
    for (int64_t i = 0; i < depth; i++) {
        const char *ahead = (const char *)panel + (i + AHEAD) * PANEL * (format == FLOAT32 ? 4 : 2);
        __builtin_prefetch(ahead);
        if (format == FLOAT32) __builtin_prefetch(ahead + PANEL * 2);
        vec w0 = widened(panel, i * PANEL, format), w1 = widened(panel, i * PANEL + LANES, format);
#pragma GCC unroll 12
        for (int r = 0; r < num_rows; r++) {
            float factor = x[r * x_stride + i];
            a[r][0] += w0 * factor;
            a[r][1] += w1 * factor;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++) sums[r][0] = a[r][0], sums[r][1] = a[r][1];
}

static int64_t rounded_stride(int64_t depth) { return (depth + LANES - 1) / LANES * LANES; }

FOR_EACH_CPU static void round_rows(const float *x, int64_t depth, const Rounded *to, int64_t first, int64_t last) {
    const vec magic = (vec){} + 12582912.0f;
    int64_t stride = rounded_stride(depth);
    for (int64_t t = first; t < last; t++) {
        const float *row = x + t * depth;
        float tail[LANES] = {0};
        memcpy(tail, row + depth / LANES * LANES, sizeof(float) * (size_t)(depth % LANES));
        vec most = {}, zero = {};
        ivec sum = {};
        for (int64_t i = 0; i < depth; i += LANES) {
            vec value = loaded(i + LANES <= depth ? row + i : tail);
            most = larger(most, (vec)((ivec)value & 0x7fffffff));
            zero += value * 0.0f;
        }
        float top = largest(most), factor = top > 0.0f ? 127.0f / top : 0.0f;
        for (int64_t i = 0; i < depth; i += LANES) {
            vec value = loaded(i + LANES <= depth ? row + i : tail);
            vec shifted = value * factor + magic;
            ivec whole = (ivec)shifted - (ivec)magic;
            bvec bytes = __builtin_convertvector(whole, bvec);
            memcpy(to->bytes + t * stride + i, &bytes, sizeof bytes);
            sum += whole;
        }
        int32_t sums[LANES], all = 0;
        memcpy(sums, &sum, sizeof sums);
        for (int lane = 0; lane < LANES; lane++) all += sums[lane];
        to->sums[t] = all;
        to->scales[t] = top / 127.0f + total(zero);
    }
}

INLINE void byte_rows(const Matrix *matrix, int64_t panel, const Rounded *x, int64_t first_row, int num_rows,
                      vec sums[MAX_ROWS][2]) {
    int64_t stride = rounded_stride(matrix->num_inputs), num_groups = (matrix->num_inputs + 3) / 4;
    int32_t dots[MAX_ROWS][PANEL];
    for (int r = 0; r < num_rows; r++)
        for (int lane = 0; lane < PANEL; lane++) dots[r][lane] = -128 * x->sums[first_row + r];
    byte_products((const uint8_t *)matrix->panels + panel * num_groups * PANEL * 4, num_groups, x->bytes + first_row * stride,
                  stride, num_rows, dots);
    for (int r = 0; r < num_rows; r++)
        for (int half = 0; half < 2; half++) {
            ivec dot;
            memcpy(&dot, dots[r] + half * LANES, sizeof dot);
            vec scale = loaded(matrix->scales + panel * PANEL + half * LANES) * x->scales[first_row + r];
            sums[r][half] = __builtin_convertvector(dot, vec) * scale;
        }
}

#define CASES(FORMAT)                                                                       \
    switch (rows) {                                                                         \
    case 1: panel_rows(panel, FORMAT, 1, depth, x + t * depth, depth, sums); break;         \
    case 2: panel_rows(panel, FORMAT, 2, depth, x + t * depth, depth, sums); break;         \
    case 3: panel_rows(panel, FORMAT, 3, depth, x + t * depth, depth, sums); break;         \
    case 4: panel_rows(panel, FORMAT, 4, depth, x + t * depth, depth, sums); break;         \
    case 5: panel_rows(panel, FORMAT, 5, depth, x + t * depth, depth, sums); break;         \
    case 6: panel_rows(panel, FORMAT, 6, depth, x + t * depth, depth, sums); break;         \
    case 7: panel_rows(panel, FORMAT, 7, depth, x + t * depth, depth, sums); break;         \
    case 8: panel_rows(panel, FORMAT, 8, depth, x + t * depth, depth, sums); break;         \
    case 9: panel_rows(panel, FORMAT, 9, depth, x + t * depth, depth, sums); break;         \
    case 10: panel_rows(panel, FORMAT, 10, depth, x + t * depth, depth, sums); break;       \
    case 11: panel_rows(panel, FORMAT, 11, depth, x + t * depth, depth, sums); break;       \
    default: panel_rows(panel, FORMAT, MAX_ROWS, depth, x + t * depth, depth, sums); break; \
    }

/* y [rows, outputs] = or += x [rows, inputs] times the matrix, for panels first to last. INT8 takes the rounded rows. */
FOR_EACH_CPU static void product(const Matrix *matrix, enum Store store, const float *x, const Rounded *rounded, float *y,
                                 int64_t y_stride, int64_t num_rows, int64_t first, int64_t last) {
    int64_t depth = matrix->num_inputs, width = store == GATED ? LANES : PANEL;
    size_t size = (size_t)(depth * PANEL) * (matrix->format == FLOAT32 ? 4 : 2);
    int64_t num_parts = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    for (int64_t p = first; p < last; p++) {
        const void *panel = (const char *)matrix->panels + (size_t)p * size;
        int64_t left = matrix->num_outputs - p * width;
        for (int64_t part = 0; part < num_parts; part++) {
            vec sums[MAX_ROWS][2];
            int64_t t = num_rows * part / num_parts;
            int rows = (int)(num_rows * (part + 1) / num_parts - t);
            if (matrix->format == INT8) {
                byte_rows(matrix, p, rounded, t, rows, sums);
            } else if (matrix->format == BFLOAT16) {
                CASES(BFLOAT16)
            } else if (matrix->format == FLOAT16) {
                CASES(FLOAT16)
            } else {
                CASES(FLOAT32)
            }
            for (int r = 0; r < rows; r++) {
                float *to = y + (t + r) * y_stride + p * width;
                vec one = sums[r][0], two = sums[r][1];
                if (store == GATED) {
                    vec gate = one / (1.0f + exponential(-larger(one, (vec){} - 80.0f)));
                    store_part(to, gate * two, left);
                    continue;
                }
                if (matrix->bias) {
                    float bias[PANEL] = {0};
                    memcpy(bias, matrix->bias + p * width, sizeof(float) * (size_t)(left < PANEL ? left : PANEL));
                    one += loaded(bias), two += loaded(bias + LANES);
                }
                if (left >= PANEL) {
                    if (store == ADD) one += loaded(to), two += loaded(to + LANES);
                    stored(to, one), stored(to + LANES, two);
                } else {
                    if (store == ADD) {
                        float before[PANEL] = {0};
                        memcpy(before, to, sizeof(float) * (size_t)left);
                        one += loaded(before), two += loaded(before + LANES);
                    }
                    store_part(to, one, left);
                    if (left > LANES) store_part(to + LANES, two, left - LANES);
                }
            }
        }
    }
}

/* to = x / sqrt(mean(x^2) + eps) * weight, over width entries */
INLINE void normed(const float *x, const float *weight, float *to, int64_t width, float eps) {
    vec squares = {};
    for (int64_t i = 0; i < width; i += LANES) squares += loaded(x + i) * loaded(x + i);
    float factor = 1.0f / sqrtf(total(squares) / (float)width + eps);
    for (int64_t i = 0; i < width; i += LANES) stored(to + i, loaded(x + i) * factor * loaded(weight + i));
}

FOR_EACH_CPU static void norm_rows(const float *x, const float *weight, float *to, int64_t width, float eps, int64_t first,
                                   int64_t last) {
    for (int64_t t = first; t < last; t++) normed(x + t * width, weight, to + t * width, width, eps);
}

FOR_EACH_CPU static void embed(const Model *model, const int64_t *tokens, float *to, int64_t first, int64_t last) {
    int64_t width = model->hidden_size;
    for (int64_t t = first; t < last; t++) {
        float *row = to + t * width;
        if (!model->embedding) {
            int64_t lane = tokens[t] % LANES, at = tokens[t] / PANEL * width * PANEL + tokens[t] % PANEL - lane;
            for (int64_t i = 0; i < width; i++) row[i] = widened(model->head.panels, at + i * PANEL, model->head.format)[lane];
            continue;
        }
        for (int64_t i = 0; i < width; i += LANES)
            stored(row + i, widened(model->embedding, tokens[t] * width + i, model->embedding_format));
    }
}

INLINE float *head_block(const Model *model, const Pool *pool, int64_t layer, int64_t block, int64_t head) {
    int64_t at = (layer * pool->num_blocks + block) * model->num_kv_heads + head;
    return pool->blocks + at * 2 * pool->num_slots * model->head_dim;
}

/* Norm (Qwen3) and rotate the queries in place, and the keys into the pool; copy the values there. */
FOR_EACH_CPU static void rotate(const Model *model, const Layer *layer, const Pool *pool, const Batch *batch, int64_t index,
                                float *qkv, int64_t first_row, int64_t last_row) {
    int64_t dim = model->head_dim, half = dim / 2, queries = model->num_heads, keys = model->num_kv_heads;
    int64_t stride = (queries + 2 * keys) * dim;
    int64_t row = 0;
    for (int64_t c = 0; c < batch->num_chunks; c++)
        for (int64_t k = 0; k < batch->counts[c]; k++, row++) {
            if (row < first_row || row >= last_row) continue;
            int64_t at = batch->starts[c] + k, size = pool->tokens_per_block;
            int64_t block = batch->blocks[batch->first_blocks[c] + at / size], slot = at % size;
            const float *cosines = model->cosines + at * half, *sines = model->sines + at * half;
            for (int64_t h = 0; h < queries + keys; h++) {
                float *x = qkv + row * stride + h * dim;
                const float *norm = h < queries ? layer->q_norm : layer->k_norm;
                if (norm) normed(x, norm, x, dim, model->eps);
                for (int64_t i = 0; i < half; i++) {
                    float left = x[i], right = x[i + half];
                    x[i] = left * cosines[i] - right * sines[i];
                    x[i + half] = right * cosines[i] + left * sines[i];
                }
            }
            for (int64_t h = 0; h < keys; h++) {
                const float *key = qkv + row * stride + (queries + h) * dim;
                float *to = head_block(model, pool, index, block, h);
                for (int64_t i = 0; i < dim; i++) to[i * pool->num_slots + slot] = key[i];
                memcpy(to + (pool->num_slots + slot) * dim, key + keys * dim, sizeof(float) * (size_t)dim);
            }
        }
}

static const ivec iota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* One query over count of LANES * width slots; max, sum and out (weighed by the exponentials so far) move on. */
INLINE void attend_piece(const float *query, const float *key, const float *value, int64_t num_slots, int width, int count,
                         int64_t dim, float scale, float *max, float *sum, float *out) {
    vec a[4][2];
    for (int k = 0; k < 4; k++) a[k][0] = a[k][1] = (vec){};
    for (int64_t i = 0; i < dim; i += 4)
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            float factor = query[i + k];
            a[k][0] += loaded(key + (i + k) * num_slots) * factor;
            if (width > 1) a[k][1] += loaded(key + (i + k) * num_slots + LANES) * factor;
        }
    vec scores[2], weights[2] = {};
    vec best = (vec){} + *max;
    for (int j = 0; j < width; j++) {
        ivec seen = iota + j * LANES < count;
        scores[j] = ((a[0][j] + a[1][j]) + (a[2][j] + a[3][j])) * scale;
        scores[j] = (vec)(((ivec)scores[j] & seen) | ((ivec)((vec){} - INFINITY) & ~seen));
        best = larger(best, scores[j]);
    }
    float top = largest(best);
    float kept = *max == -INFINITY ? 0.0f : exponential((vec){} + (*max - top))[0];
    for (int j = 0; j < width; j++)
        weights[j] = (vec)((ivec)exponential(scores[j] - top) & (iota + j * LANES < count));
    *sum = *sum * kept + total(weights[0] + weights[1]);
    *max = top;
    float weight[2 * LANES];
    memcpy(weight, weights, sizeof weight);
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) {
        vec b[2][4];
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) b[0][v] = loaded(out + i + v * LANES) * kept, b[1][v] = (vec){};
        int j = 0;
        for (; j + 2 <= count; j += 2)
#pragma GCC unroll 2
            for (int k = 0; k < 2; k++)
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) b[k][v] += loaded(value + (j + k) * dim + i + v * LANES) * weight[j + k];
        if (j < count)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) b[0][v] += loaded(value + j * dim + i + v * LANES) * weight[j];
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) stored(out + i + v * LANES, b[0][v] + b[1][v]);
    }
    for (; i < dim; i += LANES) {
        vec b = loaded(out + i) * kept;
        for (int j = 0; j < count; j++) b += loaded(value + j * dim + i) * weight[j];
        stored(out + i, b);
    }
}

#define ATTEND(WIDTH, DIM)                                                                                         \
    for (int64_t g = 0; g < group; g++) {                                                                          \
        int64_t head = h * group + g;                                                                              \
        float *now = state + (row * queries + head) * 2;                                                           \
        attend_piece(qkv + row * stride + head * dim, key, value, pool->num_slots, WIDTH, count, DIM, scale, now,  \
                     now + 1, out + (row * queries + head) * dim);                                                 \
    }

/* Attention of key heads first to last. Block by block, so that sequences that share a prefix read it while it is at hand. */
FOR_EACH_CPU static void attend(const Model *model, const Pool *pool, const Batch *batch, int64_t index, const float *qkv,
                                float *state, float *out, int64_t first, int64_t last) {
    int64_t dim = model->head_dim, queries = model->num_heads, keys = model->num_kv_heads, group = queries / keys;
    int64_t stride = (queries + 2 * keys) * dim, size = pool->tokens_per_block;
    float scale = 1.0f / sqrtf((float)dim);
    int64_t longest = 0;
    for (int64_t c = 0; c < batch->num_chunks; c++) {
        int64_t end = batch->starts[c] + batch->counts[c];
        longest = end > longest ? end : longest;
    }
    for (int64_t h = first; h < last; h++) {
        for (int64_t row = 0; row < batch->num_rows; row++)
            for (int64_t head = h * group; head < (h + 1) * group; head++) {
                state[(row * queries + head) * 2] = -INFINITY;
                state[(row * queries + head) * 2 + 1] = 0.0f;
                memset(out + (row * queries + head) * dim, 0, sizeof(float) * (size_t)dim);
            }
        for (int64_t at = 0; at < longest;) {
            int64_t left_in_block = size - at % size, step = left_in_block < PANEL ? left_in_block : PANEL;
            for (int64_t c = 0, row = 0; c < batch->num_chunks; c++) {
                if (batch->starts[c] + batch->counts[c] <= at) {
                    row += batch->counts[c];
                    continue;
                }
                const float *block = head_block(model, pool, index, batch->blocks[batch->first_blocks[c] + at / size], h);
                const float *key = block + at % size, *value = block + (pool->num_slots + at % size) * dim;
                for (int64_t k = 0; k < batch->counts[c]; k++, row++) {
                    int64_t known = batch->starts[c] + k + 1 - at;
                    if (known <= 0) continue;
                    int count = (int)(known < step ? known : step);
                    if (step <= LANES) {
                        ATTEND(1, dim)
                    } else if (dim == 64) {
                        ATTEND(2, 64)
                    } else if (dim == 128) {
                        ATTEND(2, 128)
                    } else {
                        ATTEND(2, dim)
                    }
                }
            }
            at += step;
        }
        for (int64_t row = 0; row < batch->num_rows; row++)
            for (int64_t head = h * group; head < (h + 1) * group; head++) {
                float share = 1.0f / state[(row * queries + head) * 2 + 1], *to = out + (row * queries + head) * dim;
                for (int64_t i = 0; i < dim; i++) to[i] *= share;
            }
    }
}

/* Bytes of one rounded row of any product. */
static int64_t rounded_size(const Model *model) {
    int64_t widest = model->hidden_size, queries = model->num_heads * model->head_dim;
    widest = queries > widest ? queries : widest;
    return rounded_stride(model->inner_size > widest ? model->inner_size : widest);
}

/* Floats that a batch of so many rows needs to compute in. */
int64_t decoder_scratch(const Model *model, int64_t num_rows) {
    int64_t heads = model->num_heads + 2 * model->num_kv_heads, queries = model->num_heads * model->head_dim;
    int64_t plain = 2 * model->hidden_size + heads * model->head_dim + queries + 2 * model->num_heads + model->inner_size;
    return num_rows * (plain + 2 + rounded_size(model) / (int64_t)sizeof(float));
}

static int64_t num_panels(const Matrix *matrix, enum Store store) {
    int64_t width = store == GATED ? LANES : PANEL;
    return (matrix->num_outputs + width - 1) / width;
}

static void run(const Model *model, const Pool *pool, const Batch *batch, int64_t thread, int64_t num_threads) {
    int64_t num_rows = batch->num_rows, hidden_size = model->hidden_size, queries = model->num_heads * model->head_dim;
    int64_t heads_dim = queries + 2 * model->num_kv_heads * model->head_dim;
    float *hidden = batch->scratch, *plain = hidden + num_rows * hidden_size, *qkv = plain + num_rows * hidden_size;
    float *attended = qkv + num_rows * heads_dim, *state = attended + num_rows * queries;
    float *inner = state + num_rows * 2 * model->num_heads, *after = inner + num_rows * model->inner_size;
    const Rounded rounded = {(int8_t *)(after + 2 * num_rows), after, (int32_t *)(after + num_rows)};
#define SHARE(count) (count) * thread / num_threads, (count) * (thread + 1) / num_threads
#ifdef _OPENMP
#define WAIT _Pragma("omp barrier")
#else
#define WAIT
#endif
#define PRODUCT(matrix, store, x, y, y_stride, rows) \
    product(matrix, store, x, &rounded, y, y_stride, rows, SHARE(num_panels(matrix, store)))
#define ROUND(matrix, x, rows) \
    if ((matrix)->format == INT8) round_rows(x, (matrix)->num_inputs, &rounded, SHARE(rows));
/* Rows that several threads have made are rounded when all are there, and multiplied when all are rounded. */
#define ROUND_ALL(matrix, x, rows)       \
    if ((matrix)->format == INT8) {      \
        ROUND(matrix, x, rows)           \
        WAIT;                            \
    }
    embed(model, batch->tokens, hidden, SHARE(num_rows));
    for (int64_t index = 0; index < model->num_layers; index++) {
        const Layer *layer = model->layers + index;
        norm_rows(hidden, layer->input_norm, plain, hidden_size, model->eps, SHARE(num_rows));
        ROUND(&layer->qkv, plain, num_rows)
        WAIT PRODUCT(&layer->qkv, SET, plain, qkv, heads_dim, num_rows);
        WAIT rotate(model, layer, pool, batch, index, qkv, SHARE(num_rows));
        WAIT attend(model, pool, batch, index, qkv, state, attended, SHARE(model->num_kv_heads));
        WAIT ROUND_ALL(&layer->output, attended, num_rows)
        PRODUCT(&layer->output, ADD, attended, hidden, hidden_size, num_rows);
        WAIT norm_rows(hidden, layer->mlp_norm, plain, hidden_size, model->eps, SHARE(num_rows));
        ROUND(&layer->gate_up, plain, num_rows)
        WAIT PRODUCT(&layer->gate_up, GATED, plain, inner, model->inner_size, num_rows);
        WAIT ROUND_ALL(&layer->down, inner, num_rows)
        PRODUCT(&layer->down, ADD, inner, hidden, hidden_size, num_rows);
        WAIT;
    }
    if (thread == 0)
        for (int64_t r = 0; r < batch->num_logits; r++)
            memcpy(plain + r * hidden_size, hidden + batch->logit_rows[r] * hidden_size, sizeof(float) * (size_t)hidden_size);
    WAIT norm_rows(plain, model->norm, plain, hidden_size, model->eps, SHARE(batch->num_logits));
    ROUND(&model->head, plain, batch->num_logits)
    WAIT PRODUCT(&model->head, SET, plain, batch->logits, model->head.num_outputs, batch->num_logits);
}

/* y [rows, outputs] = x [rows, inputs] times one matrix. scratch: rows * (2 + inputs rounded up to LANES / 4) floats, for INT8. */
void decoder_product(const Matrix *matrix, const float *x, float *y, int64_t num_rows, float *scratch) {
    const Rounded rounded = {(int8_t *)(scratch + 2 * num_rows), scratch, (int32_t *)(scratch + num_rows)};
    if (matrix->format == INT8) round_rows(x, matrix->num_inputs, &rounded, 0, num_rows);
    product(matrix, SET, x, &rounded, y, matrix->num_outputs, num_rows, 0, num_panels(matrix, SET));
}

/* Keys and values of all rows go to the pool, and the logits of the rows asked for to batch->logits. */
void decoder_forward(const Model *model, const Pool *pool, const Batch *batch, int64_t num_threads) {
#ifdef _OPENMP
    if (num_threads > 1) {
#pragma omp parallel num_threads((int)num_threads)
        run(model, pool, batch, omp_get_thread_num(), omp_get_num_threads());
        return;
    }
#endif
    run(model, pool, batch, 0, 1);
}

static uint64_t mixed(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

/* sampler.py's uniform() for the purpose of a draw. */
static double uniform_of(uint64_t seed, int64_t offset) {
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    uint64_t state = mixed(mixed(seed + golden) ^ mixed(((uint64_t)offset * 4 + 1) * golden));
    return (double)(state >> 11) * 0x1p-53;
}

/* Logarithm of the sum of all e^logit. */
static double log_total(const float *logits, int64_t vocab_size) {
    float best = logits[0];
    double total = 0.0;
    for (int64_t v = 1; v < vocab_size; v++) best = logits[v] > best ? logits[v] : best;
    for (int64_t v = 0; v < vocab_size; v++) total += (double)expf(logits[v] - best);
    return (double)best + log(total);
}

static int is_finite(const float *logits, int64_t vocab_size) {
    float sum = 0.0f;
    for (int64_t v = 0; v < vocab_size; v++) sum += logits[v] * 0.0f;
    return sum == 0.0f;
}

/* Decode step by step until a sequence draws a token that may end it, somebody waits, or max_steps are done. Returns the number
 * of steps, or -1 for logits that are not finite. */
int64_t decoder_run(const Model *model, const Pool *pool, const Run *given, int64_t num_threads) {
    const Run run = *given;
    int64_t count = run.num_sequences, vocab_size = model->head.num_outputs;
    const Batch batch = {count,     count,      count,           run.tokens, run.starts, run.ones,
                         run.first_blocks, run.blocks, run.places, run.logits, run.scratch};
    for (int64_t step = 0; step < run.max_steps; step++) {
        int ended = 0;
        decoder_forward(model, pool, &batch, num_threads);
        for (int64_t s = 0; s < count; s++) {
            const float *logits = run.logits + s * vocab_size;
            if (!is_finite(logits, vocab_size)) return -1;
            double uniform = uniform_of(run.seeds[s], run.offsets[s] + step);
            int64_t token =
                draw_token(logits, vocab_size, run.temperatures[s], run.top_ks[s], run.top_ps[s], uniform, run.candidates);
            const uint8_t *ends = (const uint8_t *)(uintptr_t)run.ends[s];
            ended |= ends && ends[token];
            run.drawn[step * count + s] = token;
            if (run.log_probs) run.log_probs[step * count + s] = (double)logits[token] - log_total(logits, vocab_size);
            run.tokens[s] = token;
            run.starts[s]++;
        }
        if (ended || *run.interrupt) return step + 1;
    }
    return run.max_steps;
}
