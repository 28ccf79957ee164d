/* Products of rounded rows with weights of eight bits.
 *
 * A weight w is kept as w + 128, because processors multiply unsigned bytes by signed ones; the caller starts each sum at -128
 * times the sum of its row. Sums are integers and so exact: every processor gets the same result, in whatever order.
 */
#include "native.h"

#include <string.h>

/* sums [rows, PANEL] += panel [groups, PANEL, 4] times x [rows, groups, 4], rows of x lying stride bytes apart */
typedef void Kernel(const uint8_t *panel, int64_t num_groups, const int8_t *x, int64_t stride, int64_t num_rows,
                    int32_t (*sums)[PANEL]);

static void portable(const uint8_t *panel, int64_t num_groups, const int8_t *x, int64_t stride, int64_t num_rows,
                     int32_t (*sums)[PANEL]) {
    for (int64_t r = 0; r < num_rows; r++)
        for (int64_t g = 0; g < num_groups; g++) {
            const uint8_t *w = panel + g * PANEL * 4;
            const int8_t *four = x + r * stride + g * 4;
            for (int lane = 0; lane < PANEL; lane++)
                sums[r][lane] +=
                    w[4 * lane] * four[0] + w[4 * lane + 1] * four[1] + w[4 * lane + 2] * four[2] + w[4 * lane + 3] * four[3];
        }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define AHEAD 48 /* groups */
#define VNNI __attribute__((target("avx512f,avx512bw,avx512vnni")))

VNNI static inline __attribute__((always_inline)) __m512i four_of(const int8_t *x) {
    int32_t four;
    memcpy(&four, x, sizeof four);
    return _mm512_set1_epi32(four);
}

/* Few rows have two sums each, for even and odd groups: a dot product takes longer than the time until the next one may begin. */
VNNI static inline __attribute__((always_inline)) void vnni_rows(int num_rows, const uint8_t *panel, int64_t num_groups,
                                                                 const int8_t *x, int64_t stride, int32_t (*sums)[PANEL]) {
    const int ways = num_rows <= 5 ? 2 : 1;
    __m512i a[2][MAX_ROWS][2];
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++)
        for (int half = 0; half < 2; half++) {
            a[0][r][half] = _mm512_loadu_si512(sums[r] + half * LANES);
            a[1][r][half] = _mm512_setzero_si512();
        }
    int64_t g = 0;
    for (; g + ways <= num_groups; g += ways) {
#pragma GCC unroll 2
        for (int way = 0; way < ways; way++) {
            const uint8_t *w = panel + (g + way) * PANEL * 4;
            __builtin_prefetch(w + AHEAD * PANEL * 4);
            __builtin_prefetch(w + AHEAD * PANEL * 4 + 64);
            __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 12
            for (int r = 0; r < num_rows; r++) {
                __m512i four = four_of(x + r * stride + (g + way) * 4);
                a[way][r][0] = _mm512_dpbusd_epi32(a[way][r][0], w0, four);
                a[way][r][1] = _mm512_dpbusd_epi32(a[way][r][1], w1, four);
            }
        }
    }
    for (; g < num_groups; g++) {
        const uint8_t *w = panel + g * PANEL * 4;
        __m512i w0 = _mm512_loadu_si512(w), w1 = _mm512_loadu_si512(w + 64);
#pragma GCC unroll 12
        for (int r = 0; r < num_rows; r++) {
            __m512i four = four_of(x + r * stride + g * 4);
            a[0][r][0] = _mm512_dpbusd_epi32(a[0][r][0], w0, four);
            a[0][r][1] = _mm512_dpbusd_epi32(a[0][r][1], w1, four);
        }
    }
#pragma GCC unroll 12
    for (int r = 0; r < num_rows; r++)
        for (int half = 0; half < 2; half++) {
            __m512i sum = ways == 2 ? _mm512_add_epi32(a[0][r][half], a[1][r][half]) : a[0][r][half];
            _mm512_storeu_si512(sums[r] + half * LANES, sum);
        }
}

VNNI static void vnni(const uint8_t *panel, int64_t num_groups, const int8_t *x, int64_t stride, int64_t num_rows,
                      int32_t (*sums)[PANEL]) {
    switch (num_rows) {
#define CASE(N) \
    case N: vnni_rows(N, panel, num_groups, x, stride, sums); break
        CASE(1);
        CASE(2);
        CASE(3);
        CASE(4);
        CASE(5);
        CASE(6);
        CASE(7);
        CASE(8);
        CASE(9);
        CASE(10);
        CASE(11);
    default: vnni_rows(MAX_ROWS, panel, num_groups, x, stride, sums);
    }
}

int bytes_are_fast(void) {
    return __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512bw");
}
#else
static Kernel *const vnni = portable;
int bytes_are_fast(void) { return 0; }
#endif

void byte_products(const uint8_t *panel, int64_t num_groups, const int8_t *x, int64_t stride, int64_t num_rows,
                   int32_t (*sums)[PANEL]) {
    static Kernel *kernel;
    if (!kernel) kernel = bytes_are_fast() ? vnni : portable;
    kernel(panel, num_groups, x, stride, num_rows, sums);
}
