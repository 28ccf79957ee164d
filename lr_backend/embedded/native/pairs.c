/* Products of rows in bfloat16 with weights in bfloat16, summed in float32.
 *
 * Two inputs share 32 bits. A product of two such numbers is exact in float32, so only the order of the sums counts: the
 * odd input first, then the even one, as AVX-512's own instruction does it. The portable code keeps that order, so every processor
 * gets the same result, except for numbers below 2^-126, which the instruction takes for zero.
 */
#include "native.h"

#include <string.h>

#define BLOCK 128 /* pairs whose rows the portable code widens at a time */
#define AHEAD 96 /* pairs: weights come from a far cache, and its own prefetcher starts anew with every page */

/* sums [rows][2] += panel [pairs, PANEL, 2] times even and odd inputs [rows, BLOCK] */
INLINE void portable_rows(int num_rows, const uint16_t *panel, int64_t num_pairs, const float (*even)[BLOCK],
                          const float (*odd)[BLOCK], float (*sums)[PANEL]) {
    vec a[MAX_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++) memcpy(a[r], sums[r], sizeof a[r]);
    for (int64_t g = 0; g < num_pairs; g++) {
        uvec bits[2], one[2], two[2];
        vec first[2], second[2];
        memcpy(bits, panel + g * 2 * PANEL, sizeof bits);
        __builtin_prefetch(panel + (g + AHEAD) * 2 * PANEL);
        __builtin_prefetch(panel + (g + AHEAD) * 2 * PANEL + PANEL);
        for (int half = 0; half < 2; half++) one[half] = bits[half] & 0xffff0000u, two[half] = bits[half] << 16;
        memcpy(first, one, sizeof first), memcpy(second, two, sizeof second);
#pragma GCC unroll 12
        for (int r = 0; r < num_rows; r++) {
            a[r][0] += first[0] * odd[r][g], a[r][1] += first[1] * odd[r][g];
            a[r][0] += second[0] * even[r][g], a[r][1] += second[1] * even[r][g];
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++) memcpy(sums[r], a[r], sizeof a[r]);
}

#define CASES                                                                                   \
    CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9) CASE(10) CASE(11) CASE(MAX_ROWS)

FOR_EACH_CPU void portable_pair_products(const uint16_t *panel, int64_t num_pairs, const uint16_t *x, int64_t stride,
                                         int64_t num_rows, float (*sums)[PANEL]) {
    float even[MAX_ROWS][BLOCK], odd[MAX_ROWS][BLOCK];
    memset(sums, 0, sizeof *sums * (size_t)num_rows);
    for (int64_t first = 0; first < num_pairs; first += BLOCK) {
        int64_t count = num_pairs - first < BLOCK ? num_pairs - first : BLOCK;
        for (int64_t r = 0; r < num_rows; r++)
            for (int64_t g = 0; g < count; g++) {
                uint32_t pair, high;
                memcpy(&pair, x + r * stride + (first + g) * 2, sizeof pair);
                high = pair & 0xffff0000u, pair <<= 16;
                memcpy(&even[r][g], &pair, sizeof pair), memcpy(&odd[r][g], &high, sizeof high);
            }
        switch (num_rows) {
#define CASE(N) \
    case N: portable_rows(N, panel + first * 2 * PANEL, count, even, odd, sums); break;
            CASES
#undef CASE
        }
    }
}

#if defined(__x86_64__) && defined(__GNUC__) && __GNUC__ >= 11
#include <immintrin.h>

#define BF16 __attribute__((target("avx512f,avx512bw,avx512bf16")))

BF16 static inline __attribute__((always_inline)) void dot_rows(int num_rows, const uint16_t *panel, int64_t num_pairs,
                                                                const uint16_t *x, int64_t stride, float (*sums)[PANEL]) {
    __m512 a[MAX_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++) a[r][0] = a[r][1] = _mm512_setzero_ps();
    for (int64_t g = 0; g < num_pairs; g++) {
        const uint16_t *w = panel + g * 2 * PANEL;
        __builtin_prefetch(w + AHEAD * 2 * PANEL);
        __builtin_prefetch(w + AHEAD * 2 * PANEL + PANEL);
        __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + PANEL);
#pragma GCC unroll 12
        for (int r = 0; r < num_rows; r++) {
            int32_t pair;
            memcpy(&pair, x + r * stride + g * 2, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            a[r][0] = _mm512_dpbf16_ps(a[r][0], w0, both);
            a[r][1] = _mm512_dpbf16_ps(a[r][1], w1, both);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++)
        _mm512_storeu_ps(sums[r], a[r][0]), _mm512_storeu_ps(sums[r] + LANES, a[r][1]);
}

BF16 static void dots(const uint16_t *panel, int64_t num_pairs, const uint16_t *x, int64_t stride, int64_t num_rows,
                      float (*sums)[PANEL]) {
    switch (num_rows) {
#define CASE(N) \
    case N: dot_rows(N, panel, num_pairs, x, stride, sums); break;
        CASES
#undef CASE
    }
}

int pairs_are_fast(void) { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw"); }
#else
#define dots portable_pair_products
int pairs_are_fast(void) { return 0; }
#endif

void pair_products(const uint16_t *panel, int64_t num_pairs, const uint16_t *x, int64_t stride, int64_t num_rows,
                   float (*sums)[PANEL]) {
    if (pairs_are_fast())
        dots(panel, num_pairs, x, stride, num_rows, sums);
    else
        portable_pair_products(panel, num_pairs, x, stride, num_rows, sums);
}
