/* Attention over a paged KV pool, 256 keys at a time: first their scores, then the weights, then the weighted values.
 *
 * A row's result is the same to the bit whatever stands beside it and however its prompt was cut.
 */
#include "decoder.h"

#include <math.h>

#include "vectors.h"

#define MAX_READERS 4 /* heads that read keys and values together */
#define MAX_GROUP 16 /* heads that share the memory for the weights of a tile */
#define TILE (8 * PANEL)

static const ivec iota = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* One head of one row; it reads the keys and values before its row, and those of the row. */
typedef struct {
    const float *query;
    const int64_t *blocks;
    int64_t sight;  /* keys that it sees */
    float max, sum; /* the largest score so far, and the sum of the exponentials of all */
    float *out;     /* the weighted sum of the values so far */
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

/* Scores of the keys of one piece, LANES * width of them, for readers of the same block. No score depends on other readers. */
INLINE void score_keys(const Reader *readers, int num, const float *key, int64_t num_slots, int width, int64_t dim, float scale,
                       float (*scores)[TILE], int wide) {
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
                a[n][k][0] += times(one, factor, wide);
                if (width > 1) a[n][k][1] += times(two, factor, wide);
            }
        }
#pragma GCC unroll 4
    for (int n = 0; n < num; n++)
        for (int j = 0; j < width; j++) stored(scores[n] + j * LANES, (a[n][0][j] + a[n][1][j]) * scale);
}

/* Turn the scores of some pieces into weights, 0 for keys that are not seen, and rescale the sum of earlier tiles. */
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
INLINE void add_values(const Reader *readers, int num, const float *value, int64_t count, int64_t dim, float (*weights)[TILE],
                       int wide) {
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
                for (int v = 0; v < 4; v++) b[n][v] += times(of[v], weights[n][j], wide);
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
            for (int n = 0; n < num; n++) b[n] += times(loaded(value + j * dim + i), weights[n][j], wide);
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
#define SCORE(NUM) score_keys(readers + n, NUM, block + slot, num_slots, 1, dim, scale, scores, wide)
#define SCORE_MORE(NUM) score_keys(readers + n, NUM, block + slot, num_slots, 2, dim, scale, scores, wide)
#define ADD(NUM) add_values(readers + n, NUM, block + (num_slots + slot) * dim, shared, dim, scores, wide)

/* Readers from n on, at most MAX_READERS, that read a piece from the same block. seen: of its keys, how many any of them sees;
 * shared: how many all see. */
INLINE int company(const Reader *readers, int n, int num_readers, const Piece *piece, int64_t size, int64_t *seen,
                   int64_t *shared) {
    int num = 0;
    *seen = 0, *shared = piece->count;
    for (; num < MAX_READERS && n + num < num_readers; num++) {
        const Reader *one = readers + n + num;
        int64_t keys = seen_of(one, piece);
        if (keys <= 0 || one->blocks[piece->at / size] != readers[n].blocks[piece->at / size]) break;
        *seen = keys > *seen ? keys : *seen;
        *shared = keys < *shared ? keys : *shared;
    }
    return num;
}

/* Attention of one key head for a few readers, tile after tile: scores, weights, weighted values. Where a tile and its pieces begin
 * depends on the position alone. */
INLINE void attend_tiles(const Model *model, const Pool *pool, int64_t index, int64_t head, Reader *readers, int num_readers,
                         int64_t dim, int wide) {
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
#define FOR_EACH_COMPANY                                                                                           \
    for (int p = 0; p < num_pieces; p++)                                                                           \
        for (int64_t n = 0, seen = 0, shared = 0, slot = pieces[p].at % size; n < num_readers; n += num ? num : 1) \
            if ((num = company(readers, (int)n, num_readers, pieces + p, size, &seen, &shared)))
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
            /* What only some see: times 0, a value that is not finite would not be 0. */
            for (int m = 0; m < num && shared < seen; m++) {
                const float *value = block + (num_slots + slot + shared) * dim;
                int64_t more = seen_of(readers + n + m, pieces + p) - shared;
                if (more > 0) add_values(readers + n + m, 1, value, more, dim, (float (*)[TILE])(scores[m] + shared), wide);
            }
        }
    }
    for (int n = 0; n < num_readers; n++) {
        float share = 1.0f / readers[n].sum;
        for (int64_t i = 0; i < dim; i++) readers[n].out[i] *= share;
    }
}

INLINE void attend_group_of(const Model *model, const Pool *pool, int64_t index, int64_t head, Reader *readers, int num_readers,
                            int wide) {
    switch (model->head_dim) {
    case 64: attend_tiles(model, pool, index, head, readers, num_readers, 64, wide); break;
    case 128: attend_tiles(model, pool, index, head, readers, num_readers, 128, wide); break;
    default: attend_tiles(model, pool, index, head, readers, num_readers, model->head_dim, wide);
    }
}

#define GROUP_ARGUMENTS const Model *model, const Pool *pool, int64_t index, int64_t head, Reader *readers, int num_readers

FOR_WIDE static void wide_group(GROUP_ARGUMENTS) { attend_group_of(model, pool, index, head, readers, num_readers, 1); }

FOR_NARROW static void narrow_group(GROUP_ARGUMENTS) { attend_group_of(model, pool, index, head, readers, num_readers, 0); }

static void attend_group(GROUP_ARGUMENTS) {
    (is_wide() ? wide_group : narrow_group)(model, pool, index, head, readers, num_readers);
}

void attend(const Model *model, const Pool *pool, const Batch *batch, enum Part part, int64_t index, const float *qkv,
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
