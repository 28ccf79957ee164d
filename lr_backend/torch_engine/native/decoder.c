/* One forward pass of a Qwen3, Qwen2 or Llama decoder on a CPU, in float32, over a paged KV pool.
 *
 * Made for few rows: decoding, verifying, branches that join. Weights are read once for up to MAX_ROWS rows, from panels of
 * PANEL outputs, in 16 bits where they may be: half as much to read; or with rows rounded likewise, in 16 bits or 8.
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

#define AHEAD 64 /* inputs: weights come from a far cache, and its own prefetcher starts anew with every page */
#define DEPTH 128 /* inputs at a time where rows take turns: their weights and a turn's rows stay in the nearest cache */
#define SPAN (8 * MAX_ROWS) /* rows that take turns */
#define MAX_READERS 4 /* heads that read keys and values together */
#define MAX_GROUP 16 /* heads whose weights of a tile of values are at hand */
#define TILE (8 * PANEL)

typedef uint16_t hvec __attribute__((vector_size(2 * LANES)));
typedef int8_t bvec __attribute__((vector_size(LANES)));

enum Format { FLOAT32, BFLOAT16, FLOAT16, INT8, PAIRS };

typedef struct {
    int64_t num_inputs, num_outputs; /* of a gated product: the outputs after gating */
    int64_t format;                  /* of the panels: enum Format */
    const void *panels;              /* FLOAT32: [panels, num_inputs, PANEL]; in 16 bits [panels, num_inputs, LANES, 2], the
                                        first LANES outputs before the others; INT8: [panels, ceil(inputs / 4), PANEL, 4],
                                        128 more each; PAIRS: bfloat16 [panels, ceil(inputs / 2), PANEL, 2] */
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
    const int64_t *logit_counts;            /* [chunks]: how many of a chunk's last rows yield logits; num_logits in all */
    float *logits;                          /* [num_logits, vocabulary] */
    float *scratch;                         /* floats: see decoder_scratch */
} Batch;

/* Rows of a batch: all, or those alone that yield logits. */
enum Part { ALL, LOGITS };

/* Sequences that decode on their own until something happens. */
typedef struct {
    int64_t num_sequences, max_steps;
    int64_t *tokens, *starts;             /* [sequences]: the next token to compute and its position; they move on */
    const int64_t *ones;                  /* [sequences]: 1, 1, ... */
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

/* Rows in eight bits, each by its own largest entry; or in bfloat16. */
typedef struct {
    void *numbers; /* [rows, rounded_stride(inputs)], zero beyond the inputs */
    float *scales; /* [rows]: what 1 stands for; not a number where an entry is not finite. In eight bits alone */
    int32_t *sums; /* [rows]: of the numbers. In eight bits alone */
} Rounded;

INLINE vec loaded(const float *from) {
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

/* The upper halves of 32 bits as numbers. A float16 is the upper half of a float32 but for three bits of exponent, which a product
 * makes up for; weights are finite. */
INLINE vec upper(uvec bits, enum Format format) {
    bits = format == FLOAT16 ? (uvec)((ivec)bits >> 3) & 0x8fffe000u : bits & 0xffff0000u;
    vec value;
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

INLINE void stored(float *to, vec value) { memcpy(to, &value, sizeof value); }

#define FOLD(v, mask) ((v) + __builtin_shuffle((v), mask))

INLINE float total(vec v) {
    v = FOLD(v, ((ivec){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = FOLD(v, ((ivec){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = FOLD(v, ((ivec){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    v = FOLD(v, ((ivec){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return v[0];
}

/* Of two that do not compare, b. */
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

/* e^x to 2 units in the last place; x is at most some 80, or not a number, which stays none */
INLINE vec exponential(vec x) {
    const vec magic = (vec){} + 12582912.0f;
    x = larger((vec){} - 87.0f, x);
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

/* sums [rows][2] += x [rows, depth] times a panel; for each input, step bytes more are fetched from ahead on. */
INLINE void panel_rows(const void *panel, enum Format format, int num_rows, int64_t depth, const float *x, int64_t x_stride,
                       const char *ahead, int64_t step, vec (*sums)[2]) {
    vec a[MAX_ROWS][2], w[2];
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++) a[r][0] = sums[r][0], a[r][1] = sums[r][1];
    for (int64_t i = 0; i < depth; i++) {
        __builtin_prefetch(ahead + i * step);
        if (format == FLOAT32) __builtin_prefetch(ahead + i * step + PANEL * 2);
        weights_of(panel, i, format, w);
#pragma GCC unroll 12
        for (int r = 0; r < num_rows; r++) {
            float factor = x[r * x_stride + i];
            a[r][0] += w[0] * factor;
            a[r][1] += w[1] * factor;
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++) sums[r][0] = a[r][0], sums[r][1] = a[r][1];
}

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

/* To the nearest bfloat16, of two the even one; what is not a number stays none. */
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

#define CASE(ROWS, FORMAT)                                                              \
    case ROWS:                                                                          \
        panel_rows(block, FORMAT, ROWS, inputs, from, depth, ahead, step, sums + done); \
        break;
#define CASES(FORMAT)                                                                                           \
    switch (rows) {                                                                                             \
        CASE(1, FORMAT) CASE(2, FORMAT) CASE(3, FORMAT) CASE(4, FORMAT) CASE(5, FORMAT) CASE(6, FORMAT)         \
        CASE(7, FORMAT) CASE(8, FORMAT) CASE(9, FORMAT) CASE(10, FORMAT) CASE(11, FORMAT) CASE(MAX_ROWS, FORMAT) \
    }

/* sums [rows][2] = x [rows, inputs] times one panel. More rows than registers hold take turns, DEPTH inputs at a time, while what
 * comes next is fetched little by little. */
INLINE void panel_products(const Matrix *matrix, int64_t index, const float *x, int64_t num_rows, vec (*sums)[2]) {
    int64_t depth = matrix->num_inputs, num_parts = (num_rows + MAX_ROWS - 1) / MAX_ROWS;
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
FOR_EACH_CPU static void product(const Matrix *matrix, enum Store store, const float *x, const Rounded *rounded, float *y,
                                 int64_t y_stride, int64_t num_rows, int64_t first, int64_t last) {
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
                panel_products(matrix, p, x + t * depth, rows, sums);
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

INLINE float *head_block(const Model *model, const Pool *pool, int64_t layer, int64_t block, int64_t head) {
    int64_t at = (layer * pool->num_blocks + block) * model->num_kv_heads + head;
    return pool->blocks + at * 2 * pool->num_slots * model->head_dim;
}

/* Keys and values of the first tokens of one block go to another. */
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

static int64_t count_of(const Batch *batch, enum Part part, int64_t chunk) {
    return part == ALL ? batch->counts[chunk] : batch->logit_counts[chunk];
}

static int64_t start_of(const Batch *batch, enum Part part, int64_t chunk) {
    return batch->starts[chunk] + batch->counts[chunk] - count_of(batch, part, chunk);
}

/* Move the rows that yield logits together. */
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

static const ivec iota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* One head of one row, over the keys and values before it and its own. */
typedef struct {
    const float *query;
    const int64_t *blocks;
    int64_t sight;  /* keys that it sees */
    float max, sum; /* of its scores so far the largest, and the sum of their exponentials */
    float *out;     /* the values weighed by these */
} Reader;

/* Keys that lie together in a block, at most PANEL. */
typedef struct {
    int64_t at, count;
} Piece;

/* How many of a piece's keys a reader sees. */
INLINE int64_t seen_of(const Reader *reader, const Piece *piece) {
    int64_t seen = reader->sight - piece->at;
    return seen < piece->count ? seen : piece->count;
}

/* Scores of one piece's keys, LANES * width of them, for readers of the same block. Each is computed alike alone and in company. */
INLINE void score_keys(const Reader *readers, int num, const float *key, int64_t num_slots, int width, int64_t dim, float scale,
                       float (*scores)[TILE]) {
    vec a[MAX_READERS][2][2];
#pragma GCC unroll 4
    for (int n = 0; n < num; n++) a[n][0][0] = a[n][0][1] = a[n][1][0] = a[n][1][1] = (vec){};
    for (int64_t i = 0; i < dim; i += 2)
#pragma GCC unroll 2
        for (int k = 0; k < 2; k++) {
            vec one = loaded(key + (i + k) * num_slots), two = width > 1 ? loaded(key + (i + k) * num_slots + LANES) : (vec){};
#pragma GCC unroll 4
            for (int n = 0; n < num; n++) {
                float factor = readers[n].query[i + k];
                a[n][k][0] += one * factor;
                if (width > 1) a[n][k][1] += two * factor;
            }
        }
#pragma GCC unroll 4
    for (int n = 0; n < num; n++)
        for (int j = 0; j < width; j++) stored(scores[n] + j * LANES, (a[n][0][j] + a[n][1][j]) * scale);
}

/* From scores to the weights of the values of so many pieces: zero where nothing is seen. What was weighed before fades. */
INLINE void weigh(Reader *reader, const Piece *pieces, int num_pieces, float *scores, int64_t dim) {
    vec best = (vec){} + reader->max, sum = {};
    for (int p = 0; p < num_pieces; p++)
        for (int j = 0; j < 2; j++) {
            ivec seen = iota + j * LANES < (int)seen_of(reader, pieces + p);
            vec score = loaded(scores + p * PANEL + j * LANES);
            score = (vec)(((ivec)score & seen) | ((ivec)((vec){} - INFINITY) & ~seen));
            best = larger(best, score);
        }
    float top = largest(best);
    for (int p = 0; p < num_pieces; p++)
        for (int j = 0; j < 2; j++) {
            ivec seen = iota + j * LANES < (int)seen_of(reader, pieces + p);
            vec weight = (vec)((ivec)exponential(loaded(scores + p * PANEL + j * LANES) - top) & seen);
            stored(scores + p * PANEL + j * LANES, weight);
            sum += weight;
        }
    if (pieces->at) {
        float kept = exponential((vec){} + (reader->max - top))[0];
        for (int64_t i = 0; i < dim; i += LANES) stored(reader->out + i, loaded(reader->out + i) * kept);
        reader->sum *= kept;
    }
    reader->sum += total(sum);
    reader->max = top;
}

/* The first count values of a piece, times the weights, for readers of the same block. */
INLINE void add_values(const Reader *readers, int num, const float *value, int64_t count, int64_t dim, float (*weights)[TILE]) {
    int64_t i = 0;
    for (; i + 4 * LANES <= dim; i += 4 * LANES) {
        vec b[MAX_READERS][4];
#pragma GCC unroll 4
        for (int n = 0; n < num; n++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) b[n][v] = loaded(readers[n].out + i + v * LANES);
        for (int64_t j = 0; j < count; j++) {
            vec of[4];
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) of[v] = loaded(value + j * dim + i + v * LANES);
#pragma GCC unroll 4
            for (int n = 0; n < num; n++)
#pragma GCC unroll 4
                for (int v = 0; v < 4; v++) b[n][v] += of[v] * weights[n][j];
        }
#pragma GCC unroll 4
        for (int n = 0; n < num; n++)
#pragma GCC unroll 4
            for (int v = 0; v < 4; v++) stored(readers[n].out + i + v * LANES, b[n][v]);
    }
    for (; i < dim; i += LANES) {
        vec b[MAX_READERS];
#pragma GCC unroll 4
        for (int n = 0; n < num; n++) b[n] = loaded(readers[n].out + i);
        for (int64_t j = 0; j < count; j++)
#pragma GCC unroll 4
            for (int n = 0; n < num; n++) b[n] += loaded(value + j * dim + i) * weights[n][j];
#pragma GCC unroll 4
        for (int n = 0; n < num; n++) stored(readers[n].out + i, b[n]);
    }
}

#define BY_NUM(WORK)            \
    switch (num) {              \
    case 1: WORK(1); break;     \
    case 2: WORK(2); break;     \
    case 3: WORK(3); break;     \
    default: WORK(MAX_READERS); \
    }
#define SCORE(NUM) score_keys(readers + n, NUM, block + slot, num_slots, 1, dim, scale, scores)
#define SCORE_MORE(NUM) score_keys(readers + n, NUM, block + slot, num_slots, 2, dim, scale, scores)
#define ADD(NUM) add_values(readers + n, NUM, block + (num_slots + slot) * dim, seen, dim, scores)

/* Readers from n on, at most MAX_READERS, that read a piece from the same block, and how many of its keys the last of them sees. */
INLINE int company(const Reader *readers, int n, int num_readers, const Piece *piece, int64_t size, int64_t *seen) {
    int num = 0;
    *seen = 0;
    for (; num < MAX_READERS && n + num < num_readers; num++) {
        const Reader *one = readers + n + num;
        int64_t keys = seen_of(one, piece);
        if (keys <= 0 || one->blocks[piece->at / size] != readers[n].blocks[piece->at / size]) break;
        *seen = keys > *seen ? keys : *seen;
    }
    return num;
}

/* Attention of one key head for a few readers: scores of a tile of keys, weights of their values, the sum of these; and the next
 * tile. Where a tile and its pieces begin depends on the position alone. */
INLINE void attend_tiles(const Model *model, const Pool *pool, int64_t index, int64_t head, Reader *readers, int num_readers,
                         int64_t dim) {
    int64_t size = pool->tokens_per_block, num_slots = pool->num_slots, longest = 0;
    float scale = 1.0f / sqrtf((float)dim), tile[MAX_GROUP][TILE];
    for (int n = 0; n < num_readers; n++) {
        longest = readers[n].sight > longest ? readers[n].sight : longest;
        readers[n].max = -INFINITY, readers[n].sum = 0.0f;
        memset(readers[n].out, 0, sizeof(float) * (size_t)dim);
    }
    for (int64_t at = 0; at < longest;) {
        Piece pieces[TILE / PANEL];
        int num_pieces = 0, num;
        for (; num_pieces < TILE / PANEL && at < longest; at += pieces[num_pieces++].count) {
            int64_t left_in_block = size - at % size;
            pieces[num_pieces] = (Piece){at, left_in_block < PANEL ? left_in_block : PANEL};
        }
#define FOR_EACH_COMPANY                                                                                    \
    for (int p = 0; p < num_pieces; p++)                                                                    \
        for (int64_t n = 0, seen = 0, slot = pieces[p].at % size; n < num_readers; n += num ? num : 1)      \
            if ((num = company(readers, (int)n, num_readers, pieces + p, size, &seen)))
        FOR_EACH_COMPANY {
            const float *block = head_block(model, pool, index, readers[n].blocks[pieces[p].at / size], head);
            float(*scores)[TILE] = (float(*)[TILE])(tile[n] + p * PANEL);
            if (seen > LANES) {
                BY_NUM(SCORE_MORE)
            } else {
                BY_NUM(SCORE)
            }
        }
        for (int n = 0; n < num_readers; n++)
            if (readers[n].sight > pieces->at) weigh(readers + n, pieces, num_pieces, tile[n], dim);
        FOR_EACH_COMPANY {
            const float *block = head_block(model, pool, index, readers[n].blocks[pieces[p].at / size], head);
            float(*scores)[TILE] = (float(*)[TILE])(tile[n] + p * PANEL);
            BY_NUM(ADD)
        }
    }
    for (int n = 0; n < num_readers; n++) {
        float share = 1.0f / readers[n].sum;
        for (int64_t i = 0; i < dim; i++) readers[n].out[i] *= share;
    }
}

FOR_EACH_CPU static void attend_group(const Model *model, const Pool *pool, int64_t index, int64_t head, Reader *readers,
                                      int num_readers) {
    switch (model->head_dim) {
    case 64: attend_tiles(model, pool, index, head, readers, num_readers, 64); break;
    case 128: attend_tiles(model, pool, index, head, readers, num_readers, 128); break;
    default: attend_tiles(model, pool, index, head, readers, num_readers, model->head_dim);
    }
}

/* Attention of key heads first to last. Sequences that share a prefix read it together. */
static void attend(const Model *model, const Pool *pool, const Batch *batch, enum Part part, int64_t index, const float *qkv,
                   float *out, int64_t first, int64_t last) {
    int64_t dim = model->head_dim, queries = model->num_heads, keys = model->num_kv_heads, group = queries / keys;
    int64_t stride = (queries + 2 * keys) * dim;
    for (int64_t h = first; h < last; h++) {
        Reader readers[MAX_GROUP];
        int num = 0;
        for (int64_t c = 0, row = 0; c < batch->num_chunks; c++)
            for (int64_t k = 0; k < count_of(batch, part, c); k++, row++)
                for (int64_t head = h * group; head < (h + 1) * group; head++) {
                    readers[num++] = (Reader){.query = qkv + row * stride + head * dim,
                                              .blocks = batch->blocks + batch->first_blocks[c],
                                              .sight = start_of(batch, part, c) + k + 1,
                                              .out = out + (row * queries + head) * dim};
                    if (num < MAX_GROUP) continue;
                    attend_group(model, pool, index, h, readers, num);
                    num = 0;
                }
        attend_group(model, pool, index, h, readers, num);
    }
}

/* Bytes of one rounded row of any product: at most two a number. */
static int64_t rounded_size(const Model *model) {
    int64_t widest = model->hidden_size, queries = model->num_heads * model->head_dim;
    widest = queries > widest ? queries : widest;
    return 2 * rounded_stride(model->inner_size > widest ? model->inner_size : widest);
}

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
/* Rows that several threads have made are rounded when all are there, and multiplied when all are rounded. */
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
            /* Of rows without logits nothing is wanted any more but the last keys and values. */
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

/* y [rows, outputs] = x [rows, inputs] times one matrix. scratch: rows * (2 + inputs rounded up to LANES / 2) floats, where rows are
 * rounded. */
void decoder_product(const Matrix *matrix, const float *x, float *y, int64_t num_rows, float *scratch) {
    const Rounded rounded = {scratch + 2 * num_rows, scratch, (int32_t *)(scratch + num_rows)};
    round_rows(matrix, x, &rounded, 0, num_rows);
    product(matrix, SET, x, &rounded, y, matrix->num_outputs, num_rows, 0, num_panels(matrix, SET));
}

/* Keys and values of all rows go to the pool, and the logits of the rows that yield some to batch->logits. */
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
                         run.first_blocks, run.blocks, run.ones, run.logits, run.scratch};
    for (int64_t step = 0; step < run.max_steps; step++) {
        int ended = 0;
        decoder_forward(model, pool, &batch, num_threads);
        for (int64_t s = 0; s < count; s++) {
            const float *logits = run.logits + s * vocab_size;
            if (!is_finite(logits, vocab_size)) return -1;
            double uniform = uniform_of(run.seeds[s], run.offsets[s] + step, DRAW);
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
