/* One forward pass of a Qwen3, Qwen2 or Llama decoder on a CPU, in float32, over a paged KV pool.
 *
 * Made for few rows: decoding, verifying, branches that join. Weights are read once for up to MAX_ROWS rows, from panels of
 * PANEL outputs. They have 32 bits, or 16 where nothing is lost, which is half as much to read; or 16 or 8 bits with rows that are
 * rounded likewise.
 *
 * Every row is computed by the same operations in the same order whatever stands beside it and however a prompt is cut: batch,
 * chunks, prefix reuse, drafts and threads change no bit of a result.
 */
#include "decoder.h"

#include <math.h>

#ifdef _OPENMP
#include <omp.h>
#endif

#include "vectors.h"

#define AHEAD 256 /* inputs: weights come from a far cache, and its own prefetcher starts anew with every page */
#define DEPTH 128 /* inputs at a time where rows take turns: their weights and a turn's rows stay in the nearest cache */
#define SPAN (8 * MAX_ROWS) /* rows that take turns */
#define MAX_NARROW_ROWS 2   /* four halves of sums a row and four of weights fill the registers of AVX2 */

typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));
typedef int8_t bvec __attribute__((vector_size(LANES)));

enum Store { SET, ADD, GATED };

/* Rounded rows: in eight bits, scaled by the largest entry of each, or in bfloat16. */
typedef struct {
    void *numbers; /* [rows, rounded_stride(inputs)], zero beyond the inputs */
    float *scales; /* [rows]: what 1 stands for; NaN where an entry is not finite. For eight bits only */
    int32_t *sums; /* [rows]: of the numbers. For eight bits only */
} Rounded;

/* The upper halves of 32 bits as numbers. A float16 is the upper half of a float32 with three bits less of exponent, for which a
 * product makes up. Weights are finite. */
INLINE vec upper(uvec bits, enum Format format) {
    bits = format == FLOAT16 ? (uvec)((ivec)bits >> 3) & 0x8fffe000u : bits & 0xffff0000u;
    vec value;
    memcpy(&value, &bits, sizeof value);
    return format == FLOAT16 ? value * 0x1p112f : value;
}

INLINE half_vec upper_half(half_uvec bits, enum Format format) {
    bits = format == FLOAT16 ? (half_uvec)((half_ivec)bits >> 3) & 0x8fffe000u : bits & 0xffff0000u;
    half_vec value;
    memcpy(&value, &bits, sizeof value);
    return format == FLOAT16 ? value * 0x1p112f : value;
}

/* LANES numbers of a table from place at on. */
INLINE vec widened(const void *from, int64_t at, enum Format format) {
    if (format == FLOAT32) return loaded((const float *)from + at);
    hvec half;
    memcpy(&half, (const uint16_t *)from + at, sizeof half);
    return upper(__builtin_convertvector(half, uvec) << 16, format);
}

/* What input i is multiplied with, for the PANEL outputs of a panel. */
INLINE void weights_of(const void *panel, int64_t i, enum Format format, vec weights[2]) {
    if (format == FLOAT32) {
        weights[0] = loaded((const float *)panel + i * PANEL), weights[1] = loaded((const float *)panel + i * PANEL + LANES);
        return;
    }
    uvec bits;
    memcpy(&bits, (const uint16_t *)panel + i * PANEL, sizeof bits);
    weights[0] = upper(bits << 16, format), weights[1] = upper(bits, format);
}

/* The same in halves, in the order in which they stand in memory. */
INLINE void half_weights_of(const void *panel, int64_t i, enum Format format, half_vec weights[4]) {
    if (format == FLOAT32) {
        for (int h = 0; h < 4; h++) memcpy(weights + h, (const float *)panel + i * PANEL + h * LANES / 2, sizeof *weights);
        return;
    }
    for (int h = 0; h < 2; h++) {
        half_uvec bits;
        memcpy(&bits, (const uint16_t *)panel + i * PANEL + h * LANES, sizeof bits);
        weights[h] = upper_half(bits << 16, format);
        weights[2 + h] = upper_half(bits, format);
    }
}

INLINE void store_part(float *to, vec value, int64_t count) {
    float part[LANES];
    memcpy(part, &value, sizeof part);
    memcpy(to, part, sizeof(float) * (size_t)(count < LANES ? count : LANES));
}

/* sums [rows][2] += x [rows, depth] times a panel; for each input, step bytes more are fetched from ahead on. A register holds
 * NUMBERS, of which a panel has PARTS; of MOST rows the registers hold all sums. */
#define PANEL_ROWS(NAME, NUMBERS, PARTS, MOST, WEIGHTS)                                                                       \
    INLINE void NAME(const void *panel, enum Format format, int num_rows, int64_t depth, const float *x, int64_t x_stride,   \
                     const char *ahead, int64_t step, vec (*sums)[2]) {                                                       \
        NUMBERS a[MOST][PARTS], w[PARTS];                                                                                     \
        _Pragma("GCC unroll 12") for (int r = 0; r < num_rows; r++)                                                           \
            _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; p++)                                                           \
                memcpy(a[r] + p, (float *)sums[r] + p * (PANEL / PARTS), sizeof(NUMBERS));                       \
        for (int64_t i = 0; i < depth; i++) {                                                                                 \
            __builtin_prefetch(ahead + i * step);                                                                             \
            if (format == FLOAT32) __builtin_prefetch(ahead + i * step + PANEL * 2);                                          \
            WEIGHTS(panel, i, format, w);                                                                                     \
            _Pragma("GCC unroll 12") for (int r = 0; r < num_rows; r++) {                                                     \
                float factor = x[r * x_stride + i];                                                                           \
                _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; p++) a[r][p] += w[p] * factor;                             \
            }                                                                                                                 \
        }                                                                                                                     \
        _Pragma("GCC unroll 12") for (int r = 0; r < num_rows; r++)                                                           \
            _Pragma("GCC unroll 4") for (int p = 0; p < PARTS; p++)                                                           \
                memcpy((float *)sums[r] + p * (PANEL / PARTS), a[r] + p, sizeof(NUMBERS));                       \
    }
PANEL_ROWS(wide_rows, vec, 2, MAX_ROWS, weights_of)
PANEL_ROWS(narrow_rows, half_vec, 4, MAX_NARROW_ROWS, half_weights_of)

/* LANES numbers of which so many are left: zero beyond. */
INLINE vec loaded_or_zero(const float *from, int64_t left) {
    vec value = {};
    memcpy(&value, from, sizeof(float) * (size_t)(left < LANES ? left : LANES));
    return value;
}

static int64_t rounded_stride(int64_t depth) { return (depth + LANES - 1) / LANES * LANES; }

static int is_rounded(const Matrix *matrix) { return matrix->format == INT8 || matrix->format == PAIRS; }

FOR_EACH_CPU static void round_to_bytes(const float *x, int64_t depth, const Rounded *to, int64_t first, int64_t last) {
    const vec magic = (vec){} + 12582912.0f;
    int64_t stride = rounded_stride(depth);
    for (int64_t t = first; t < last; t++) {
        const float *row = x + t * depth;
        vec most = {}, zero = {};
        ivec sum = {};
        for (int64_t i = 0; i < depth; i += LANES) {
            vec value = loaded_or_zero(row + i, depth - i);
            most = larger(most, (vec)((ivec)value & 0x7fffffff));
            zero += value * 0.0f;
        }
        float top = largest(most), factor = top > 0.0f ? 127.0f / top : 0.0f;
        for (int64_t i = 0; i < depth; i += LANES) {
            vec value = loaded_or_zero(row + i, depth - i);
            vec shifted = value * factor + magic;
            ivec whole = (ivec)shifted - (ivec)magic;
            bvec bytes = __builtin_convertvector(whole, bvec);
            memcpy((int8_t *)to->numbers + t * stride + i, &bytes, sizeof bytes);
            sum += whole;
        }
        int32_t sums[LANES], all = 0;
        memcpy(sums, &sum, sizeof sums);
        for (int lane = 0; lane < LANES; lane++) all += sums[lane];
        to->sums[t] = all;
        to->scales[t] = top / 127.0f + total(zero);
    }
}

/* Round to the nearest bfloat16, ties to even; NaN stays NaN. */
FOR_EACH_CPU static void round_to_halves(const float *x, int64_t depth, const Rounded *to, int64_t first, int64_t last) {
    int64_t stride = rounded_stride(depth);
    for (int64_t t = first; t < last; t++) {
        const float *row = x + t * depth;
        for (int64_t i = 0; i < depth; i += LANES) {
            vec value = loaded_or_zero(row + i, depth - i);
            uvec bits = (uvec)value, no_number = (uvec)(value != value);
            uvec nearest = bits + 0x7fffu + (bits >> 16 & 1u);
            hvec half = __builtin_convertvector(((nearest & ~no_number) | (0x7fc00000u & no_number)) >> 16, hvec);
            memcpy((uint16_t *)to->numbers + t * stride + i, &half, sizeof half);
        }
    }
}

static void round_rows(const Matrix *matrix, const float *x, const Rounded *to, int64_t first, int64_t last) {
    if (matrix->format == INT8) round_to_bytes(x, matrix->num_inputs, to, first, last);
    if (matrix->format == PAIRS) round_to_halves(x, matrix->num_inputs, to, first, last);
}

/* sums [rows][2] = the rounded rows from first_row on times one panel. */
INLINE void pair_rows(const Matrix *matrix, int64_t panel, const Rounded *x, int64_t first_row, int64_t num_rows,
                      vec (*sums)[2]) {
    int64_t stride = rounded_stride(matrix->num_inputs), num_pairs = (matrix->num_inputs + 1) / 2;
    int64_t num_parts = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const uint16_t *weights = (const uint16_t *)matrix->panels + panel * num_pairs * PANEL * 2;
    for (int64_t part = 0; part < num_parts; part++) {
        int64_t done = num_rows * part / num_parts, rows = num_rows * (part + 1) / num_parts - done;
        const uint16_t *from = (const uint16_t *)x->numbers + (first_row + done) * stride;
        pair_products(weights, num_pairs, from, stride, rows, (float (*)[PANEL])(sums + done));
    }
}

/* sums [rows][2] = the rounded rows from first_row on times one panel. */
INLINE void byte_rows(const Matrix *matrix, int64_t panel, const Rounded *x, int64_t first_row, int64_t num_rows,
                      vec (*sums)[2]) {
    int64_t stride = rounded_stride(matrix->num_inputs), num_groups = (matrix->num_inputs + 3) / 4;
    int64_t num_parts = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
    const uint8_t *weights = (const uint8_t *)matrix->panels + panel * num_groups * PANEL * 4;
    for (int64_t part = 0; part < num_parts; part++) {
        int32_t dots[MAX_ROWS][PANEL];
        int64_t done = num_rows * part / num_parts, rows = num_rows * (part + 1) / num_parts - done, row = first_row + done;
        for (int64_t r = 0; r < rows; r++)
            for (int lane = 0; lane < PANEL; lane++) dots[r][lane] = -128 * x->sums[row + r];
        byte_products(weights, num_groups, (const int8_t *)x->numbers + row * stride, stride, rows, dots);
        for (int64_t r = 0; r < rows; r++)
            for (int half = 0; half < 2; half++) {
                ivec dot;
                memcpy(&dot, dots[r] + half * LANES, sizeof dot);
                vec scale = loaded(matrix->scales + panel * PANEL + half * LANES) * x->scales[row + r];
                sums[done + r][half] = __builtin_convertvector(dot, vec) * scale;
            }
    }
}

#define CASE(ROWS, FORMAT)                                                                            \
    case ROWS:                                                                                        \
        if (wide) wide_rows(block, FORMAT, ROWS, inputs, from, depth, ahead, step, sums + done);      \
        if (!wide && ROWS <= MAX_NARROW_ROWS)                                                         \
            narrow_rows(block, FORMAT, ROWS, inputs, from, depth, ahead, step, sums + done);          \
        break;
#define CASES(FORMAT)                                                                                           \
    switch (rows) {                                                                                             \
        CASE(1, FORMAT) CASE(2, FORMAT) CASE(3, FORMAT) CASE(4, FORMAT) CASE(5, FORMAT) CASE(6, FORMAT)         \
        CASE(7, FORMAT) CASE(8, FORMAT) CASE(9, FORMAT) CASE(10, FORMAT) CASE(11, FORMAT) CASE(MAX_ROWS, FORMAT) \
    }

/* sums [rows][2] = x [rows, inputs] times one panel. More rows than registers hold take turns, DEPTH inputs at a time, while what
 * comes next is fetched little by little. */
INLINE void panel_products(const Matrix *matrix, int64_t index, const float *x, int64_t num_rows, vec (*sums)[2], int wide) {
    int64_t max_rows = wide ? MAX_ROWS : MAX_NARROW_ROWS;
    int64_t depth = matrix->num_inputs, num_parts = (num_rows + max_rows - 1) / max_rows;
    int64_t size = PANEL * (matrix->format == FLOAT32 ? 4 : 2), step = size / num_parts, most = num_parts > 1 ? DEPTH : depth;
    const char *panel = (const char *)matrix->panels + index * depth * size;
    for (int64_t r = 0; r < num_rows; r++) sums[r][0] = sums[r][1] = (vec){};
    for (int64_t first = 0; first < depth; first += most) {
        int64_t inputs = depth - first < most ? depth - first : most;
        const char *block = panel + first * size, *next = block + (num_parts > 1 ? inputs : AHEAD) * size;
        for (int64_t part = 0; part < num_parts; part++) {
            int64_t done = num_rows * part / num_parts;
            int rows = (int)(num_rows * (part + 1) / num_parts - done);
            const float *from = x + done * depth + first;
            const char *ahead = next + part * inputs * step;
            if (matrix->format == BFLOAT16) {
                CASES(BFLOAT16)
            } else if (matrix->format == FLOAT16) {
                CASES(FLOAT16)
            } else {
                CASES(FLOAT32)
            }
        }
    }
}

/* y [rows, outputs] = or += x [rows, inputs] times the matrix, for panels first to last. INT8 and PAIRS take the rounded rows. */
INLINE void product_of(const Matrix *matrix, enum Store store, const float *x, const Rounded *rounded, float *y,
                       int64_t y_stride, int64_t num_rows, int64_t first, int64_t last, int wide) {
    int64_t depth = matrix->num_inputs, width = store == GATED ? LANES : PANEL;
    int64_t num_spans = (num_rows + SPAN - 1) / SPAN;
    for (int64_t p = first; p < last; p++) {
        int64_t left = matrix->num_outputs - p * width;
        for (int64_t span = 0; span < num_spans; span++) {
            vec sums[SPAN][2];
            int64_t t = num_rows * span / num_spans, rows = num_rows * (span + 1) / num_spans - t;
            if (matrix->format == INT8) {
                byte_rows(matrix, p, rounded, t, rows, sums);
            } else if (matrix->format == PAIRS) {
                pair_rows(matrix, p, rounded, t, rows, sums);
            } else {
                panel_products(matrix, p, x + t * depth, rows, sums, wide);
            }
            for (int64_t r = 0; r < rows; r++) {
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

#define PRODUCT_ARGUMENTS                                                                                                   \
    const Matrix *matrix, enum Store store, const float *x, const Rounded *rounded, float *y, int64_t y_stride,             \
        int64_t num_rows, int64_t first, int64_t last

FOR_WIDE static void wide_product(PRODUCT_ARGUMENTS) {
    product_of(matrix, store, x, rounded, y, y_stride, num_rows, first, last, 1);
}

FOR_NARROW static void narrow_product(PRODUCT_ARGUMENTS) {
    product_of(matrix, store, x, rounded, y, y_stride, num_rows, first, last, 0);
}

static void product(PRODUCT_ARGUMENTS) {
    (is_wide() ? wide_product : narrow_product)(matrix, store, x, rounded, y, y_stride, num_rows, first, last);
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
        if (!model->embedding && model->head.format == PAIRS) {
            const uint16_t *panel = (const uint16_t *)model->head.panels + tokens[t] / PANEL * ((width + 1) / 2) * PANEL * 2;
            for (int64_t i = 0; i < width; i++) {
                uint32_t bits = (uint32_t)panel[(i / 2 * PANEL + tokens[t] % PANEL) * 2 + i % 2] << 16;
                memcpy(row + i, &bits, sizeof bits);
            }
            continue;
        }
        if (!model->embedding) {
            int64_t size = PANEL * (model->head.format == FLOAT32 ? 4 : 2), half = tokens[t] % PANEL / LANES;
            const char *panel = (const char *)model->head.panels + tokens[t] / PANEL * width * size;
            for (int64_t i = 0; i < width; i++) {
                vec weights[2];
                weights_of(panel, i, (enum Format)model->head.format, weights);
                row[i] = weights[half][tokens[t] % LANES];
            }
            continue;
        }
        for (int64_t i = 0; i < width; i += LANES)
            stored(row + i, widened(model->embedding, tokens[t] * width + i, model->embedding_format));
    }
}

/* Copy keys and values of the first tokens of one block to another. */
void decoder_copy_prefix(const Model *model, const Pool *pool, int64_t source, int64_t target, int64_t num_tokens) {
    int64_t dim = model->head_dim, slots = pool->num_slots;
    for (int64_t layer = 0; layer < model->num_layers; layer++)
        for (int64_t head = 0; head < model->num_kv_heads; head++) {
            const float *from = head_block(model, pool, layer, source, head);
            float *to = head_block(model, pool, layer, target, head);
            for (int64_t i = 0; i < dim; i++) memcpy(to + i * slots, from + i * slots, sizeof(float) * (size_t)num_tokens);
            memcpy(to + slots * dim, from + slots * dim, sizeof(float) * (size_t)(num_tokens * dim));
        }
}

/* Move the rows that yield logits to the front. */
static void narrow(const Batch *batch, float *rows, int64_t width) {
    int64_t to = 0, end = 0;
    for (int64_t c = 0; c < batch->num_chunks; c++) {
        int64_t count = batch->logit_counts[c];
        end += batch->counts[c];
        memmove(rows + to * width, rows + (end - count) * width, sizeof(float) * (size_t)(count * width));
        to += count;
    }
}

/* Norm (Qwen3) and rotate heads first to last, the queries in place and the keys into the pool; copy their values there. */
FOR_EACH_CPU static void rotate(const Model *model, const Layer *layer, const Pool *pool, const Batch *batch, enum Part part,
                                int64_t index, float *qkv, int64_t first, int64_t last, int64_t first_row, int64_t last_row) {
    int64_t dim = model->head_dim, half = dim / 2, queries = model->num_heads, keys = model->num_kv_heads;
    int64_t stride = (queries + 2 * keys) * dim;
    int64_t row = 0;
    for (int64_t c = 0; c < batch->num_chunks; c++)
        for (int64_t k = 0; k < count_of(batch, part, c); k++, row++) {
            if (row < first_row || row >= last_row) continue;
            int64_t at = start_of(batch, part, c) + k, size = pool->tokens_per_block;
            int64_t block = batch->blocks[batch->first_blocks[c] + at / size], slot = at % size;
            const float *cosines = model->cosines + at * half, *sines = model->sines + at * half;
            for (int64_t h = first; h < last; h++) {
                float *x = qkv + row * stride + h * dim;
                const float *norm = h < queries ? layer->q_norm : layer->k_norm;
                if (norm) normed(x, norm, x, dim, model->eps);
                for (int64_t i = 0; i < half; i++) {
                    float left = x[i], right = x[i + half];
                    x[i] = left * cosines[i] - right * sines[i];
                    x[i + half] = right * cosines[i] + left * sines[i];
                }
            }
            for (int64_t h = queries; h < last; h++) {
                const float *key = qkv + row * stride + h * dim;
                float *to = head_block(model, pool, index, block, h - queries);
                for (int64_t i = 0; i < dim; i++) to[i * pool->num_slots + slot] = key[i];
                memcpy(to + (pool->num_slots + slot) * dim, key + keys * dim, sizeof(float) * (size_t)dim);
            }
        }
}

/* Bytes of one rounded row of any product: at most two a number. */
static int64_t rounded_size(const Model *model) {
    int64_t widest = model->hidden_size, queries = model->num_heads * model->head_dim;
    widest = queries > widest ? queries : widest;
    return 2 * rounded_stride(model->inner_size > widest ? model->inner_size : widest);
}

/* The digest of the sources that this was compiled of. */
const char *decoder_sources(void) { return SOURCES; }

/* Floats that a batch of so many rows needs to compute in. */
int64_t decoder_scratch(const Model *model, int64_t num_rows) {
    int64_t heads = model->num_heads + 2 * model->num_kv_heads, queries = model->num_heads * model->head_dim;
    int64_t plain = 2 * model->hidden_size + heads * model->head_dim + queries + model->inner_size;
    return num_rows * (plain + 2 + rounded_size(model) / (int64_t)sizeof(float));
}

static int64_t num_panels(const Matrix *matrix, enum Store store) {
    int64_t width = store == GATED ? LANES : PANEL;
    return (matrix->num_outputs + width - 1) / width;
}

static void run(const Model *model, const Pool *pool, const Batch *batch, int64_t thread, int64_t num_threads) {
    int64_t num_rows = batch->num_rows, hidden_size = model->hidden_size;
    int64_t num_heads = model->num_heads, queries = num_heads * model->head_dim;
    enum Part part = ALL;
    int64_t heads_dim = queries + 2 * model->num_kv_heads * model->head_dim;
    float *hidden = batch->scratch, *plain = hidden + num_rows * hidden_size, *qkv = plain + num_rows * hidden_size;
    float *attended = qkv + num_rows * heads_dim;
    float *inner = attended + num_rows * queries, *after = inner + num_rows * model->inner_size;
    const Rounded rounded = {after + 2 * num_rows, after, (int32_t *)(after + num_rows)};
#define SHARE(count) (count) * thread / num_threads, (count) * (thread + 1) / num_threads
#ifdef _OPENMP
#define WAIT _Pragma("omp barrier")
#else
#define WAIT
#endif
#define PANELS(matrix, store, x, y, y_stride, rows, first, last)                      \
    product(matrix, store, x, &rounded, y, y_stride, rows, (first) + ((last) - (first)) * thread / num_threads, \
            (first) + ((last) - (first)) * (thread + 1) / num_threads)
#define PRODUCT(matrix, store, x, y, y_stride, rows) PANELS(matrix, store, x, y, y_stride, rows, 0, num_panels(matrix, store))
#define ROUND(matrix, x, rows) round_rows(matrix, x, &rounded, SHARE(rows));
/* For rows that several threads make: round them when all are there, and go on when all are rounded. */
#define ROUND_ALL(matrix, x, rows)       \
    if (is_rounded(matrix)) {            \
        ROUND(matrix, x, rows)           \
        WAIT;                            \
    }
    embed(model, batch->tokens, hidden, SHARE(num_rows));
    for (int64_t index = 0; index < model->num_layers; index++) {
        const Layer *layer = model->layers + index;
        norm_rows(hidden, layer->input_norm, plain, hidden_size, model->eps, SHARE(num_rows));
        ROUND(&layer->qkv, plain, num_rows)
        if (index < model->num_layers - 1 || batch->num_logits == num_rows) {
            WAIT PRODUCT(&layer->qkv, SET, plain, qkv, heads_dim, num_rows);
            WAIT rotate(model, layer, pool, batch, part, index, qkv, 0, num_heads + model->num_kv_heads, SHARE(num_rows));
        } else {
            /* The last layer: rows without logits leave keys and values behind, and nothing else is needed of them. */
            WAIT PANELS(&layer->qkv, SET, plain, qkv, heads_dim, num_rows, queries / PANEL, num_panels(&layer->qkv, SET));
            WAIT rotate(model, layer, pool, batch, part, index, qkv, num_heads, num_heads + model->num_kv_heads, SHARE(num_rows));
            part = LOGITS, num_rows = batch->num_logits;
            if (!num_rows) return;
            WAIT if (thread == 0) narrow(batch, hidden, hidden_size), narrow(batch, plain, hidden_size);
            WAIT ROUND(&layer->qkv, plain, num_rows)
            WAIT PANELS(&layer->qkv, SET, plain, qkv, heads_dim, num_rows, 0, (queries + PANEL - 1) / PANEL);
            WAIT rotate(model, layer, pool, batch, part, index, qkv, 0, num_heads, SHARE(num_rows));
        }
        WAIT attend(model, pool, batch, part, index, qkv, attended, SHARE(model->num_kv_heads));
        WAIT ROUND_ALL(&layer->output, attended, num_rows)
        PRODUCT(&layer->output, ADD, attended, hidden, hidden_size, num_rows);
        WAIT norm_rows(hidden, layer->mlp_norm, plain, hidden_size, model->eps, SHARE(num_rows));
        ROUND(&layer->gate_up, plain, num_rows)
        WAIT PRODUCT(&layer->gate_up, GATED, plain, inner, model->inner_size, num_rows);
        WAIT ROUND_ALL(&layer->down, inner, num_rows)
        PRODUCT(&layer->down, ADD, inner, hidden, hidden_size, num_rows);
        WAIT;
    }
    norm_rows(hidden, model->norm, plain, hidden_size, model->eps, SHARE(num_rows));
    ROUND(&model->head, plain, num_rows)
    WAIT PRODUCT(&model->head, SET, plain, batch->logits, model->head.num_outputs, num_rows);
}

/* y [rows, outputs] = x [rows, inputs] times one matrix. scratch: rows * (2 + inputs rounded up to LANES / 2) floats, for rounded
 * rows. */
void decoder_product(const Matrix *matrix, const float *x, float *y, int64_t num_rows, float *scratch) {
    const Rounded rounded = {scratch + 2 * num_rows, scratch, (int32_t *)(scratch + num_rows)};
    round_rows(matrix, x, &rounded, 0, num_rows);
    product(matrix, SET, x, &rounded, y, matrix->num_outputs, num_rows, 0, num_panels(matrix, SET));
}

/* Compute a batch: keys and values of all rows go to the pool, logits to batch->logits. */
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
