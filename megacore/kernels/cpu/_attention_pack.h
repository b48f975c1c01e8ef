// How attention brings rows of a tensor into the order its products read, and its results back into rows.
//
// Rows and elements beyond the last are zero in every packed form.
#pragma once

#include "_attention_tile.h"

#ifdef MEGACORE_HAS_AVX512
namespace megacore {

// One head's rows [rows, size]; the elements of a row are contiguous.
template <class T>
struct Rows {
    T* data;
    std::ptrdiff_t stride;
    std::ptrdiff_t count;
    std::ptrdiff_t size;

    Rows from(std::ptrdiff_t first) const { return {data + first * stride, stride, count - first, size}; }

    // Ask for up to `wanted` rows that are needed soon: hardware does not foresee the step from row to row.
    template <bool FOR_WRITING>
    void prefetch(std::ptrdiff_t wanted) const {
        const std::ptrdiff_t line = 64 / sizeof(T);
        for (std::ptrdiff_t row = 0; row < wanted && row < count; ++row) {
            for (std::ptrdiff_t i = 0; i < size; i += line) __builtin_prefetch(data + row * stride + i, FOR_WRITING, 2);
        }
    }
};

}  // namespace megacore

MEGACORE_AVX512_BEGIN
namespace megacore {

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

// The words of a row from element `first` on.
MEGACORE_INLINE __m512i row_words(const Rows<const bf16>& rows, std::ptrdiff_t row, std::ptrdiff_t first) {
    const std::ptrdiff_t left = rows.size - first;
    const bf16* const from = rows.data + row * rows.stride + first;
    return left >= 32 ? _mm512_loadu_si512(from) : _mm512_maskz_loadu_epi16((1u << left) - 1u, from);
}
MEGACORE_INLINE __m512i row_words(const Rows<const float>& rows, std::ptrdiff_t row, std::ptrdiff_t first) {
    return _mm512_maskz_loadu_epi32(first_lanes(rows.size - first), rows.data + row * rows.stride + first);
}

// 16 rows -> words along them, transposed: x[w] holds word w of each row.
template <class T>
MEGACORE_INLINE void transposed_words(const Rows<const T>& rows, std::ptrdiff_t row, std::ptrdiff_t first,
                                      __m512i (&x)[LANES]) {
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

// `count` (a multiple of 16) rows -> [words along a row][count].
template <class T>
inline void pack_transposed(const Rows<const T>& rows, std::ptrdiff_t count, word* to) {
    const std::ptrdiff_t words = (rows.size + WIDTH<T> - 1) / WIDTH<T>;
    for (std::ptrdiff_t row = 0; row < count; row += LANES) {
        for (std::ptrdiff_t w = 0; w < words; w += LANES) {
            __m512i x[LANES];
            transposed_words(rows, row, w * WIDTH<T>, x);
            for (std::ptrdiff_t i = 0; i < LANES && w + i < words; ++i) store_words(to + (w + i) * count + row, x[i]);
        }
    }
}

// All rows -> panels [rows / 8][words along a row][8], for products that reduce along a row.
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

// The words across rows, from element `first` on: two rows of bf16 interleaved, or one row of floats.
template <class T>
MEGACORE_INLINE __m512i words_across(const Rows<const T>& rows, std::ptrdiff_t row, std::ptrdiff_t first) {
    const T* const from = rows.data + row * rows.stride + first;
    if (row + WIDTH<T> <= rows.count && first + LANES <= rows.size) {
        if constexpr (WIDTH<T> == 1) return _mm512_loadu_si512(from);
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
        const __m256i next = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + rows.stride));
        return _mm512_or_si512(low, _mm512_slli_epi32(_mm512_cvtepu16_epi32(next), 16));
    }
    if (row >= rows.count) return _mm512_setzero_si512();
    const __mmask16 lanes = first_lanes(rows.size - first);
    if constexpr (WIDTH<T> == 1) {
        return _mm512_maskz_loadu_epi32(lanes, from);
    } else {
        const __m512i low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from));
        if (row + 1 >= rows.count) return low;
        const __m512i high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, from + rows.stride));
        return _mm512_or_si512(low, _mm512_slli_epi32(high, 16));
    }
}

// `count` rows -> [words across rows][size rounded up to 16].
template <class T>
inline void pack_across(const Rows<const T>& rows, std::ptrdiff_t count, word* to) {
    for (std::ptrdiff_t row = 0; row < count; row += WIDTH<T>) {
        for (std::ptrdiff_t first = 0; first < rows.size; first += LANES, to += LANES) {
            store_words(to, words_across(rows, row, first));
        }
    }
}

// `count` rows -> panels [size rounded up to 16 / 8][words across rows][8], for products that reduce across rows.
template <class T>
inline void pack_across_panels(const Rows<const T>& rows, std::ptrdiff_t count, word* to) {
    const std::ptrdiff_t words = count / WIDTH<T>;
    for (std::ptrdiff_t first = 0; first < rows.size; first += LANES, to += words * LANES) {
        for (std::ptrdiff_t w = 0; w < words; ++w) {
            store_halves(to + w * ROWS, to + (words + w) * ROWS, words_across(rows, w * WIDTH<T>, first));
        }
    }
}

// from [size][columns], times a factor for each of 16 columns -> up to 16 rows.
template <class T>
inline void unpack_transposed(const float* from, std::ptrdiff_t columns, __m512 factor, const Rows<T>& rows) {
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

// from [rows][size rounded up to 16], times a factor -> rows.
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
