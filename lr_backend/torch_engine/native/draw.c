/* One token a row from its logits: the most likely, or one drawn after temperature, top-k and top-p, as sampler.py says. */
#include "native.h"

#include <math.h>
#include <stdlib.h>

typedef struct {
    float value;
    int32_t token;
} Candidate;

/* The more likely first; of equals the lower token. */
static int by_likelihood(const void *left, const void *right) {
    const Candidate *a = left, *b = right;
    if (a->value != b->value) return a->value > b->value ? -1 : 1;
    return a->token < b->token ? -1 : 1;
}

static int64_t most_likely(const float *logits, int64_t vocab_size) {
    int64_t best = 0;
    for (int64_t v = 1; v < vocab_size; v++)
        if (logits[v] > logits[best]) best = v;
    return best;
}

/* The k most likely, in order: a short sorted list that most tokens do not get into. */
static int64_t most_likely_k(const float *logits, int64_t vocab_size, int64_t k, Candidate *found) {
    int64_t count = 0;
    for (int64_t v = 0; v < vocab_size; v++) {
        if (count == k && !(logits[v] > found[k - 1].value)) continue;
        int64_t at = count < k ? count++ : k - 1;
        for (; at > 0 && found[at - 1].value < logits[v]; at--) found[at] = found[at - 1];
        found[at] = (Candidate){logits[v], (int32_t)v};
    }
    return count;
}

/* All that can be within top-p, in order. What is left out, each less likely than (1 - top_p) / vocabulary, has not 1 - top_p
 * together; it counts in mass, the sum of the exponentials below the best, of which top-p is a part. */
static int64_t likely_enough(const float *logits, int64_t vocab_size, float temperature, float top_p, Candidate *found,
                             double *mass) {
    float best = logits[most_likely(logits, vocab_size)];
    *mass = 0.0;
    for (int64_t v = 0; v < vocab_size; v++) *mass += exp((double)((logits[v] - best) / temperature));
    double least = log(fmax(1.0 - (double)top_p, 1e-12) * *mass / (double)vocab_size) * (double)temperature + (double)best;
    int64_t count = 0;
    for (int64_t v = 0; v < vocab_size; v++)
        if ((double)logits[v] >= least || logits[v] == best) found[count++] = (Candidate){logits[v], (int32_t)v};
    qsort(found, (size_t)count, sizeof *found, by_likelihood);
    return count;
}

static int64_t all_of_them(const float *logits, int64_t vocab_size, Candidate *found) {
    for (int64_t v = 0; v < vocab_size; v++) found[v] = (Candidate){logits[v], (int32_t)v};
    return vocab_size;
}

/* The tokens that may be drawn, how likely each is as a part of *total, in order of likelihood where top-k or top-p cut some off. */
static int64_t distribution(const float *logits, int64_t vocab_size, float temperature, int64_t top_k, float top_p,
                            Candidate *found, double *total) {
    int64_t count, nucleus = top_p < 1.0f;
    double mass = 0.0;
    if (top_k > 0 && top_k < vocab_size) {
        count = most_likely_k(logits, vocab_size, top_k, found);
    } else if (nucleus) {
        count = likely_enough(logits, vocab_size, temperature, top_p, found, &mass);
    } else {
        count = all_of_them(logits, vocab_size, found);
    }
    float best = found[0].value;
    for (int64_t c = 1; c < count; c++) best = found[c].value > best ? found[c].value : best;
    *total = 0.0;
    for (int64_t c = 0; c < count; c++) {
        found[c].value = expf((found[c].value - best) / temperature);
        *total += (double)found[c].value;
    }
    if (nucleus) {
        double reached = 0.0, wanted = (double)top_p * fmax(mass, *total);
        int64_t kept = 0;
        while (kept < count && reached < wanted) reached += (double)found[kept++].value;
        count = kept;
        *total = reached;
    }
    return count;
}

static int64_t drawn(const Candidate *found, int64_t count, double total, double uniform) {
    double point = uniform * total, reached = 0.0;
    int64_t last = found[0].token;
    for (int64_t c = 0; c < count; c++) {
        if (found[c].value == 0.0f) continue; /* impossible, even for a point that rounding put at the very end */
        last = found[c].token;
        reached += (double)found[c].value;
        if (reached > point) break;
    }
    return last;
}

static uint64_t mixed(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

double uniform_of(uint64_t seed, int64_t offset, enum Purpose purpose) {
    const uint64_t golden = 0x9E3779B97F4A7C15u;
    uint64_t state = mixed(mixed(seed + golden) ^ mixed(((uint64_t)offset * 4 + (uint64_t)purpose + 1) * golden));
    return (double)(state >> 11) * 0x1p-53;
}

int64_t draw_token(const float *logits, int64_t vocab_size, double temperature, int64_t top_k, double top_p, double uniform,
                   void *candidates) {
    if (temperature == 0.0) return most_likely(logits, vocab_size);
    double total;
    int64_t count = distribution(logits, vocab_size, (float)temperature, top_k, (float)top_p, candidates, &total);
    return drawn(candidates, count, total, uniform);
}

/* verification.py's verify_greedy and verify_tokens: drafts [num_drafts] accepted from the left, by logits [num_drafts + 1,
 * vocabulary], and in *next_token the one after them. offset: output tokens before the first draft. */
int64_t verify_drafts(const float *logits, int64_t vocab_size, const int64_t *drafts, int64_t num_drafts, double temperature,
                      int64_t top_k, double top_p, uint64_t seed, int64_t offset, void *candidates, int64_t *next_token) {
    for (int64_t k = 0;; k++, logits += vocab_size) {
        if (temperature == 0.0) {
            *next_token = most_likely(logits, vocab_size);
            if (k < num_drafts && *next_token == drafts[k]) continue;
            return k;
        }
        Candidate *found = candidates, *draft = NULL;
        double total;
        int64_t count = distribution(logits, vocab_size, (float)temperature, top_k, (float)top_p, found, &total);
        for (int64_t c = 0; c < count && k < num_drafts; c++)
            if (found[c].token == drafts[k]) draft = found + c;
        if (draft && uniform_of(seed, offset + k, ACCEPT) * total < (double)draft->value) continue;
        /* With the draft taken out; a rejection that only rounding made leaves nothing else, and then it stays. */
        if (draft) {
            double rest = 0.0;
            for (int64_t c = 0; c < count; c++) rest += found + c == draft ? 0.0 : (double)found[c].value;
            if (rest > 0.0) total = rest, draft->value = 0.0f;
        }
        *next_token = drawn(found, count, total, uniform_of(seed, offset + k, DRAW));
        return k;
    }
}

/* tokens [rows] of logits [rows, vocabulary] */
void draw_tokens(const float *logits, int64_t num_rows, int64_t vocab_size, const double *temperatures, const int64_t *top_ks,
                 const double *top_ps, const double *uniforms, void *candidates, int64_t *tokens) {
    for (int64_t r = 0; r < num_rows; r++)
        tokens[r] = draw_token(logits + r * vocab_size, vocab_size, temperatures[r], top_ks[r], top_ps[r], uniforms[r], candidates);
}
