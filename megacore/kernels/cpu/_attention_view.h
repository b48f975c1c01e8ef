// The keys that queries see: one interval per query, from spans or from the causal mask.
#pragma once

#include <algorithm>
#include <climits>

#include "_attention_tile.h"

#ifdef MEGACORE_HAS_AVX512
namespace megacore {

constexpr std::ptrdiff_t GROUP = 2 * LANES;

struct Shape {
    std::ptrdiff_t batch;
    std::ptrdiff_t heads;
    std::ptrdiff_t groups;  // key-value heads
    std::ptrdiff_t queries;
    std::ptrdiff_t keys;
    std::ptrdiff_t size;  // d, elements of a head
    float scale;
    bool causal;
    // First and last visible key of each query, [b or 1][queries], or null.
    const std::int32_t *first, *last;
    std::ptrdiff_t span_stride;  // from sample to sample

    std::ptrdiff_t sharing() const { return heads / groups; }
};

// Keys [begin, end).
struct Interval {
    std::ptrdiff_t begin, end;

    bool empty() const { return begin >= end; }
    Interval operator&(const Interval& other) const {
        return {std::max(begin, other.begin), std::min(end, other.end)};
    }
    // Return the smallest interval that contains both.
    Interval operator|(const Interval& other) const {
        if (empty() || other.empty()) return empty() ? other : *this;
        return {std::min(begin, other.begin), std::max(end, other.end)};
    }
    bool contains(std::ptrdiff_t key, std::ptrdiff_t count) const {
        return begin <= key && key + count <= end;
    }
    bool meets(std::ptrdiff_t key, std::ptrdiff_t count) const {
        return !(*this & Interval{key, key + count}).empty();
    }
};

// Visible keys of a group of 32 queries.
struct View {
    alignas(64) std::int32_t first[GROUP], last[GROUP];
    Interval some;   // contains the keys that at least one query sees
    Interval every;  // the keys that all queries see
};

}  // namespace megacore

MEGACORE_AVX512_BEGIN
namespace megacore {

// Return the mask of the queries that see the key, among the 16 from `lane` on.
MEGACORE_INLINE __mmask16 seeing(const View& view, std::ptrdiff_t lane, std::ptrdiff_t key) {
    const __m512i keys = _mm512_set1_epi32(static_cast<int>(key));
    return _mm512_cmple_epi32_mask(_mm512_load_si512(view.first + lane), keys) &
           _mm512_cmpge_epi32_mask(_mm512_load_si512(view.last + lane), keys);
}

inline View view_of(const Shape& shape, std::ptrdiff_t batch, std::ptrdiff_t first_query) {
    const __m512i zero = _mm512_setzero_si512(),
                  end = _mm512_set1_epi32(static_cast<int>(shape.keys - 1));
    const __m512i count =
        _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    View view;
    view.some = {INT_MAX, 0};
    view.every = {0, shape.keys};
    for (std::ptrdiff_t lane = 0; lane < GROUP; lane += LANES) {
        const std::ptrdiff_t query = first_query + lane;
        const __mmask16 exist = first_lanes(std::max<std::ptrdiff_t>(0, shape.queries - query));
        __m512i first = zero, last = end;
        if (shape.first != nullptr) {
            const std::ptrdiff_t place = batch * shape.span_stride + query;
            first = _mm512_max_epi32(zero, _mm512_maskz_loadu_epi32(exist, shape.first + place));
            last = _mm512_min_epi32(end, _mm512_maskz_loadu_epi32(exist, shape.last + place));
        } else if (shape.causal) {
            last = _mm512_min_epi32(
                end, _mm512_add_epi32(count, _mm512_set1_epi32(static_cast<int>(query))));
        }
        _mm512_store_si512(view.first + lane, first);
        _mm512_store_si512(view.last + lane, last);
        const __mmask16 see = _mm512_mask_cmple_epi32_mask(exist, first, last);
        if (see != 0) {
            view.some = view.some | Interval{_mm512_mask_reduce_min_epi32(see, first),
                                             _mm512_mask_reduce_max_epi32(see, last) + 1};
        }
        if (exist != 0) {
            view.every = view.every & Interval{_mm512_mask_reduce_max_epi32(exist, first),
                                               _mm512_mask_reduce_min_epi32(exist, last) + 1};
        }
    }
    return view;
}

// Return an interval that contains the keys that queries [first, last) see; first is a multiple of
// 32.
inline Interval seen_by(const Shape& shape, std::ptrdiff_t batch, std::ptrdiff_t first,
                        std::ptrdiff_t last) {
    Interval seen{0, 0};
    for (std::ptrdiff_t i = first; i < std::min(last, shape.queries); i += GROUP) {
        seen = seen | view_of(shape, batch, i).some;
    }
    return seen;
}

}  // namespace megacore
MEGACORE_AVX512_END
#endif
