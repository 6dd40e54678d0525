/* Reductions of several sources into one, in a fixed order.
 *
 *     out[j] = ((from[0][j] + from[1][j]) + from[2][j]) + ...          rank order, always
 *
 * Whoever reduces, the additions are the same, so the bits are the same. bf16 and fp16 are
 * widened to float, added there, and rounded once at the end (to nearest, ties to even).
 *
 * Sources are taken a BLOCK at a time: the running sums of a block stay in the first cache, and
 * every source and the result pass through memory once, however many sources there are. The
 * result may be one of the sources (the very same place, not a shifted one), because a block is
 * written only after all of it was read.
 *
 * The loops are plain; the compiler makes vectors of them. A library built for any machine holds
 * each of them several times and picks by the processor when it is loaded (CLONES).
 */
#ifndef HOWDAH_REDUCE_H
#define HOWDAH_REDUCE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __F16C__
#include <immintrin.h>
#endif

enum { FLOAT32, FLOAT64, BFLOAT16, FLOAT16, INT8, UINT8, INT16, INT32, INT64, REDUCIBLE };
enum { SUM, MEAN, MIN, MAX, PRODUCT };

#define BLOCK 1024 /* elements: at most 8 KB of running sums */

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && !defined(__AVX2__) && \
    __GNUC__ >= 12
#define CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define CLONES
#endif

/* -- half formats: two bytes in memory, float in the sum ------------------------------------- */

static inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline float widen_bfloat16(uint16_t half) { return float_of((uint32_t)half << 16); }

/* Adding half of the last place that is kept, less one where that place is even, carries into it
   exactly when rounding to nearest even must. A NaN stays one: those that come of bf16 numbers have
   nothing in the bits that go, so nothing is carried. */
static inline uint32_t round_bfloat16(float value) {
    uint32_t bits = bits_of(value);
    return bits + 0x7fff + ((bits >> 16) & 1);
}

static inline uint16_t narrow_bfloat16(float value) {
    return (uint16_t)(round_bfloat16(value) >> 16);
}

/* fp16 has 5 bits of exponent and 10 of fraction. Shifted into a float's place its value is too
   small by 2^112, which one exact multiplication corrects, subnormal numbers included. */
static inline float widen_float16(uint16_t half) {
    uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = (uint32_t)(half & 0x7fff) << 13;
    float scaled = float_of(rest) * 0x1p112f;
    uint32_t special = rest | 0x7f800000; /* infinity and NaN keep their fraction */
    return float_of(sign | ((half & 0x7c00) == 0x7c00 ? special : bits_of(scaled)));
}

static inline uint16_t narrow_float16(float value) {
    uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000, size = bits & 0x7fffffff;
    /* From 2^-14 on: rebias, and round as above. */
    uint32_t normal = (size - (112u << 23) + 0xfff + ((size >> 13) & 1)) >> 13;
    /* Below: adding 1/2 leaves the number's multiple of 2^-24 in the last bits, rounded. */
    uint32_t small = bits_of(float_of(size) + 0.5f) - bits_of(0.5f);
    uint32_t half = size < (113u << 23) ? small : normal;
    half = size >= 0x477ff000 ? 0x7c00 : half; /* 65520 and more round to infinity */
    half = size > 0x7f800000 ? 0x7e00 : half;
    return (uint16_t)(sign | half);
}

static inline float widen_float(float value) { return value; }
static inline double widen_double(double value) { return value; }

/* -- the loops ------------------------------------------------------------------------------- */

/* The result may stand where a source stands; no element depends on another one. */
#define EACH(count) _Pragma("GCC ivdep") for (size_t j = 0; j < (count); j++)

/* A NaN on either side must come out: `a` is taken when it is one, `b` when no comparison holds. */
#define LESSER(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define GREATER(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))

/* One pass over a block; `value` names the element j. */
#define COMBINE(value)                                                                           \
    switch (op) {                                                                                \
    case MIN: EACH(width) { sum[j] = LESSER(sum[j], value); } break;                             \
    case MAX: EACH(width) { sum[j] = GREATER(sum[j], value); } break;                            \
    case PRODUCT: EACH(width) { sum[j] *= value; } break;                                        \
    default: EACH(width) { sum[j] += value; } break;                                             \
    }

/* T in memory, A in the running sum; `from` has at least one source. */
#define REDUCE(NAME, T, A, WIDEN, NARROW)                                                        \
    CLONES static void NAME(void *out, const void *const *from, int sources, size_t count,       \
                            int op) {                                                            \
        A sum[BLOCK];                                                                            \
        for (size_t start = 0; start < count; start += BLOCK) {                                  \
            size_t width = count - start < BLOCK ? count - start : BLOCK;                        \
            const T *first = (const T *)from[0] + start;                                         \
            T *result = (T *)out + start;                                                        \
            if (sources == 1) {                                                                  \
                memmove(result, first, width * sizeof(T));                                       \
                continue;                                                                        \
            }                                                                                    \
            const T *next = (const T *)from[1] + start;                                          \
            if (sources == 2 && op == SUM) { /* most sums: no running sum to keep */             \
                EACH(width) { result[j] = NARROW(WIDEN(first[j]) + WIDEN(next[j])); }            \
                continue;                                                                        \
            }                                                                                    \
            EACH(width) { sum[j] = WIDEN(first[j]); }                                            \
            for (int source = 1; source < sources; source++) {                                   \
                next = (const T *)from[source] + start;                                          \
                COMBINE(WIDEN(next[j]))                                                          \
            }                                                                                    \
            if (op == MEAN) EACH(width) { sum[j] = sum[j] / (A)sources; }                        \
            EACH(width) { result[j] = NARROW(sum[j]); }                                          \
        }                                                                                        \
    }

REDUCE(reduce_float32, float, float, widen_float, widen_float)
REDUCE(reduce_float64, double, double, widen_double, widen_double)
REDUCE(reduce_bfloat16, uint16_t, float, widen_bfloat16, narrow_bfloat16)
REDUCE(reduce_float16, uint16_t, float, widen_float16, narrow_float16)
REDUCE(reduce_int8, int8_t, int8_t, (int8_t), (int8_t))
REDUCE(reduce_uint8, uint8_t, uint8_t, (uint8_t), (uint8_t))
REDUCE(reduce_int16, int16_t, int16_t, (int16_t), (int16_t))
REDUCE(reduce_int32, int32_t, int32_t, (int32_t), (int32_t))
REDUCE(reduce_int64, int64_t, int64_t, (int64_t), (int64_t))

/* -- sums and means of the half formats: most of what is reduced ----------------------------- */

/* Many numbers at a time, whose sums stay in registers while the sources go by; what is left at the
   end, and the other operations, take the loops above. */
#define REST(reduce, taken)                                                                      \
    const void *rest[64];                                                                        \
    for (int source = 0; source < sources; source++)                                             \
        rest[source] = (const uint16_t *)from[source] + (taken);                                 \
    reduce((uint16_t *)out + (taken), rest, sources, count - (taken), op);

#ifdef __AVX512F__
#define VECTOR __attribute__((vector_size(64)))
#else /* twice what a processor has is cut in two well, four times is not */
#define VECTOR __attribute__((vector_size(32)))
#endif
typedef uint32_t Words VECTOR;
typedef float Floats VECTOR;

#define LOW(pairs) ((Floats)((pairs) << 16))
#define HIGH(pairs) ((Floats)((pairs) & 0xffff0000))
#define ROUND(bits) ((bits) + 0x7fff + (((bits) >> 16) & 1)) /* as round_bfloat16 */

/* Two bf16 numbers make a word of 32 bits, and each is a float in the place where it stands, or
   shifted to it: no lane of a vector is widened or narrowed, which is twice as fast. */
CLONES static void sum_bfloat16(void *out, const void *const *from, int sources, size_t count,
                                int op) {
    enum { TOGETHER = sizeof(Words) / sizeof(uint16_t) };
    size_t taken = sources > 1 && op <= MEAN ? count / TOGETHER * TOGETHER : 0;
    for (size_t start = 0; start < taken; start += TOGETHER) {
        Words pairs;
        memcpy(&pairs, (const uint16_t *)from[0] + start, sizeof pairs);
        Floats low = LOW(pairs), high = HIGH(pairs);
        for (int source = 1; source < sources; source++) {
            memcpy(&pairs, (const uint16_t *)from[source] + start, sizeof pairs);
            low += LOW(pairs), high += HIGH(pairs);
        }
        if (op == MEAN) low /= (float)sources, high /= (float)sources;
        pairs = ROUND((Words)low) >> 16 | (ROUND((Words)high) & 0xffff0000);
        memcpy((uint16_t *)out + start, &pairs, sizeof pairs);
    }
    REST(reduce_bfloat16, taken)
}

/* Processors that convert fp16 by themselves do so five times as fast as the loops above. */
static void sum_float16(void *out, const void *const *from, int sources, size_t count, int op) {
    size_t taken = 0;
#ifdef __F16C__
    enum { TOGETHER = sizeof(__m256) / sizeof(float) };
    if (sources > 1 && op <= MEAN) taken = count / TOGETHER * TOGETHER;
    for (size_t start = 0; start < taken; start += TOGETHER) {
        __m256 sum = {0};
        for (int source = 0; source < sources; source++) {
            const void *at = (const uint16_t *)from[source] + start;
            __m256 next = _mm256_cvtph_ps(_mm_loadu_si128(at));
            if (source) sum += next;
            else sum = next;
        }
        if (op == MEAN) sum /= (float)sources;
        __m128i rounded = _mm256_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT);
        _mm_storeu_si128((void *)((uint16_t *)out + start), rounded);
    }
#endif
    REST(reduce_float16, taken)
}

typedef void (*Reducer)(void *, const void *const *, int, size_t, int);

static const Reducer reducers[REDUCIBLE] = {
    [FLOAT32] = reduce_float32, [FLOAT64] = reduce_float64, [BFLOAT16] = sum_bfloat16,
    [FLOAT16] = sum_float16,    [INT8] = reduce_int8,       [UINT8] = reduce_uint8,
    [INT16] = reduce_int16,     [INT32] = reduce_int32,     [INT64] = reduce_int64,
};

#endif
