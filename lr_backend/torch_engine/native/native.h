/* What the files of this folder share. */
#ifndef LOOKAHEAD_NATIVE_H
#define LOOKAHEAD_NATIVE_H

#include <stdint.h>

/* One token of logits [vocabulary]; temperature 0 is greedy. candidates: room for 8 bytes a token. */
int64_t draw_token(const float *logits, int64_t vocab_size, double temperature, int64_t top_k, double top_p, double uniform,
                   void *candidates);

#endif
