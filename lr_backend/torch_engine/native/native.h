/* What the files of this folder share. */
#ifndef LOOKAHEAD_NATIVE_H
#define LOOKAHEAD_NATIVE_H

#include <stdint.h>

#define LANES 16
#define PANEL (2 * LANES)
#define MAX_ROWS 12 /* two vectors of sums a row fill the registers of AVX-512 */

/* One token of logits [vocabulary]; temperature 0 is greedy. candidates: room for 8 bytes a token. */
int64_t draw_token(const float *logits, int64_t vocab_size, double temperature, int64_t top_k, double top_p, double uniform,
                   void *candidates);

/* sums [rows, PANEL] += panel [groups, PANEL, 4] times x [rows, groups, 4], rows of x lying stride bytes apart; at most MAX_ROWS. */
void byte_products(const uint8_t *panel, int64_t num_groups, const int8_t *x, int64_t stride, int64_t num_rows,
                   int32_t (*sums)[PANEL]);

/* Whether this processor has instructions for them. */
int bytes_are_fast(void);

#endif
