/* Sequences that decode on their own until something happens: a token a pass, or several behind those of a draft model.
 *
 * A pass computes a sequence's last token and the drafts after it, and draws a token from the logits of each row in turn, as if
 * it stood alone: with the noise of its own position. The drafts stand as long as they are what is drawn. So a run with drafts
 * draws the same tokens as one without, greedy or not, and needs fewer passes. The draft model draws with the target's noise.
 */
#include "decoder.h"

#include <math.h>
#include <string.h>

/* A sequence that decodes. */
typedef struct {
    int64_t *tokens;      /* some of it, the last one to be computed next, and room for what is drawn */
    int64_t count;        /* how many tokens there are; what is drawn is added */
    int64_t seen;         /* how many of them have keys and values in the draft model's pool */
    int64_t start;        /* position of the first of them */
    int64_t room;         /* how many may be drawn; at least one */
    int64_t max_drafts;   /* how many may be drafted in a pass */
    int64_t first_block;  /* where its blocks begin in blocks */
    Sampling sampling;
    const uint8_t *ends;  /* one byte a token, not 0 where it may end a run; or NULL */
    double *log_probs;    /* as tokens, of the model itself; or NULL */
    int64_t num_proposed; /* drafts */
    int64_t num_accepted; /* tokens that passes brought beyond one each */
    int64_t is_broken;    /* not 0: its logits are not finite, and what was drawn from them is worth nothing */
} Sequence;

typedef struct {
    int64_t num_sequences, max_passes;
    int64_t num_ids;        /* token ids that there are; logits are at least as wide, and what is beyond is not looked at */
    const Model *draft;     /* NULL: nobody drafts */
    const Pool *draft_pool; /* the draft's keys and values, in blocks of the same numbers */
    double min_chance;      /* drafting ends where all drafts of a pass together are less likely than this to stand */
    Sequence *sequences;
    const int64_t *blocks;  /* as in Batch */
    int64_t *work;          /* integers: 6 + max_drafts of the most a sequence, and one for each place of all their tokens */
    float *logits;          /* of 1 + max_drafts rows a sequence */
    float *scratch;         /* as in Batch, of the larger batch */
    void *candidates;
    const volatile int32_t *interrupt; /* not 0: somebody waits */
} Run;

/* A batch under construction, in the memory Run.work. members: the sequence of each chunk. */
typedef struct {
    int64_t num_chunks, num_rows, num_logits;
    int64_t *tokens, *starts, *counts, *first_blocks, *logit_counts, *members;
} Rows;

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

/* Add a chunk: count tokens of sequence s from place on, the last num_logits of which yield logits. */
static void add_chunk(Rows *rows, const Run *run, int64_t s, const int64_t *tokens, int64_t place, int64_t count, int64_t num_logits) {
    int64_t c = rows->num_chunks++;
    memcpy(rows->tokens + rows->num_rows, tokens, sizeof(int64_t) * (size_t)count);
    rows->starts[c] = run->sequences[s].start + place, rows->first_blocks[c] = run->sequences[s].first_block;
    rows->counts[c] = count, rows->logit_counts[c] = num_logits, rows->members[c] = s;
    rows->num_rows += count, rows->num_logits += num_logits;
}

static void compute(const Model *model, const Pool *pool, const Run *run, const Rows *rows, int64_t num_threads) {
    const Batch batch = {rows->num_chunks,   rows->num_rows, rows->num_logits,   rows->tokens, rows->starts, rows->counts,
                         rows->first_blocks, run->blocks,    rows->logit_counts, run->logits,  run->scratch};
    decoder_forward(model, pool, &batch, num_threads);
}

/* Start with an empty batch. */
static void begin(Rows *rows) { rows->num_chunks = rows->num_rows = rows->num_logits = 0; }

/* Draft tokens for one pass: those of sequence s begin at drafts + s * width, and there are num_drafted[s]. */
static void draft_ahead(const Run *run, Rows *rows, int64_t width, int64_t *drafts, int64_t *num_drafted, double *chances,
                        int64_t num_threads) {
    int64_t stride = run->draft->head.num_outputs, num_ids = run->num_ids;
    begin(rows);
    for (int64_t s = 0; s < run->num_sequences; s++) {
        Sequence *one = run->sequences + s;
        chances[s] = 1.0;
        if (one->max_drafts < 1 || one->room < 2) continue;
        add_chunk(rows, run, s, one->tokens + one->seen, one->seen, one->count - one->seen, 1);
        one->seen = one->count;
    }
    for (int64_t at = 0; rows->num_chunks; at++) {
        compute(run->draft, run->draft_pool, run, rows, num_threads);
        int64_t num_chunks = rows->num_chunks;
        begin(rows);
        for (int64_t c = 0; c < num_chunks; c++) {
            int64_t s = rows->members[c];
            Sequence *one = run->sequences + s;
            const float *logits = run->logits + c * stride;
            /* A draft model whose logits are not finite drafts nothing. */
            if (!is_finite(logits, num_ids)) continue;
            int64_t position = one->start + one->count + at;
            int64_t token = draw_token(logits, num_ids, &one->sampling, position, run->candidates);
            if (run->min_chance > 0.0) chances[s] *= draw_chance(logits, num_ids, &one->sampling, position, token);
            if (chances[s] < run->min_chance) continue;
            drafts[s * width + at] = token;
            num_drafted[s] = at + 1;
            if (at + 1 == one->max_drafts || at + 2 == one->room) continue;
            add_chunk(rows, run, s, drafts + s * width + at, one->count + at, 1, 1);
            one->seen++;
        }
    }
}

/* Draw the tokens of one sequence from the logits of its last token and of its drafts, rows that begin stride numbers apart, as
 * long as the drafts are what is drawn. Returns whether the run may have to end, as it has to for logits that are not finite. */
static int draw(const Run *run, Sequence *one, const float *logits, int64_t stride, const int64_t *drafts, int64_t num_drafts) {
    int64_t known = one->count, num_ids = run->num_ids;
    for (int64_t i = 0; i <= num_drafts; i++, logits += stride) {
        if (!is_finite(logits, num_ids)) return one->is_broken = 1;
        int64_t token = draw_token(logits, num_ids, &one->sampling, one->start + one->count, run->candidates);
        int stands = i < num_drafts && token == drafts[i];
        one->tokens[one->count] = token;
        if (one->log_probs) one->log_probs[one->count] = (double)logits[token] - log_total(logits, num_ids);
        one->count++, one->room--;
        one->num_accepted += i > 0;
        if (one->seen > known + i + stands) one->seen = known + i + stands;
        if (one->ends && one->ends[token]) return 1;
        if (!stands) break;
    }
    /* With less room than a pass can fill, end the run: the scheduler may have more blocks. */
    return one->room <= one->max_drafts;
}

/* Decode until a sequence draws a token that may end it, until one has too little room or is broken, until somebody waits, or for
 * max_passes. Returns the number of passes. */
int64_t decoder_run(const Model *model, const Pool *pool, const Run *run, int64_t num_threads) {
    int64_t count = run->num_sequences, stride = model->head.num_outputs, width = 0;
    for (int64_t s = 0; s < count; s++) width = run->sequences[s].max_drafts > width ? run->sequences[s].max_drafts : width;
    int64_t *num_drafted = run->work, *drafts = num_drafted + count, *lists = drafts + count * width;
    Rows rows = {.starts = lists, .counts = lists + count, .first_blocks = lists + 2 * count, .logit_counts = lists + 3 * count,
                 .members = lists + 4 * count, .tokens = lists + 5 * count};
    double chances[count];
    for (int64_t pass = 1, ended = 0;; pass++) {
        memset(num_drafted, 0, sizeof(int64_t) * (size_t)count);
        if (run->draft) draft_ahead(run, &rows, width, drafts, num_drafted, chances, num_threads);
        begin(&rows);
        for (int64_t s = 0; s < count; s++) {
            Sequence *one = run->sequences + s;
            int64_t last = one->count - 1;
            memcpy(one->tokens + one->count, drafts + s * width, sizeof(int64_t) * (size_t)num_drafted[s]);
            add_chunk(&rows, run, s, one->tokens + last, last, 1 + num_drafted[s], 1 + num_drafted[s]);
            one->num_proposed += num_drafted[s];
        }
        compute(model, pool, run, &rows, num_threads);
        const float *logits = run->logits;
        for (int64_t s = 0; s < count; s++) {
            ended |= draw(run, run->sequences + s, logits, stride, drafts + s * width, num_drafted[s]);
            logits += (1 + num_drafted[s]) * stride;
        }
        if (ended || pass == run->max_passes || *run->interrupt) return pass;
    }
}
