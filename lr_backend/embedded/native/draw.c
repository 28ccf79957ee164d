/* The next token from a row of logits: the most likely, or the highest of logit / temperature + noise among those that top-k and
 * top-p keep. engine/noise.py defines the noise, engine/drawing.py the rest; here logarithms and sums are rounded otherwise. */
#include "native.h"

#include <math.h>
#include <stdlib.h>

typedef struct {
    float value;
    int32_t token;
} Candidate;

/* The best token so far, and its score. */
typedef struct {
    double score;
    int64_t token;
} Drawn;

static uint64_t mixed(uint64_t value) {
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9u;
    value = (value ^ (value >> 27)) * 0x94D049BB133111EBu;
    return value ^ (value >> 31);
}

static uint64_t absorbed(uint64_t state, uint64_t number) { return mixed(state + (number + 1) * 0x9E3779B97F4A7C15u); }

static uint64_t noise_key(uint64_t seed, int64_t position) { return absorbed(absorbed(0, seed), (uint64_t)position); }

/* The uniform number of a hash, times 2^53: an odd number of 53 bits. */
static uint64_t bits_of(uint64_t hash) { return hash >> 12 << 1 | 1; }

static double noise_of(uint64_t bits) { return -log(-log((double)bits * 0x1p-53)); }

#define LOG_2 0.69314718055994531
#define MAX_NOISE (53.0 * LOG_2)

/* An upper bound of the noise: -log(-log u) <= -log(1 - u), and 1 - u is more than 2^-n if one of the hash's first n bits is 0. */
static double noise_bound(uint64_t hash) { return (double)(__builtin_clzll(~hash | 1) + 1) * LOG_2; }

/* The least hash with which, by that bound, a token can have so much noise; UINT64_MAX if none can. */
static uint64_t least_hash(double noise) {
    double num_bits = ceil(noise / LOG_2) - 1.0;
    if (!(num_bits > 0.0)) return 0;
    return num_bits > 52.0 ? UINT64_MAX : -(UINT64_C(1) << (64 - (int)num_bits));
}

/* Take a token if it is better than the best so far; of equals the lower token is drawn. */
static void consider(Drawn *best, double scaled, uint64_t hash, int64_t token) {
    double score = scaled + noise_of(bits_of(hash));
    if (score > best->score || (score == best->score && token < best->token)) *best = (Drawn){score, token};
}

/* For qsort: the more likely token first; of equals the lower one. */
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

#define SHORT_LIST 256

/* The k most likely tokens, in order: a short sorted list, which most tokens do not enter. A long one is sorted at once, as any
 * client may ask for one. found has room for all tokens. */
static int64_t most_likely_k(const float *logits, int64_t vocab_size, int64_t k, Candidate *found) {
    int64_t count = 0;
    if (k > SHORT_LIST) {
        for (int64_t v = 0; v < vocab_size; v++) found[v] = (Candidate){logits[v], (int32_t)v};
        qsort(found, (size_t)vocab_size, sizeof *found, by_likelihood);
        return k;
    }
    for (int64_t v = 0; v < vocab_size; v++) {
        if (count == k && !(logits[v] > found[k - 1].value)) continue;
        int64_t at = count < k ? count++ : k - 1;
        for (; at > 0 && found[at - 1].value < logits[v]; at--) found[at] = found[at - 1];
        found[at] = (Candidate){logits[v], (int32_t)v};
    }
    return count;
}

/* Probability of a token over that of the most likely one. */
static double weight(float logit, float best, double temperature) { return exp(((double)logit - (double)best) / temperature); }

/* All tokens that can be within top-p, in order. Each one that is left out is less likely than (1 - top_p) / vocabulary, so all of
 * these have less than 1 - top_p together. mass is that of all tokens, in units of weight(). */
static int64_t likely_enough(const float *logits, int64_t vocab_size, double temperature, double top_p, Candidate *found,
                             double *mass) {
    float best = logits[most_likely(logits, vocab_size)];
    *mass = 0.0;
    for (int64_t v = 0; v < vocab_size; v++) *mass += weight(logits[v], best, temperature);
    double least = log(fmax(1.0 - top_p, 1e-12) * *mass / (double)vocab_size) * temperature + (double)best;
    int64_t count = 0;
    for (int64_t v = 0; v < vocab_size; v++)
        if ((double)logits[v] >= least || logits[v] == best) found[count++] = (Candidate){logits[v], (int32_t)v};
    qsort(found, (size_t)count, sizeof *found, by_likelihood);
    return count;
}

/* The tokens that top-k and top-p keep. */
static int64_t kept(const float *logits, int64_t vocab_size, double temperature, int64_t top_k, double top_p, Candidate *found) {
    int64_t count, num_kept = 0;
    double mass = 0.0, reached = 0.0;
    if (top_k > 0 && top_k < vocab_size) {
        count = most_likely_k(logits, vocab_size, top_k, found);
        if (top_p >= 1.0) return count;
        for (int64_t c = 0; c < count; c++) mass += weight(found[c].value, found[0].value, temperature);
    } else {
        count = likely_enough(logits, vocab_size, temperature, top_p, found, &mass);
    }
    do reached += weight(found[num_kept++].value, found[0].value, temperature);
    while (num_kept < count && reached < top_p * mass);
    return num_kept;
}

#define BLOCK 256

/* The highest of up to BLOCK logits. */
FOR_EACH_CPU static float highest(const float *logits, int64_t count) {
    float tops[LANES], top = logits[0];
    if (count < LANES) {
        for (int64_t v = 1; v < count; v++) top = logits[v] > top ? logits[v] : top;
        return top;
    }
    for (int64_t l = 0; l < LANES; l++) tops[l] = logits[l];
    for (int64_t v = LANES; v + LANES <= count; v += LANES)
        for (int64_t l = 0; l < LANES; l++) tops[l] = logits[v + l] > tops[l] ? logits[v + l] : tops[l];
    for (int64_t l = 0; l < LANES; l++) tops[l] = logits[count - LANES + l] > tops[l] ? logits[count - LANES + l] : tops[l];
    for (int64_t l = 0; l < LANES; l++) top = tops[l] > top ? tops[l] : top;
    return top;
}

/* The hashes of count tokens from first on; returns whether one of them is at least least. */
FOR_EACH_CPU static int hash_block(uint64_t key, int64_t first, int64_t count, uint64_t least, uint64_t *hashes) {
    uint64_t any = 0;
    for (int64_t v = 0; v < count; v++) {
        hashes[v] = absorbed(key, (uint64_t)(first + v));
        any |= hashes[v] >= least;
    }
    return any != 0;
}

/* The token drawn from all tokens. The highest logit of a block says how much noise a token of it needs to win, and hardly any hash
 * gives so much. tops: room for one float a block. */
static int64_t drawn_of_all(const float *logits, int64_t vocab_size, double temperature, uint64_t key, float *tops) {
    int64_t num_blocks = (vocab_size + BLOCK - 1) / BLOCK;
    uint64_t hashes[BLOCK];
    double inverse = 1.0 / temperature;
    for (int64_t b = 0; b < num_blocks; b++)
        tops[b] = highest(logits + b * BLOCK, b + 1 < num_blocks ? BLOCK : vocab_size - b * BLOCK);
    int64_t first = most_likely(tops, num_blocks) * BLOCK;
    first += most_likely(logits + first, first + BLOCK < vocab_size ? BLOCK : vocab_size - first);
    Drawn best = {-INFINITY, first};
    consider(&best, (double)logits[first] / temperature, absorbed(key, (uint64_t)first), first);
    for (int64_t b = 0; b < num_blocks; b++) {
        int64_t start = b * BLOCK, count = b + 1 < num_blocks ? BLOCK : vocab_size - start;
        /* A bit less than is needed, because quotients, logarithms and sums round. */
        double wanted = best.score - 1e-9 * (1.0 + fabs(best.score));
        uint64_t least = least_hash(wanted - (double)tops[b] * inverse);
        if (least == UINT64_MAX || !hash_block(key, start, count, least, hashes)) continue;
        for (int64_t v = 0; v < count; v++)
            if (hashes[v] >= least && wanted - (double)logits[start + v] * inverse <= noise_bound(hashes[v]))
                consider(&best, (double)logits[start + v] / temperature, hashes[v], start + v);
    }
    return best.token;
}

int64_t draw_token(const float *logits, int64_t vocab_size, const Sampling *sampling, int64_t position, void *candidates) {
    /* In float32, as the contract's tensors have it. What float32 cannot tell from 0 is greedy. */
    double temperature = (double)(float)sampling->temperature, top_p = (double)(float)sampling->top_p;
    if (temperature == 0.0) return most_likely(logits, vocab_size);
    uint64_t key = noise_key(sampling->seed, position);
    if (top_p >= 1.0 && (sampling->top_k <= 0 || sampling->top_k >= vocab_size))
        return drawn_of_all(logits, vocab_size, temperature, key, candidates);
    const Candidate *found = candidates;
    int64_t count = kept(logits, vocab_size, temperature, sampling->top_k, top_p, candidates);
    Drawn best = {-INFINITY, found[0].token};
    for (int64_t c = 0; c < count; c++)
        consider(&best, (double)found[c].value / temperature, absorbed(key, (uint64_t)found[c].token), found[c].token);
    return best.token;
}

double draw_chance(const float *logits, int64_t vocab_size, const Sampling *sampling, int64_t position, int64_t token) {
    double temperature = (double)(float)sampling->temperature, total = 0.0;
    uint64_t key = noise_key(sampling->seed, position), own_hash = absorbed(key, (uint64_t)token);
    double own = (double)logits[token] + (temperature > 0.0 ? temperature * noise_of(bits_of(own_hash)) : 0.0);
    /* All tokens that are left out have together less than a hundredth of the token's own part. */
    double least = log(0.01 / (double)vocab_size);
    for (int64_t v = 0; v < vocab_size; v++) {
        double behind = (double)logits[v] - own;
        if (behind + temperature * MAX_NOISE < least) continue;
        uint64_t hash = temperature > 0.0 ? absorbed(key, (uint64_t)v) : 0;
        if (behind + temperature * noise_bound(hash) < least) continue;
        total += exp(temperature > 0.0 ? behind + temperature * noise_of(bits_of(hash)) : behind);
    }
    return fmin(1.0, 1.0 / total);
}

/* The tokens of each draw from rows of logits that begin stride numbers apart: draft tokens stand as long as each is what is
 * drawn in its place. */
void draw_tokens(const float *logits, int64_t stride, int64_t vocab_size, Draw *draws, int64_t num_draws, void *candidates) {
    for (Draw *one = draws; one < draws + num_draws; one++) {
        const float *row = logits + one->row * stride;
        for (one->num_accepted = 0;; one->num_accepted++, row += stride) {
            one->next_token = draw_token(row, vocab_size, &one->sampling, one->position + one->num_accepted, candidates);
            if (one->num_accepted == one->num_drafts || one->next_token != one->drafts[one->num_accepted]) break;
        }
    }
}

/* The noise of some tokens at one position, and the bits that it is made of. */
void noise_at(uint64_t seed, int64_t position, const int64_t *tokens, int64_t count, uint64_t *bits, double *noise) {
    uint64_t key = noise_key(seed, position);
    for (int64_t t = 0; t < count; t++) bits[t] = bits_of(absorbed(key, (uint64_t)tokens[t])), noise[t] = noise_of(bits[t]);
}
