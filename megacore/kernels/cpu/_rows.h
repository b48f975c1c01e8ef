// Matrices of contiguous rows: loops over columns, division into blocks of rows, and sums over
// rows.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

#include "_vector.h"

namespace megacore {

using Index = std::ptrdiff_t;

template <class T>
T* at(std::uintptr_t address) {
    return reinterpret_cast<T*>(address);
}

// Return the number of threads to use: one for a small tensor, which takes less time than starting
// threads. Otherwise all, because OpenMP ends the threads that a smaller team does not use.
inline int useful(int threads, Index elements) { return elements < 32768 ? 1 : threads; }

// Blocks of rows, over which sums are added in order. They depend only on the number of rows, and
// so does the rounding of the sums.
struct Blocks {
    explicit Blocks(Index rows)
        : rows(rows),
          size(std::max<Index>(16, (rows + 63) / 64)),
          count((rows + size - 1) / size) {}
    Index first(Index block) const { return block * size; }
    Index end(Index block) const { return std::min(rows, (block + 1) * size); }

    Index rows, size, count;
};

}  // namespace megacore

#ifdef MEGACORE_HAS_AVX512
MEGACORE_AVX512_BEGIN
namespace megacore {

// The columns of a vector that exist: all 16, or the first ones in the last vector of a row.
struct All {};
struct Some {
    __mmask16 lanes;
};

template <class T>
inline __m512 load(const T* from, All) {
    return load(from);
}
template <class T>
inline __m512 load(const T* from, Some some) {
    return load(from, some.lanes);
}
template <class T>
inline void store(T* to, __m512 x, All) {
    store(to, x);
}
template <class T>
inline void store(T* to, __m512 x, Some some) {
    store(to, x, some.lanes);
}

// Return x with zero, or another value, in columns that do not exist.
inline __m512 present(__m512 x, All) { return x; }
inline __m512 present(__m512 x, Some some) { return _mm512_maskz_mov_ps(some.lanes, x); }
inline __m512 present_or(__m512 x, __m512, All) { return x; }
inline __m512 present_or(__m512 x, __m512 other, Some some) {
    return _mm512_mask_mov_ps(other, some.lanes, x);
}

// Call body(column, All or Some) for every 16 columns.
template <class Body>
inline __attribute__((always_inline)) void columns(Index count, const Body& body) {
    Index column = 0;
    for (; column + 16 <= count; column += 16) body(column, All{});
    if (column < count) body(column, Some{first_lanes(count - column)});
}

// Call body(number of rows as an integral constant, first row) for kGroup rows at a time, and for
// the remaining rows one by one.
template <Index kGroup, class Body>
inline __attribute__((always_inline)) void in_groups(Index row, Index end, const Body& body) {
    for (; row + kGroup <= end; row += kGroup) body(std::integral_constant<Index, kGroup>{}, row);
    for (; row < end; ++row) body(std::integral_constant<Index, 1>{}, row);
}

// Compute out[column] as the sum over the blocks' rows of `partial`, `stride` apart, in order.
template <class T>
void add_blocks(const float* partial, Index blocks, Index stride, Index cols, T* out) {
    columns(cols, [&](Index c, auto lanes) __attribute__((always_inline)) {
        __m512 total = load(partial + c, lanes);
        for (Index block = 1; block < blocks; ++block) {
            total = _mm512_add_ps(total, load(partial + block * stride + c, lanes));
        }
        store(out + c, total, lanes);
    });
}

// Sums over rows: of each block, for `width` columns, then over the blocks.
class Sums {
  public:
    Sums(const Blocks& blocks, Index width)
        : count_(std::max<Index>(1, blocks.count)),
          width_(width),
          partial_(new float[count_ * width]) {
        if (blocks.count == 0) clear(0);
    }
    // Set a block's sums to zero and return them.
    float* clear(Index block) {
        std::fill_n(partial_.get() + block * width_, width_, 0.0f);
        return partial_.get() + block * width_;
    }
    template <class T>
    void total(Index first, Index cols, T* out) const {
        add_blocks(partial_.get() + first, count_, width_, cols, out);
    }

  private:
    Index count_, width_;
    std::unique_ptr<float[]> partial_;
};

}  // namespace megacore
MEGACORE_AVX512_END
#endif
