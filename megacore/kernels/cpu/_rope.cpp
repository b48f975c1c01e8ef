// Rotation of the first elements of each head; the two halves are paired as in GPT-NeoX and Llama.
#include "_kernels.h"

#include <array>

#include "_rows.h"

// Strides of batch, heads and sequence, in elements; the elements of a head are contiguous.
using Strides = std::array<std::ptrdiff_t, 3>;

#ifdef MEGACORE_HAS_AVX512
MEGACORE_AVX512_BEGIN
namespace megacore {
namespace {

template <class T>
void rotate_head(const T* x, const T* cosines, const T* sines, T* y, Index size, Index half,
                 __m512 sign) {
    columns(half, [&](Index c, auto lanes) __attribute__((always_inline)) {
        const __m512 cosine = load(cosines + c, lanes);
        const __m512 sine = _mm512_mul_ps(load(sines + c, lanes), sign);
        const __m512 first = load(x + c, lanes);
        const __m512 second = load(x + half + c, lanes);
        store(y + c, _mm512_fmsub_ps(first, cosine, _mm512_mul_ps(second, sine)), lanes);
        store(y + half + c, _mm512_fmadd_ps(second, cosine, _mm512_mul_ps(first, sine)), lanes);
    });
    if (2 * half < size) std::copy(x + 2 * half, x + size, y + 2 * half);
}

template <class T>
void rotate(std::uintptr_t x, const Strides& x_strides, std::uintptr_t cosines,
            std::uintptr_t sines, Index table_stride, std::uintptr_t y, const Strides& y_strides,
            Index batch, Index heads, Index sequence, Index size, Index rotated, bool back,
            int threads) {
    const __m512 sign = _mm512_set1_ps(back ? -1.0f : 1.0f);
    const auto head = [&](Index b, Index n, Index s) __attribute__((always_inline)) {
        const Index table = b * table_stride + s * rotated;
        rotate_head(at<T>(x) + b * x_strides[0] + n * x_strides[1] + s * x_strides[2],
                    at<T>(cosines) + table, at<T>(sines) + table,
                    at<T>(y) + b * y_strides[0] + n * y_strides[1] + s * y_strides[2], size,
                    rotated / 2, sign);
    };
    threads = useful(threads, batch * heads * sequence * size);
    // The inner loop follows the memory order.
    if (y_strides[1] < y_strides[2]) {
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
        for (Index b = 0; b < batch; ++b) {
            for (Index s = 0; s < sequence; ++s) {
                for (Index n = 0; n < heads; ++n) head(b, n, s);
            }
        }
    } else {
#pragma omp parallel for num_threads(threads) schedule(static) collapse(3)
        for (Index b = 0; b < batch; ++b) {
            for (Index n = 0; n < heads; ++n) {
                for (Index s = 0; s < sequence; ++s) head(b, n, s);
            }
        }
    }
}

}  // namespace
}  // namespace megacore
MEGACORE_AVX512_END
#endif

namespace {

using megacore::Index;

// The tables have contiguous rows [rotated]. table_stride is the stride between batches, 0 if all
// share one table.
void rotate(Address x, Index x_batch, Index x_head, Index x_place, Address cosines, Address sines,
            Index table_stride, Address y, Index y_batch, Index y_head, Index y_place, Index batch,
            Index heads, Index sequence, Index size, Index rotated, bool back, bool half,
            int threads) {
#ifdef MEGACORE_HAS_AVX512
    const auto run = half ? megacore::rotate<megacore::bf16> : megacore::rotate<float>;
    run(x, {x_batch, x_head, x_place}, cosines, sines, table_stride, y, {y_batch, y_head, y_place},
        batch, heads, sequence, size, rotated, back, threads);
#else
    no_kernels();
#endif
}

}  // namespace

void add_rope(py::module_& module) {
    module.def("rotate", &rotate, Unlocked());
}
