/* CRC-32, that of zlib, at the speed at which memory is read.
 *
 * A message is a polynomial over bits, its first bit the highest power; its CRC is the remainder
 * after division by P of degree 32, which costs a table look-up for each byte. But 128 bits that
 * stand D bits before others may be replaced by their product with x^D mod P, added (xor) to those:
 * that has the same remainder. So a message is folded, four times 128 bits at once, with two
 * carry-less multiplications for each, until 128 bits are left (Gopal et al. 2009, Fast CRC
 * Computation for Generic Polynomials Using PCLMULQDQ Instruction). Those, and what does not fill
 * 64 bytes, are divided byte by byte. Processors with wide registers fold four times 512 bits at
 * once before.
 *
 * Bits are reflected: the lowest bit of a word has the highest power. A product of two reflected
 * words is one bit short, which the factors make up for.
 */
#ifndef HOWDAH_CRC_H
#define HOWDAH_CRC_H

#include <stddef.h>
#include <stdint.h>

/* Whether this processor can fold. Where it cannot, zlib's own tables are faster than ours. */
int howdah_folds(void);
/* The CRC-32 of at least 64 bytes behind others, of which `crc` is that. */
uint32_t howdah_crc32(uint32_t crc, const void *data, size_t size);

#ifdef __x86_64__
#include <immintrin.h>

enum { FOLD = 64, WIDE = 256 }; /* bytes */

static uint32_t crc_table[256]; /* the remainder of each byte */
/* Factors for 2048, 512 and 128 bits, of the two halves of 64 that move. */
static uint64_t crc_wide[2], crc_far[2], crc_near[2];

static uint32_t times_x(uint32_t bits) { return bits >> 1 ^ (bits & 1 ? 0xedb88320u : 0); }

/* The factor that moves 64 bits by n bits towards the end, and makes up for the short product. */
static uint64_t factor(int n) {
    uint32_t found = 1u << 31;
    for (n -= 32; n; n--) found = times_x(found);
    return (uint64_t)found << 1;
}

__attribute__((constructor)) static void prepare_crc(void) {
    for (uint32_t byte = 0; byte < 256; byte++) {
        crc_table[byte] = byte;
        for (int bit = 0; bit < 8; bit++) crc_table[byte] = times_x(crc_table[byte]);
    }
    for (int half = 0; half < 2; half++) {
        crc_wide[half] = factor(2048 + 64 - 64 * half);
        crc_far[half] = factor(512 + 64 - 64 * half);
        crc_near[half] = factor(128 + 64 - 64 * half);
    }
}

static uint32_t divided(uint32_t crc, const uint8_t *data, size_t size) {
    while (size--) crc = crc >> 8 ^ crc_table[(crc ^ *data++) & 0xff];
    return crc;
}

#define FOLDS __attribute__((target("pclmul,sse4.1")))
#define FOLDS_WIDE __attribute__((target("avx512f,vpclmulqdq,pclmul,sse4.1")))
#define FACTORS(of) _mm_loadu_si128((const __m128i *)(of))

/* `bits` moved to `onto`. */
FOLDS static inline __m128i fold(__m128i bits, __m128i factors, __m128i onto) {
    __m128i early = _mm_clmulepi64_si128(bits, factors, 0x00);
    __m128i late = _mm_clmulepi64_si128(bits, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(early, late), onto);
}

FOLDS_WIDE static inline __m512i fold_wide(__m512i bits, __m512i factors, __m512i onto) {
    __m512i early = _mm512_clmulepi64_epi128(bits, factors, 0x00);
    __m512i late = _mm512_clmulepi64_epi128(bits, factors, 0x11);
    return _mm512_xor_si512(_mm512_xor_si512(early, late), onto);
}

/* Folds at least WIDE bytes, as far as they fill WIDE; 64 bytes are left in `lane`. */
FOLDS_WIDE static void fold_all_wide(__m128i lane[4], uint32_t crc, const void *data, size_t size) {
    const __m512i wide = _mm512_broadcast_i32x4(FACTORS(crc_wide));
    const __m512i far = _mm512_broadcast_i32x4(FACTORS(crc_far));
    const __m512i *from = data;
    __m512i row[4];
    for (int k = 0; k < 4; k++) row[k] = _mm512_loadu_si512(from++);
    row[0] = _mm512_xor_si512(row[0], _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)crc)));
    for (size_t folds = size / WIDE; --folds;)
        for (int k = 0; k < 4; k++) row[k] = fold_wide(row[k], wide, _mm512_loadu_si512(from++));
    for (int k = 1; k < 4; k++) row[k] = fold_wide(row[k - 1], far, row[k]);
    _mm512_storeu_si512(lane, row[3]);
}

FOLDS uint32_t howdah_crc32(uint32_t crc, const void *data, size_t size) {
    const __m128i far = FACTORS(crc_far), near = FACTORS(crc_near), *from = data, *end;
    __m128i lane[4];
    uint8_t left[16];
    end = from + size / FOLD * 4;
    if (size >= WIDE && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("vpclmulqdq")) {
        fold_all_wide(lane, ~crc, data, size);
        from += size / WIDE * (WIDE / 16);
    } else {
        for (int k = 0; k < 4; k++) lane[k] = _mm_loadu_si128(from++);
        lane[0] = _mm_xor_si128(lane[0], _mm_cvtsi32_si128((int)~crc));
    }
    while (from < end)
        for (int k = 0; k < 4; k++) lane[k] = fold(lane[k], far, _mm_loadu_si128(from++));
    for (int k = 1; k < 4; k++) lane[k] = fold(lane[k - 1], near, lane[k]);
    _mm_storeu_si128((__m128i *)left, lane[3]);
    return ~divided(divided(0, left, sizeof left), (const uint8_t *)from, size % FOLD);
}

int howdah_folds(void) {
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse4.1");
}
#else
int howdah_folds(void) { return 0; }
#endif
#endif
