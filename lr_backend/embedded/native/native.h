/* What the files of this folder share. */
#ifndef LOOKAHEAD_NATIVE_H
#define LOOKAHEAD_NATIVE_H

#include <stdint.h>

#define LANES 16
#define PANEL (2 * LANES)
#define MAX_ROWS 12 /* two vectors of sums a row fill the registers of AVX-512 */

typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ivec __attribute__((vector_size(4 * LANES)));
typedef uint32_t uvec __attribute__((vector_size(4 * LANES)));

/* Half as many lanes: what a processor without AVX-512 holds in a register. */
typedef float half_vec __attribute__((vector_size(2 * LANES)));
typedef int32_t half_ivec __attribute__((vector_size(2 * LANES)));
typedef uint32_t half_uvec __attribute__((vector_size(2 * LANES)));

#define INLINE static inline __attribute__((always_inline))

/* One function for each level of instructions; the loader picks the machine's.
 *
 * The inner loops are written for whole vectors and for halves: a loop over vectors that no register holds is compiled to one over
 * memory, nine times slower. is_wide() says which of the two to call. GCC before 12 has no names for levels: a clone there is for
 * one set of instructions. The inner loops take that with fused products, so that their results are those of newer compilers. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && __GNUC__ >= 12
#define FOR_EACH_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#define FOR_WIDE __attribute__((target("arch=x86-64-v4")))
#define FOR_NARROW __attribute__((target_clones("arch=x86-64-v3", "default")))
INLINE int is_wide(void) { return __builtin_cpu_supports("x86-64-v4") != 0; }
#elif defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#define FOR_WIDE __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define FOR_NARROW __attribute__((target_clones("fma", "default")))
INLINE int is_wide(void) {
    return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#else
#define FOR_EACH_CPU
#define FOR_WIDE
#define FOR_NARROW
INLINE int is_wide(void) { return LANES * sizeof(float) <= __BIGGEST_ALIGNMENT__; }
#endif

/* How a sequence draws; temperature 0 is greedy. */
typedef struct {
    double temperature, top_p;
    int64_t top_k;
    uint64_t seed;
} Sampling;

/* What one sequence draws from rows of logits that lie one after another. */
typedef struct {
    Sampling sampling;
    int64_t row;           /* the first */
    int64_t position;      /* of the token drawn from it in its sequence */
    int64_t num_drafts;    /* draft tokens; each has a row, and one more row follows */
    const int64_t *drafts;
    int64_t num_accepted;  /* result: how many draft tokens stand */
    int64_t next_token;    /* result: the token after them */
} Draw;

/* The token at a position of a sequence, from its logits [vocabulary]. candidates: room for 8 bytes a token. */
int64_t draw_token(const float *logits, int64_t vocab_size, const Sampling *sampling, int64_t position, void *candidates);

/* How sure the draw of a token is: its probability at temperature 1 if the noise, times the temperature, were part of the logits.
 * For greedy draws that is the model's own probability. */
double draw_chance(const float *logits, int64_t vocab_size, const Sampling *sampling, int64_t position, int64_t token);

/* sums [rows, PANEL] += panel [groups, PANEL, 4] times x [rows, groups, 4]. Rows of x, at most MAX_ROWS, lie stride bytes apart. */
void byte_products(const uint8_t *panel, int64_t num_groups, const int8_t *x, int64_t stride, int64_t num_rows,
                   int32_t (*sums)[PANEL]);

/* Whether this processor has instructions for them. */
int bytes_are_fast(void);

/* sums [rows, PANEL] = panel [pairs, PANEL, 2] times x [rows, pairs, 2], both in bfloat16, rows of x lying stride numbers apart; at
 * most MAX_ROWS. */
void pair_products(const uint16_t *panel, int64_t num_pairs, const uint16_t *x, int64_t stride, int64_t num_rows,
                   float (*sums)[PANEL]);

/* The same without special instructions. */
void portable_pair_products(const uint16_t *panel, int64_t num_pairs, const uint16_t *x, int64_t stride, int64_t num_rows,
                            float (*sums)[PANEL]);

/* Whether this processor has instructions for them. */
int pairs_are_fast(void);

#endif
