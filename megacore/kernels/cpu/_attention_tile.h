// Building blocks of attention's products: tiles of 8 rows and up to 32 columns in registers, and
// the packing of a tensor's rows into the order in which tiles read them.
//
// A word is the part of the reduction that one lane takes at a time: two bf16 or one float. The
// left operand has panels [steps][8 rows] or rows [8][steps] of words and is broadcast; the right
// one is [steps][columns] of words. In all packed forms, rows and elements beyond the last are
// zero.
#pragma once

#include "_vector.h"

#ifdef MEGACORE_HAS_AVX512
#define MEGACORE_INLINE inline __attribute__((always_inline))

namespace megacore {

using word = std::uint32_t;

constexpr std::ptrdiff_t LANES = 16;
constexpr std::ptrdiff_t ROWS = 8;

// Number of elements in a word.
template <class T>
constexpr std::ptrdiff_t WIDTH = sizeof(word) / sizeof(T);

constexpr std::ptrdiff_t round_up(std::ptrdiff_t n, std::ptrdiff_t multiple) {
    return (n + multiple - 1) / multiple * multiple;
}
constexpr std::ptrdiff_t round_down(std::ptrdiff_t n, std::ptrdiff_t multiple) {
    return n / multiple * multiple;
}

// Rows [rows, size] of one head; the elements of a row are contiguous.
template <class T>
struct Rows {
    T* data;
    std::ptrdiff_t stride;
    std::ptrdiff_t count;
    std::ptrdiff_t size;

    Rows from(std::ptrdiff_t first) const {
        return {data + first * stride, stride, count - first, size};
    }

    // Prefetch up to `wanted` rows; the hardware does not predict the stride from row to row.
    template <bool FOR_WRITING>
    void prefetch(std::ptrdiff_t wanted) const {
        const std::ptrdiff_t line = 64 / sizeof(T);
        for (std::ptrdiff_t row = 0; row < wanted && row < count; ++row) {
            for (std::ptrdiff_t i = 0; i < size; i += line)
                __builtin_prefetch(data + row * stride + i, FOR_WRITING, 2);
        }
    }
};

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

// Sums of a tile of 8 rows and NV vectors of columns.
template <int NV>
struct Tile {
    __m512 sums[ROWS][NV];

    // Compute the sums over `steps` words of the reduction, starting at zero; ROW and STEP are the
    // left operand's strides.
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

// Compute to[8][columns] += left * right for any multiple of 16 columns.
template <class T, int ROW, int STEP>
inline void add_product(const word* left, const word* right, std::ptrdiff_t right_stride,
                        std::ptrdiff_t steps, float* to, std::ptrdiff_t to_stride,
                        std::ptrdiff_t columns) {
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

// Compute 2^x for x <= 128: a polynomial of degree 5 on [-1/2, 1/2], relative error below 3e-7; 0
// below -150.
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

// Round two vectors of one row to words of pairs along the row.
MEGACORE_INLINE __m512i round_row(__m512 first, __m512 second) {
    return (__m512i)_mm512_cvtne2ps_pbh(second, first);
}

// Combine two rows of 32 bf16 into words (first[i], second[i]) of the first or last 16 columns.
MEGACORE_INLINE __m512i pair_rows(__m512i first, __m512i second, bool last) {
    const __m256i low = last ? _mm512_extracti64x4_epi64(first, 1) : _mm512_castsi512_si256(first);
    const __m256i high =
        last ? _mm512_extracti64x4_epi64(second, 1) : _mm512_castsi512_si256(second);
    return _mm512_or_si512(_mm512_cvtepu16_epi32(low),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

// Transpose 16 vectors of 16 words.
MEGACORE_INLINE void transpose(__m512i (&x)[LANES]) {
    __m512i y[LANES];
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        y[2 * i] = _mm512_unpacklo_epi32(x[2 * i], x[2 * i + 1]);
        y[2 * i + 1] = _mm512_unpackhi_epi32(x[2 * i], x[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        x[4 * i] = _mm512_unpacklo_epi64(y[4 * i], y[4 * i + 2]);
        x[4 * i + 1] = _mm512_unpackhi_epi64(y[4 * i], y[4 * i + 2]);
        x[4 * i + 2] = _mm512_unpacklo_epi64(y[4 * i + 1], y[4 * i + 3]);
        x[4 * i + 3] = _mm512_unpackhi_epi64(y[4 * i + 1], y[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) {
        y[i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0x88);
        y[4 + i] = _mm512_shuffle_i32x4(x[i], x[4 + i], 0xdd);
        y[8 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0x88);
        y[12 + i] = _mm512_shuffle_i32x4(x[8 + i], x[12 + i], 0xdd);
    }
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
        x[i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0x88);
        x[8 + i] = _mm512_shuffle_i32x4(y[i], y[8 + i], 0xdd);
    }
}

// Load the words of a row from element `first` on.
MEGACORE_INLINE __m512i row_words(const Rows<const bf16>& rows, std::ptrdiff_t row,
                                  std::ptrdiff_t first) {
    const std::ptrdiff_t left = rows.size - first;
    const bf16* const from = rows.data + row * rows.stride + first;
    return left >= 32 ? _mm512_loadu_si512(from)
                      : _mm512_maskz_loadu_epi16((1u << left) - 1u, from);
}
MEGACORE_INLINE __m512i row_words(const Rows<const float>& rows, std::ptrdiff_t row,
                                  std::ptrdiff_t first) {
    return _mm512_maskz_loadu_epi32(first_lanes(rows.size - first),
                                    rows.data + row * rows.stride + first);
}

// Load words along 16 rows, transposed: x[w] is word w of each row.
template <class T>
MEGACORE_INLINE void transposed_words(const Rows<const T>& rows, std::ptrdiff_t row,
                                      std::ptrdiff_t first, __m512i (&x)[LANES]) {
    if (row + LANES <= rows.count && first + LANES * WIDTH<T> <= rows.size) {
        const T* const from = rows.data + row * rows.stride + first;
#pragma GCC unroll 16
        for (int r = 0; r < LANES; ++r) x[r] = _mm512_loadu_si512(from + r * rows.stride);
    } else {
        for (int r = 0; r < LANES; ++r) {
            x[r] = row + r < rows.count ? row_words(rows, row + r, first) : _mm512_setzero_si512();
        }
    }
    transpose(x);
}

// Pack `count` (a multiple of 16) rows as [words along a row][count].
template <class T>
inline void pack_transposed(const Rows<const T>& rows, std::ptrdiff_t count, word* to) {
    const std::ptrdiff_t words = (rows.size + WIDTH<T> - 1) / WIDTH<T>;
    for (std::ptrdiff_t row = 0; row < count; row += LANES) {
        for (std::ptrdiff_t w = 0; w < words; w += LANES) {
            __m512i x[LANES];
            transposed_words(rows, row, w * WIDTH<T>, x);
            for (std::ptrdiff_t i = 0; i < LANES && w + i < words; ++i)
                store_words(to + (w + i) * count + row, x[i]);
        }
    }
}

// Pack all rows as panels [rows / 8][words along a row][8], for products that reduce along a row.
template <class T>
inline void pack_row_panels(const Rows<const T>& rows, word* to) {
    const std::ptrdiff_t words = (rows.size + WIDTH<T> - 1) / WIDTH<T>;
    for (std::ptrdiff_t row = 0; row < rows.count; row += LANES) {
        word* const panel = to + row * words;
        for (std::ptrdiff_t w = 0; w < words; w += LANES) {
            __m512i x[LANES];
            transposed_words(rows, row, w * WIDTH<T>, x);
            for (std::ptrdiff_t i = 0; i < LANES && w + i < words; ++i) {
                store_halves(panel + (w + i) * ROWS, panel + (words + w + i) * ROWS, x[i]);
            }
        }
    }
}

// Load the words across rows from element `first` on: two interleaved rows of bf16, or one row of
// floats.
template <class T>
MEGACORE_INLINE __m512i words_across(const Rows<const T>& rows, std::ptrdiff_t row,
                                     std::ptrdiff_t first) {
    const T* const from = rows.data + row * rows.stride + first;
    if (row + WIDTH<T> <= rows.count && first + LANES <= rows.size) {
        if constexpr (WIDTH<T> == 1) return _mm512_loadu_si512(from);
        const __m512i low =
            _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        const __m256i next =
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + rows.stride));
        return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(next), 16));
    }
    if (row >= rows.count) return _mm512_setzero_si512();
    const __mmask16 lanes = first_lanes(rows.size - first);
    if constexpr (WIDTH<T> == 1) {
        return _mm512_maskz_loadu_epi32(lanes, from);
    } else {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
        if (row + 1 >= rows.count) return low;
        const __m512i high =
            _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from + rows.stride));
        return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
}

// Pack `count` rows as [words across rows][size rounded up to 16].
template <class T>
inline void pack_across(const Rows<const T>& rows, std::ptrdiff_t count, word* to) {
    for (std::ptrdiff_t row = 0; row < count; row += WIDTH<T>) {
        for (std::ptrdiff_t first = 0; first < rows.size; first += LANES, to += LANES) {
            store_words(to, words_across(rows, row, first));
        }
    }
}

// Pack `count` rows as panels [size rounded up to 16 / 8][words across rows][8], for products that
// reduce across rows.
template <class T>
inline void pack_across_panels(const Rows<const T>& rows, std::ptrdiff_t count, word* to) {
    const std::ptrdiff_t words = count / WIDTH<T>;
    for (std::ptrdiff_t first = 0; first < rows.size; first += LANES, to += words * LANES) {
        for (std::ptrdiff_t w = 0; w < words; ++w) {
            store_halves(to + w * ROWS, to + (words + w) * ROWS,
                         words_across(rows, w * WIDTH<T>, first));
        }
    }
}

// Write [size][columns], times a factor for each of 16 columns, to up to 16 rows.
template <class T>
inline void unpack_transposed(const float* from, std::ptrdiff_t columns, __m512 factor,
                              const Rows<T>& rows) {
    for (std::ptrdiff_t first = 0; first < rows.size; first += LANES) {
        __m512i x[LANES];
        for (int i = 0; i < LANES; ++i) {
            x[i] = _mm512_castps_si512(_mm512_mul_ps(load(from + (first + i) * columns), factor));
        }
        transpose(x);
        const __mmask16 lanes = first_lanes(rows.size - first);
        for (int r = 0; r < LANES && r < rows.count; ++r) {
            store(rows.data + r * rows.stride + first, _mm512_castsi512_ps(x[r]), lanes);
        }
    }
}

// Write [rows][size rounded up to 16], times a factor, to rows.
template <class T, std::ptrdiff_t AHEAD = 16>
inline void unpack(const float* from, float factor, const Rows<T>& rows) {
    const __m512 factors = _mm512_set1_ps(factor);
    for (std::ptrdiff_t row = 0; row < rows.count; ++row) {
        if (row % AHEAD == 0) rows.from(row + AHEAD).template prefetch<true>(AHEAD);
        for (std::ptrdiff_t first = 0; first < rows.size; first += LANES, from += LANES) {
            store(rows.data + row * rows.stride + first, _mm512_mul_ps(load(from), factors),
                  first_lanes(rows.size - first));
        }
    }
}

}  // namespace megacore
MEGACORE_AVX512_END
#endif
