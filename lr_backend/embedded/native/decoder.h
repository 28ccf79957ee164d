/* What the decoder's files share: a model, its KV pool, and a batch of one pass. */
#ifndef LOOKAHEAD_DECODER_H
#define LOOKAHEAD_DECODER_H

#include "native.h"

enum Format { FLOAT32, BFLOAT16, FLOAT16, INT8, PAIRS };

typedef struct {
    int64_t num_inputs, num_outputs; /* of a gated product: the outputs after gating */
    int64_t format;                  /* of the panels: enum Format */
    const void *panels;              /* FLOAT32: [panels, num_inputs, PANEL]; in 16 bits [panels, num_inputs, LANES, 2], the
                                        first LANES outputs before the others; INT8: [panels, ceil(inputs / 4), PANEL, 4],
                                        128 more each; PAIRS: bfloat16 [panels, ceil(inputs / 2), PANEL, 2] */
    const float *bias;               /* [outputs] or NULL */
    const float *scales;             /* [panels, PANEL]; for INT8 only: what 1 stands for */
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

/* Rows of a batch: all, or only those that yield logits. */
enum Part { ALL, LOGITS };

INLINE float *head_block(const Model *model, const Pool *pool, int64_t layer, int64_t block, int64_t head) {
    int64_t at = (layer * pool->num_blocks + block) * model->num_kv_heads + head;
    return pool->blocks + at * 2 * pool->num_slots * model->head_dim;
}

INLINE int64_t count_of(const Batch *batch, enum Part part, int64_t chunk) {
    return part == ALL ? batch->counts[chunk] : batch->logit_counts[chunk];
}

INLINE int64_t start_of(const Batch *batch, enum Part part, int64_t chunk) {
    return batch->starts[chunk] + batch->counts[chunk] - count_of(batch, part, chunk);
}

/* Attention of key heads first to last, for the rows of that part: out [rows, heads * head_dim] from the pool and from
 * qkv [rows, (heads + 2 kv_heads) * head_dim]. Sequences that share a prefix read it together. */
void attend(const Model *model, const Pool *pool, const Batch *batch, enum Part part, int64_t index, const float *qkv,
            float *out, int64_t first, int64_t last);

/* Compute a batch: keys and values of all rows go to the pool, logits to batch->logits. */
void decoder_forward(const Model *model, const Pool *pool, const Batch *batch, int64_t num_threads);

#endif
