// softmax(q k^T) v with the queries in groups of 32 and the keys in blocks (Milakov and Gimelshein
// 2018; Dao et al. 2022).
//
// Scores are stored transposed, [keys][queries]: then the softmax needs no sums across lanes.
#pragma once

#include <cfloat>
#include <cmath>
#include <limits>

#include "_attention_view.h"

#ifdef MEGACORE_HAS_AVX512
namespace megacore {

// [b, n, s, d] in memory, strides in elements.
template <class T>
struct Heads {
    T* data;
    std::ptrdiff_t batch_stride;
    std::ptrdiff_t head_stride;
    std::ptrdiff_t row_stride;

    Rows<T> rows(std::ptrdiff_t batch, std::ptrdiff_t head, std::ptrdiff_t count,
                 std::ptrdiff_t size) const {
        return {data + batch * batch_stride + head * head_stride, row_stride, count, size};
    }
};

constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LN_2 = 0.693147180559945309f;
constexpr std::ptrdiff_t FORWARD_KEYS = 128;

// Memory of one thread for a packed key-value head and one group of queries.
template <class T>
struct ForwardScratch {
    std::ptrdiff_t words, keys, rows;

    explicit ForwardScratch(const Shape& shape)
        : words((shape.size + WIDTH<T> - 1) / WIDTH<T>),
          keys(round_up(shape.keys, LANES)),
          rows(round_up(shape.size, LANES)) {}

    std::ptrdiff_t total() const {
        return keys * words + keys / WIDTH<T> * rows +
               GROUP * (words + rows + FORWARD_KEYS + FORWARD_KEYS / WIDTH<T>);
    }
    void place(word* memory) {
        key = memory;
        value = key + keys * words;
        query = value + keys / WIDTH<T> * rows;
        weights = query + words * GROUP;
        scores = reinterpret_cast<float*>(weights + FORWARD_KEYS / WIDTH<T> * GROUP);
        out = scores + FORWARD_KEYS * GROUP;
    }

    std::ptrdiff_t first_key = 0;  // the first packed key
    word *key = nullptr, *value = nullptr, *query = nullptr, *weights = nullptr;
    float *scores = nullptr, *out = nullptr;
};

}  // namespace megacore

MEGACORE_AVX512_BEGIN
namespace megacore {

// Running softmax of 32 queries: the maximum of the scores, and the sum of the exponentials.
struct Statistics {
    __m512 greatest[2];
    __m512 sum[2];
};

// Compute scores[count][32] = k q^T * factor (-inf for hidden keys), and update their maximum.
template <class T>
inline void score_block(const Shape& shape, const ForwardScratch<T>& scratch, const View& view,
                        std::ptrdiff_t first_key, std::ptrdiff_t count, __m512 (&greatest)[2]) {
    const __m512 factor = _mm512_set1_ps(shape.scale * LOG2_E);
    const __m512 hidden = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    for (std::ptrdiff_t j = 0; j < count; j += ROWS) {
        const std::ptrdiff_t key = first_key + j;
        Tile<2> tile;
        tile.multiply<T, 1, ROWS>(scratch.key + (key - scratch.first_key) * scratch.words,
                                  scratch.query, GROUP, scratch.words);
        const bool edge = !view.every.contains(key, ROWS);
        float* const to = scratch.scores + j * GROUP;
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
                __m512 x = _mm512_mul_ps(tile.sums[r][v], factor);
                if (edge) x = _mm512_mask_mov_ps(hidden, seeing(view, v * LANES, key + r), x);
                greatest[v] = _mm512_max_ps(greatest[v], x);
                store(to + r * GROUP + v * LANES, x);
            }
        }
    }
}

// Compute the scores' exponentials as words along the keys, and add them to the sum.
template <class T>
inline void exponentials(const ForwardScratch<T>& scratch, std::ptrdiff_t count,
                         Statistics& softmax) {
    const float* from = scratch.scores;
    word* to = scratch.weights;
    for (std::ptrdiff_t j = 0; j < count; j += 2, from += 2 * GROUP) {
        __m512 p[2][2];
#pragma GCC unroll 2
        for (int r = 0; r < 2; ++r) {
#pragma GCC unroll 2
            for (int v = 0; v < 2; ++v) {
                p[r][v] =
                    exp2(_mm512_sub_ps(load(from + r * GROUP + v * LANES), softmax.greatest[v]));
                softmax.sum[v] = _mm512_add_ps(softmax.sum[v], p[r][v]);
            }
        }
        if constexpr (WIDTH<T> == 2) {
            const __m512i first = round_row(p[0][0], p[0][1]), second = round_row(p[1][0], p[1][1]);
            store_words(to, pair_rows(first, second, false));
            store_words(to + LANES, pair_rows(first, second, true));
        } else {
            for (int i = 0; i < 4; ++i)
                store_words(to + i * LANES, _mm512_castps_si512(p[i / 2][i % 2]));
        }
        to += 2 / WIDTH<T> * GROUP;
    }
}

template <class T>
inline void attend_block(const Shape& shape, const ForwardScratch<T>& scratch, const View& view,
                         std::ptrdiff_t first_key, std::ptrdiff_t count, bool is_first,
                         Statistics& softmax) {
    const std::ptrdiff_t rows = round_up(count, ROWS);
    __m512 greatest[2] = {softmax.greatest[0], softmax.greatest[1]};
    score_block(shape, scratch, view, first_key, rows, greatest);
    const __m512 shrink[2] = {exp2(_mm512_sub_ps(softmax.greatest[0], greatest[0])),
                              exp2(_mm512_sub_ps(softmax.greatest[1], greatest[1]))};
    for (int v = 0; v < 2; ++v) {
        softmax.greatest[v] = greatest[v];
        softmax.sum[v] = _mm512_mul_ps(softmax.sum[v], shrink[v]);
    }
    exponentials(scratch, rows, softmax);
    for (std::ptrdiff_t row = 0; row < scratch.rows; row += ROWS) {
        float* const out = scratch.out + row * GROUP;
        Tile<2> tile;
        tile.multiply<T, 1, ROWS>(
            scratch.value +
                (row * scratch.keys + (first_key - scratch.first_key) * ROWS) / WIDTH<T>,
            scratch.weights, GROUP, rows / WIDTH<T>);
        if (is_first) {
            for (int i = 0; i < 16; ++i) store(out + i * LANES, tile.sums[i / 2][i % 2]);
        } else {
            for (int i = 0; i < 16; ++i) {
                store(out + i * LANES, _mm512_fmadd_ps(load(out + i * LANES), shrink[i % 2],
                                                       tile.sums[i / 2][i % 2]));
            }
        }
    }
}

// Process one group of 32 queries with all keys they see.
template <class T>
inline void attend_group(const Shape& shape, const ForwardScratch<T>& scratch, const View& view,
                         const Rows<const T>& query, std::ptrdiff_t first_query, const Rows<T>& out,
                         float* lse) {
    pack_transposed(query.from(first_query), GROUP, scratch.query);
    query.from(first_query + GROUP).template prefetch<false>(GROUP);
    out.from(first_query).template prefetch<true>(GROUP);
    Statistics softmax;
    for (int v = 0; v < 2; ++v) {
        softmax.greatest[v] = _mm512_set1_ps(-FLT_MAX);
        softmax.sum[v] = _mm512_setzero_ps();
    }
    const std::ptrdiff_t begin = round_down(view.some.begin, ROWS), end = view.some.end;
    for (std::ptrdiff_t j = begin; j < end; j += FORWARD_KEYS) {
        attend_block(shape, scratch, view, j, std::min(FORWARD_KEYS, end - j), j == begin, softmax);
    }
    if (view.some.empty()) std::fill_n(scratch.out, scratch.rows * GROUP, 0.0f);
    for (int v = 0; v < 2; ++v) {
        const std::ptrdiff_t first = first_query + v * LANES;
        if (first >= shape.queries) break;
        const __mmask16 none = _mm512_cmp_ps_mask(softmax.sum[v], _mm512_setzero_ps(), _CMP_EQ_OQ);
        const __m512 inverse = _mm512_mask_mov_ps(
            _mm512_div_ps(_mm512_set1_ps(1.0f), softmax.sum[v]), none, _mm512_setzero_ps());
        unpack_transposed(scratch.out + v * LANES, GROUP, inverse, out.from(first));
        alignas(64) float greatest[LANES], sum[LANES];
        store(greatest, softmax.greatest[v]);
        store(sum, softmax.sum[v]);
        for (std::ptrdiff_t i = 0; i < LANES && first + i < shape.queries; ++i) {
            // With infinity, a query with only -inf scores has no weights in the backward pass.
            lse[first + i] = sum[i] == 0.0f ? std::numeric_limits<float>::infinity()
                                            : greatest[i] * LN_2 + std::log(sum[i]);
        }
    }
}

// Process queries [first, last), in groups of 32, of each head that shares one key-value head.
template <class T>
inline void forward_task(const Shape& shape, ForwardScratch<T>& scratch, std::ptrdiff_t batch,
                         std::ptrdiff_t group, std::ptrdiff_t first, std::ptrdiff_t last,
                         const Heads<const T>& query, const Heads<const T>& key,
                         const Heads<const T>& value, const Heads<T>& out, float* lse) {
    const Interval seen = seen_by(shape, batch, first, last);
    scratch.first_key = round_down(seen.begin, LANES);
    scratch.keys = round_up(seen.end - scratch.first_key, LANES);
    const auto packed = [&](const Heads<const T>& heads) {
        return heads.rows(batch, group, seen.end, shape.size).from(scratch.first_key);
    };
    pack_row_panels(packed(key), scratch.key);
    pack_across_panels(packed(value), scratch.keys, scratch.value);
    for (std::ptrdiff_t head = group * shape.sharing(); head < (group + 1) * shape.sharing();
         ++head) {
        const Rows<const T> queries = query.rows(batch, head, shape.queries, shape.size);
        const Rows<T> rows = out.rows(batch, head, shape.queries, shape.size);
        for (std::ptrdiff_t i = first; i < last; i += GROUP) {
            attend_group(shape, scratch, view_of(shape, batch, i), queries, i, rows,
                         lse + (batch * shape.heads + head) * shape.queries);
        }
    }
}

}  // namespace megacore
MEGACORE_AVX512_END
#endif
