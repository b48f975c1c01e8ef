// Matrices of contiguous rows: how kernels walk along their columns, divide their rows and sum over
// them.
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

// Starting the threads takes longer than a small tensor. One or all: OpenMP ends threads that a
// smaller team leaves.
inline int useful(int threads, Index elements) { return elements < 32768 ? 1 : threads; }

// Blocks of rows whose sums are added up in order. They depend on the rows alone: so does what the
// sums round to.
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

// Which of 16 columns there are: all, or the first of them in a row's last piece.
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

// Zero, or another value, where there is no column.
inline __m512 present(__m512 x, All) { return x; }
inline __m512 present(__m512 x, Some some) { return _mm512_maskz_mov_ps(some.lanes, x); }
inline __m512 present_or(__m512 x, __m512, All) { return x; }
inline __m512 present_or(__m512 x, __m512 other, Some some) {
    return _mm512_mask_mov_ps(other, some.lanes, x);
}

// body(column, All or Some) for every 16 columns.
template <class Body>
inline __attribute__((always_inline)) void columns(Index count, const Body& body) {
    Index column = 0;
    for (; column + 16 <= count; column += 16) body(column, All{});
    if (column < count) body(column, Some{first_lanes(count - column)});
}

// body(an integral constant of how many rows, the first of them): kGroup at once, what is left one
// by one.
template <Index kGroup, class Body>
inline __attribute__((always_inline)) void in_groups(Index row, Index end, const Body& body) {
    for (; row + kGroup <= end; row += kGroup) body(std::integral_constant<Index, kGroup>{}, row);
    for (; row < end; ++row) body(std::integral_constant<Index, 1>{}, row);
}

// out[column] = sum of the blocks' rows of `partial`, which lie `stride` apart, from the first to
// the last.
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

// Sums over rows: each block's, of `width` columns, and then theirs.
class Sums {
  public:
    Sums(const Blocks& blocks, Index width)
        : count_(std::max<Index>(1, blocks.count)),
          width_(width),
          partial_(new float[count_ * width]) {
        if (blocks.count == 0) clear(0);
    }
    // A block's sums, set to zero.
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
