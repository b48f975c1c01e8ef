// Products of small blocks for attention: a tile of 8 rows and up to 32 columns stays in registers.
//
// A word is what one lane of a product takes along the reduction: two bf16 or one float. The left operand lies in
// panels [steps][8 rows] or in rows [8][steps] of words and is broadcast, the right one is [steps][columns] of words.
#pragma once

#include "_vector.h"

#ifdef MEGACORE_HAS_AVX512
#define MEGACORE_INLINE inline __attribute__((always_inline))

namespace megacore {

using word = std::uint32_t;

constexpr std::ptrdiff_t LANES = 16;
constexpr std::ptrdiff_t ROWS = 8;

// Elements in a word.
template <class T>
constexpr std::ptrdiff_t WIDTH = sizeof(word) / sizeof(T);

constexpr std::ptrdiff_t round_up(std::ptrdiff_t n, std::ptrdiff_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}

}  // namespace megacore

MEGACORE_AVX512_BEGIN
namespace megacore {

MEGACORE_INLINE __m512i load_words(const word* from) { return _mm512_loadu_si512(from); }
MEGACORE_INLINE void store_words(word* to, __m512i x) { _mm512_storeu_si512(to, x); }
MEGACORE_INLINE void store_halves(word* to, word* then, __m512i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(x));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(then), _mm512_extracti64x4_epi64(x, 1));
}

template <class T>
MEGACORE_INLINE __m512 multiply_add(__m512i a, __m512i b, __m512 sum) {
    if constexpr (sizeof(T) == 2) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    } else {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    }
}

// The sums of a tile of 8 rows and NV vectors of columns.
template <int NV>
struct Tile {
    __m512 sums[ROWS][NV];

    // Start at zero and add `steps` words of the reduction; ROW and STEP are the left operand's strides.
    template <class T, int ROW, int STEP>
    MEGACORE_INLINE void multiply(const word* left, const word* right, std::ptrdiff_t right_stride,
                                  std::ptrdiff_t steps) {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) sums[r][v] = _mm512_setzero_ps();
        }
        for (std::ptrdiff_t k = 0; k < steps; ++k) {
            __m512i b[NV];
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) b[v] = load_words(right + v * LANES);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                const __m512i a = _mm512_set1_epi32(static_cast<int>(left[r * ROW]));
#pragma GCC unroll 4
                for (int v = 0; v < NV; ++v) sums[r][v] = multiply_add<T>(a, b[v], sums[r][v]);
            }
            left += STEP;
            right += right_stride;
        }
    }

    MEGACORE_INLINE void add_to(float* to, std::ptrdiff_t stride) const {
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 4
            for (int v = 0; v < NV; ++v) {
                float* const place = to + r * stride + v * LANES;
                store(place, _mm512_add_ps(load(place), sums[r][v]));
            }
        }
    }
};

// to[8][columns] += left * right for any multiple of 16 columns.
template <class T, int ROW, int STEP>
inline void add_product(const word* left, const word* right, std::ptrdiff_t right_stride, std::ptrdiff_t steps,
                        float* to, std::ptrdiff_t to_stride, std::ptrdiff_t columns) {
    std::ptrdiff_t column = 0;
    for (; column + 2 * LANES <= columns; column += 2 * LANES) {
        Tile<2> tile;
        tile.multiply<T, ROW, STEP>(left, right + column, right_stride, steps);
        tile.add_to(to + column, to_stride);
    }
    if (column < columns) {
        Tile<1> tile;
        tile.multiply<T, ROW, STEP>(left, right + column, right_stride, steps);
        tile.add_to(to + column, to_stride);
    }
}

// 2^x for x <= 128: a polynomial of degree 5 on [-1/2, 1/2], relative error below 3e-7; 0 below -150.
MEGACORE_INLINE __m512 exp2(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-150.0f), x);
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 f = _mm512_sub_ps(x, n);
    __m512 p = _mm512_set1_ps(1.327646679e-3f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.675541293e-3f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550713290e-2f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402211972e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931469671e-1f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}

// Two vectors of one row as words of pairs along the row.
MEGACORE_INLINE __m512i round_row(__m512 first, __m512 second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }

// Two rows of 32 bf16 -> the words (first[i], second[i]) of the first or of the last 16 columns.
MEGACORE_INLINE __m512i pair_rows(__m512i first, __m512i second, bool last) {
    const __m256i low = last ? _mm512_extracti64x4_epi64(first, 1) : _mm512_castsi512_si256(first);
    const __m256i high = last ? _mm512_extracti64x4_epi64(second, 1) : _mm512_castsi512_si256(second);
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

// Which of 16 queries from `query` on see the key.
MEGACORE_INLINE __mmask16 seeing(std::ptrdiff_t key, std::ptrdiff_t keys, std::ptrdiff_t query, bool causal) {
    if (key >= keys) return 0;
    const std::ptrdiff_t hidden = causal ? key - query : 0;
    if (hidden <= 0) return 0xFFFF;
    return hidden >= LANES ? 0 : static_cast<__mmask16>(0xFFFFu << hidden);
}

}  // namespace megacore
MEGACORE_AVX512_END
#endif
