// LayerNorm and RMSNorm of rows, forward and backward: each row is read from memory once.
#include "_kernels.h"

#include <cmath>

#include "_rows.h"

#ifdef MEGACORE_HAS_AVX512
MEGACORE_AVX512_BEGIN
namespace megacore {
namespace {

template <class T>
// Number of rows that are processed together; they fit into the L1 cache.
constexpr Index kGroup = 8 / sizeof(T);

// Normalize kRows rows at a time, so that their additions do not wait for each other. bias may be
// null.
template <class T, bool kCentred, Index kRows>
void forward_rows(const T* x, Index x_stride, const T* weight, const T* bias, T* y, float* mean,
                  float* rstd, Index cols, float eps) {
    const float share = 1.0f / static_cast<float>(cols);
    __m512 middle[kRows], squares[kRows], factor[kRows];
    for (Index r = 0; r < kRows; ++r) middle[r] = squares[r] = _mm512_setzero_ps();
    if constexpr (kCentred) {
        columns(cols, [&](Index c, auto lanes) __attribute__((always_inline)) {
            for (Index r = 0; r < kRows; ++r)
                middle[r] = _mm512_add_ps(middle[r], load(x + r * x_stride + c, lanes));
        });
        for (Index r = 0; r < kRows; ++r) {
            mean[r] = sum(middle[r]) * share;
            middle[r] = _mm512_set1_ps(mean[r]);
        }
    }
    columns(cols, [&](Index c, auto lanes) __attribute__((always_inline)) {
        for (Index r = 0; r < kRows; ++r) {
            __m512 value = load(x + r * x_stride + c, lanes);
            if constexpr (kCentred) value = present(_mm512_sub_ps(value, middle[r]), lanes);
            squares[r] = _mm512_fmadd_ps(value, value, squares[r]);
        }
    });
    for (Index r = 0; r < kRows; ++r) {
        rstd[r] = 1.0f / std::sqrt(sum(squares[r]) * share + eps);
        factor[r] = _mm512_set1_ps(rstd[r]);
    }
    columns(cols, [&](Index c, auto lanes) __attribute__((always_inline)) {
        const __m512 gain = load(weight + c, lanes);
        const __m512 shift = kCentred && bias ? load(bias + c, lanes) : _mm512_setzero_ps();
        for (Index r = 0; r < kRows; ++r) {
            __m512 value = load(x + r * x_stride + c, lanes);
            if constexpr (kCentred) value = _mm512_sub_ps(value, middle[r]);
            value = _mm512_mul_ps(value, factor[r]);
            store(y + r * cols + c, _mm512_fmadd_ps(value, gain, shift), lanes);
        }
    });
}

// Compute the gradients of kRows rows, and add their parts of the parameters' gradients to dweight
// and dbias.
template <class T, bool kCentred, Index kRows>
void backward_rows(const T* dy, Index dy_stride, const T* x, Index x_stride, const T* weight,
                   const float* mean, const float* rstd, T* dx, float* dweight, float* dbias,
                   Index cols) {
    __m512 middle[kRows], factor[kRows], plain[kRows], scaled[kRows];
    for (Index r = 0; r < kRows; ++r) {
        middle[r] = _mm512_set1_ps(kCentred ? mean[r] : 0.0f);
        factor[r] = _mm512_set1_ps(rstd[r]);
        plain[r] = scaled[r] = _mm512_setzero_ps();
    }
    const auto normed = [&](Index r, Index c, auto lanes) __attribute__((always_inline)) {
        __m512 value = load(x + r * x_stride + c, lanes);
        if constexpr (kCentred) value = _mm512_sub_ps(value, middle[r]);
        return _mm512_mul_ps(value, factor[r]);
    };
    columns(cols, [&](Index c, auto lanes) __attribute__((always_inline)) {
        const __m512 gain = load(weight + c, lanes);
        __m512 weights = load(dweight + c, lanes);
        __m512 biases = kCentred ? load(dbias + c, lanes) : _mm512_setzero_ps();
        for (Index r = 0; r < kRows; ++r) {
            // zero beyond the last column
            const __m512 grad = load(dy + r * dy_stride + c, lanes);
            const __m512 unit = normed(r, c, lanes);
            weights = _mm512_fmadd_ps(grad, unit, weights);
            const __m512 inner = _mm512_mul_ps(grad, gain);
            scaled[r] = _mm512_fmadd_ps(inner, unit, scaled[r]);
            if constexpr (kCentred) {
                biases = _mm512_add_ps(biases, grad);
                plain[r] = _mm512_add_ps(plain[r], inner);
            }
        }
        store(dweight + c, weights, lanes);
        if constexpr (kCentred) store(dbias + c, biases, lanes);
    });
    const float share = 1.0f / static_cast<float>(cols);
    for (Index r = 0; r < kRows; ++r) {
        scaled[r] = _mm512_set1_ps(sum(scaled[r]) * share);
        if constexpr (kCentred) plain[r] = _mm512_set1_ps(sum(plain[r]) * share);
    }
    for (Index r = 0; r < kRows; ++r) {
        columns(cols, [&](Index c, auto lanes) __attribute__((always_inline)) {
            __m512 grad =
                _mm512_mul_ps(load(dy + r * dy_stride + c, lanes), load(weight + c, lanes));
            if constexpr (kCentred) grad = _mm512_sub_ps(grad, plain[r]);
            grad = _mm512_fnmadd_ps(normed(r, c, lanes), scaled[r], grad);
            store(dx + r * cols + c, _mm512_mul_ps(grad, factor[r]), lanes);
        });
    }
}

template <class T, bool kCentred>
void forward(std::uintptr_t x, Index x_stride, std::uintptr_t weight, std::uintptr_t bias,
             std::uintptr_t y, std::uintptr_t mean, std::uintptr_t rstd, Index rows, Index cols,
             float eps, int threads) {
    threads = useful(threads, rows * cols);
    const auto run = [&](auto group, Index row) {
        forward_rows<T, kCentred, decltype(group)::value>(
            at<T>(x) + row * x_stride, x_stride, at<T>(weight), at<T>(bias), at<T>(y) + row * cols,
            kCentred ? at<float>(mean) + row : nullptr, at<float>(rstd) + row, cols, eps);
    };
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Index group = 0; group < (rows + kGroup<T> - 1) / kGroup<T>; ++group) {
        in_groups<kGroup<T>>(group * kGroup<T>, std::min(rows, (group + 1) * kGroup<T>), run);
    }
}

template <class T, bool kCentred>
void backward(std::uintptr_t dy, Index dy_stride, std::uintptr_t x, Index x_stride,
              std::uintptr_t weight, std::uintptr_t mean, std::uintptr_t rstd, std::uintptr_t dx,
              std::uintptr_t dweight, std::uintptr_t dbias, Index rows, Index cols, int threads) {
    const Blocks blocks(rows);
    Sums sums(blocks, kCentred ? 2 * cols : cols);  // of dweight, then of dbias
    threads = useful(threads, rows * cols);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Index block = 0; block < blocks.count; ++block) {
        float* own = sums.clear(block);
        const auto run = [&](auto group, Index row) {
            backward_rows<T, kCentred, decltype(group)::value>(
                at<T>(dy) + row * dy_stride, dy_stride, at<T>(x) + row * x_stride, x_stride,
                at<T>(weight), kCentred ? at<float>(mean) + row : nullptr, at<float>(rstd) + row,
                at<T>(dx) + row * cols, own, own + cols, cols);
        };
        in_groups<kGroup<T>>(blocks.first(block), blocks.end(block), run);
    }
    sums.total(0, cols, at<T>(dweight));
    if (kCentred && dbias) sums.total(cols, cols, at<T>(dbias));
}

}  // namespace
}  // namespace megacore
MEGACORE_AVX512_END
#endif

namespace {

using megacore::Index;

// centred: LayerNorm, which has a mean; otherwise RMSNorm. bias is null without a bias. Strides are
// between rows, in elements.
void forward(Address x, Index x_stride, Address weight, Address bias, Address y, Address mean,
             Address rstd, Index rows, Index cols, float eps, bool centred, bool half,
             int threads) {
#ifdef MEGACORE_HAS_AVX512
    using megacore::bf16;
    const auto run =
        half ? (centred ? megacore::forward<bf16, true> : megacore::forward<bf16, false>)
             : (centred ? megacore::forward<float, true> : megacore::forward<float, false>);
    run(x, x_stride, weight, bias, y, mean, rstd, rows, cols, eps, threads);
#else
    no_kernels();
#endif
}

void backward(Address dy, Index dy_stride, Address x, Index x_stride, Address weight, Address mean,
              Address rstd, Address dx, Address dweight, Address dbias, Index rows, Index cols,
              bool centred, bool half, int threads) {
#ifdef MEGACORE_HAS_AVX512
    using megacore::bf16;
    const auto run =
        half ? (centred ? megacore::backward<bf16, true> : megacore::backward<bf16, false>)
             : (centred ? megacore::backward<float, true> : megacore::backward<float, false>);
    run(dy, dy_stride, x, x_stride, weight, mean, rstd, dx, dweight, dbias, rows, cols, threads);
#else
    no_kernels();
#endif
}

}  // namespace

void add_norm(py::module_& module) {
    module.def("norm_forward", &forward, Unlocked());
    module.def("norm_backward", &backward, Unlocked());
}
