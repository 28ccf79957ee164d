/* Vectors of LANES numbers, for all files that compute with them. */
#ifndef LOOKAHEAD_VECTORS_H
#define LOOKAHEAD_VECTORS_H

#include <string.h>

#include "native.h"

INLINE vec loaded(const float *from) {
    vec value;
    memcpy(&value, from, sizeof value);
    return value;
}

INLINE void stored(float *to, vec value) { memcpy(to, &value, sizeof value); }

/* v times a number. Where a register holds half a vector, the number is spread over one: over a whole one the compiler would spread
 * it through memory. */
INLINE vec times(vec v, float number, int wide) {
    if (wide) return v * number;
    half_vec half = number - (half_vec){};
    vec whole;
    memcpy(&whole, &half, sizeof half), memcpy((char *)&whole + sizeof half, &half, sizeof half);
    return v * whole;
}

#define FOLD(v, mask) ((v) + __builtin_shuffle((v), mask))

INLINE float total(vec v) {
    v = FOLD(v, ((ivec){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = FOLD(v, ((ivec){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = FOLD(v, ((ivec){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    v = FOLD(v, ((ivec){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return v[0];
}

/* The larger of each pair of numbers; b where they do not compare. */
INLINE vec larger(vec a, vec b) {
    ivec first = a > b;
    return (vec)(((ivec)a & first) | ((ivec)b & ~first));
}

INLINE float largest(vec v) {
    v = larger(v, __builtin_shuffle(v, (ivec){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7}));
    v = larger(v, __builtin_shuffle(v, (ivec){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11}));
    v = larger(v, __builtin_shuffle(v, (ivec){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13}));
    v = larger(v, __builtin_shuffle(v, (ivec){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14}));
    return v[0];
}

/* e^x to 2 units in the last place; x is at most some 80; NaN stays NaN */
INLINE vec exponential(vec x) {
    const vec magic = (vec){} + 12582912.0f;
    x = larger((vec){} - 87.0f, x);
    vec turns = (x * 1.44269504f + magic) - magic;
    vec r = x - turns * 0.693359375f;
    r = r + turns * 2.12194440e-4f;
    vec p = (vec){} + 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    ivec power = (__builtin_convertvector(turns, ivec) + 127) << 23;
    vec scale;
    memcpy(&scale, &power, sizeof scale);
    return p * scale;
}

#endif
