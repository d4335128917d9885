// One token of attention in each of many rows, over caches laid out for AVX512-BF16 dot products.
//   gcc -O3 -march=native -ffast-math -shared -fPIC bf16_attention.c -o bf16_attention.so -lm
// Keys: [row][kv head][slot/16][dim/2][16 slots][2 dims], values: [row][kv head][slot/2][dim][2 slots],
// so that both products run down the cache once, without a horizontal sum. Head size 64.
#include <immintrin.h>
#include <math.h>
#include <stdint.h>

enum { HD = 64, MAX_SLOTS = 2048, MAX_GROUP = 8 };

static inline __m512 dot2(__m512 sum, const void *pairs, int32_t pair) {
    return _mm512_dpbf16_ps(sum, (__m512bh)_mm512_loadu_si512(pairs),
                            (__m512bh)_mm512_set1_epi32(pair));
}

void attend(const uint16_t *q, const uint16_t *k, const uint16_t *v, const int64_t *positions,
            uint16_t *keys, uint16_t *values, uint16_t *out, int rows, int heads, int group,
            int slots) {
    static float scores[MAX_GROUP][MAX_SLOTS] __attribute__((aligned(64)));
    static uint16_t weights[MAX_GROUP][MAX_SLOTS] __attribute__((aligned(64)));
    for (int cell = 0; cell < rows * heads; cell++) {
        int t = (int)positions[cell / heads], n = t + 1;
        uint16_t *K = keys + (int64_t)cell * slots * HD, *V = values + (int64_t)cell * slots * HD;
        for (int d = 0; d < HD; d++) {
            K[t / 16 * 16 * HD + d / 2 * 32 + t % 16 * 2 + d % 2] = k[cell * HD + d];
            V[t / 2 * 2 * HD + d * 2 + t % 2] = v[cell * HD + d];
        }
        const int32_t *pairs = (const int32_t *)(q + (int64_t)cell * group * HD);
        int blocks = (n + 15) / 16;
        for (int b = 0; b < blocks; b++) {
            const uint16_t *block = K + b * 16 * HD;
            for (int g = 0; g < group; g++) {
                __m512 s0 = _mm512_setzero_ps(), s1 = s0;
                for (int p = 0; p < HD / 2; p += 2) {
                    s0 = dot2(s0, block + p * 32, pairs[g * HD / 2 + p]);
                    s1 = dot2(s1, block + p * 32 + 32, pairs[g * HD / 2 + p + 1]);
                }
                _mm512_store_ps(scores[g] + b * 16, _mm512_add_ps(s0, s1));
            }
        }
        for (int g = 0; g < group; g++) {
            float *s = scores[g], top = -1e30f, sum = 0;
            for (int i = n; i < blocks * 16; i++) s[i] = -1e30f;
            for (int i = 0; i < blocks * 16; i++) top = s[i] > top ? s[i] : top;
            for (int i = 0; i < blocks * 16; i++) { s[i] = expf(s[i] - top); sum += s[i]; }
            __m512 scale = _mm512_set1_ps(1 / sum);
            for (int i = 0; i < blocks * 16; i += 16)
                _mm256_storeu_si256((__m256i *)(weights[g] + i),
                    (__m256i)_mm512_cvtneps_pbh(_mm512_mul_ps(_mm512_load_ps(s + i), scale)));
            __m512 o0 = _mm512_setzero_ps(), o1 = o0, o2 = o0, o3 = o0;
            const int32_t *w = (const int32_t *)weights[g];
            for (int i = 0; i < (n + 1) / 2; i++) {
                const uint16_t *row = V + i * 2 * HD;
                o0 = dot2(o0, row, w[i]); o1 = dot2(o1, row + 32, w[i]);
                o2 = dot2(o2, row + 64, w[i]); o3 = dot2(o3, row + 96, w[i]);
            }
            uint16_t *to = out + ((int64_t)cell * group + g) * HD;
            _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(o0));
            _mm256_storeu_si256((__m256i *)(to + 16), (__m256i)_mm512_cvtneps_pbh(o1));
            _mm256_storeu_si256((__m256i *)(to + 32), (__m256i)_mm512_cvtneps_pbh(o2));
            _mm256_storeu_si256((__m256i *)(to + 48), (__m256i)_mm512_cvtneps_pbh(o3));
        }
    }
}
