/* Blocks of 256 numbers in 8 bits or 4, each with a scale: `model/blockwise.py` says what for, and
 * has the arithmetic in torch's operations, whose bits these are.
 *
 *     message   |numbers of all blocks ………………|scales|       in 4 bits the first of two is the lower
 *
 * A block stays in the first cache while its largest number is looked for and it is rounded, so
 * memory is read once and written once. The loops are plain; the compiler makes vectors of them.
 */
#ifndef HOWDAH_BLOCKS_H
#define HOWDAH_BLOCKS_H

#include "engine_reduce.h" /* CLONES, and bf16 */

enum { WIDTH = 256, ZERO = 8 }; /* numbers of a block; what stands for 0 in 4 bits */

#define SMALLEST 0x1p-126f     /* what is divided by in a block of zeros */
#define INTEGERS 0x1.8p23f     /* added to a small float, rounds it to an integer, ties to even */
#define SIZE 0x7fffffffu       /* the bits of a float without its sign */
#define INFINITE 0x7f800000u
#define ALL(j) _Pragma("GCC ivdep") for (int j = 0; j < WIDTH; j++)

static inline void widen(const void *from, int half, float *to) {
    const uint16_t *narrow = from;
    if (half) ALL(j) to[j] = widen_bfloat16(narrow[j]);
    else memcpy(to, from, WIDTH * sizeof *to);
}

static inline void narrow(const float *from, int half, void *to) {
    uint16_t *narrowed = to;
    if (half) ALL(j) narrowed[j] = narrow_bfloat16(from[j]);
    else memcpy(to, from, WIDTH * sizeof *from);
}

/* Rounds numbers of float, or of bf16 if `half`, to a message. */
CLONES void howdah_blocks_quantise(const void *from, uint64_t blocks, int bits, int half,
                                   uint8_t *message) {
    const int top = bits == 4 ? 7 : 127;
    uint8_t *scales = message + blocks * WIDTH * (size_t)bits / 8;
    for (uint64_t block = 0; block < blocks; block++) {
        float x[WIDTH];
        int8_t number[WIDTH];
        uint32_t most = 0; /* floats above 0 have the order of their bits; a NaN is above all */
        widen((const char *)from + block * WIDTH * (half ? 2 : 4), half, x);
        ALL(j) most = (bits_of(x[j]) & SIZE) > most ? bits_of(x[j]) & SIZE : most;
        float scale = float_of(most) / (float)top, by = scale < SMALLEST ? SMALLEST : scale;
        ALL(j) x[j] = x[j] / by + INTEGERS;
        ALL(j) { /* a NaN, whose scale is not finite, either, is 0 */
            uint32_t bits = bits_of(x[j]);
            int32_t found = (bits & SIZE) > INFINITE ? 0 : (int32_t)(bits - bits_of(INTEGERS));
            found = found > top ? top : found;
            number[j] = (int8_t)(found < -top ? -top : found);
        }
        memcpy(scales + block * sizeof scale, &scale, sizeof scale);
        if (bits == 4) {
            uint8_t *to = message + block * (WIDTH / 2);
            _Pragma("GCC ivdep") for (int j = 0; j < WIDTH / 2; j++) to[j] =
                (uint8_t)((number[2 * j] + ZERO) | (number[2 * j + 1] + ZERO) << 4);
        } else memcpy(message + block * WIDTH, number, WIDTH);
    }
}

/* Writes what a message stands for, or adds it to what is there. */
CLONES void howdah_blocks_restore(const uint8_t *message, uint64_t blocks, int bits, int half,
                                  int add, void *to) {
    const uint8_t *scales = message + blocks * WIDTH * (size_t)bits / 8;
    for (uint64_t block = 0; block < blocks; block++) {
        float x[WIDTH], sum[WIDTH], scale;
        int8_t number[WIDTH];
        char *place = (char *)to + block * WIDTH * (half ? 2 : 4);
        memcpy(&scale, scales + block * sizeof scale, sizeof scale);
        if (bits == 4) {
            const uint8_t *pair = message + block * (WIDTH / 2);
            _Pragma("GCC ivdep") for (int j = 0; j < WIDTH / 2; j++) {
                number[2 * j] = (int8_t)((pair[j] & 15) - ZERO);
                number[2 * j + 1] = (int8_t)((pair[j] >> 4) - ZERO);
            }
        } else memcpy(number, message + block * WIDTH, WIDTH);
        ALL(j) x[j] = (float)number[j] * scale;
        if (add) {
            widen(place, half, sum);
            if (half) ALL(j) x[j] = widen_bfloat16(narrow_bfloat16(x[j])); /* as it would be kept */
            ALL(j) x[j] += sum[j];
        }
        narrow(x, half, place);
    }
}

#endif
