// residual + branch + bias, with dropout if there is a mask. The backward pass sums the bias's
// gradient in one pass with the branch's.
#include "_kernels.h"

#include "_rows.h"

#ifdef MEGACORE_HAS_AVX512
MEGACORE_AVX512_BEGIN
namespace megacore {
namespace {

constexpr Index kGroup = 4;  // rows per load and store of the sums over rows

// bias, residual and mask may be null; without a mask, scale has no effect.
template <class T>
void forward(std::uintptr_t branch, Index branch_stride, std::uintptr_t bias,
             std::uintptr_t residual, Index residual_stride, std::uintptr_t mask, Index mask_stride,
             float scale, std::uintptr_t y, Index rows, Index cols, int threads) {
    threads = useful(threads, rows * cols);
    const __m512 factor = _mm512_set1_ps(scale);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Index row = 0; row < rows; ++row) {
        const T* branches = at<T>(branch) + row * branch_stride;
        const T* residuals = residual ? at<T>(residual) + row * residual_stride : nullptr;
        const T* kept = mask ? at<T>(mask) + row * mask_stride : nullptr;
        T* to = at<T>(y) + row * cols;
        columns(cols, [&](Index c, auto lanes) __attribute__((always_inline)) {
            __m512 value = load(branches + c, lanes);
            if (bias) value = _mm512_add_ps(value, load(at<T>(bias) + c, lanes));
            if (kept) value = _mm512_mul_ps(value, _mm512_mul_ps(load(kept + c, lanes), factor));
            if (residuals) value = _mm512_add_ps(load(residuals + c, lanes), value);
            store(to + c, value, lanes);
        });
    }
}

// dbranch = dy * mask * scale; without a mask it equals dy and is not written. dbias is its sum
// over rows, or null.
template <class T>
void backward(std::uintptr_t dy, Index dy_stride, std::uintptr_t mask, Index mask_stride,
              float scale, std::uintptr_t dbranch, std::uintptr_t dbias, Index rows, Index cols,
              int threads) {
    const Blocks blocks(rows);
    Sums sums(blocks, dbias ? cols : 0);
    const __m512 factor = _mm512_set1_ps(scale);
    threads = useful(threads, rows * cols);
#pragma omp parallel for num_threads(threads) schedule(static)
    for (Index block = 0; block < blocks.count; ++block) {
        float* own = dbias ? sums.clear(block) : nullptr;
        in_groups<kGroup>(blocks.first(block), blocks.end(block), [&](auto group, Index row) {
            columns(cols, [&](Index c, auto lanes) __attribute__((always_inline)) {
                __m512 total = own ? load(own + c, lanes) : _mm512_setzero_ps();
                for (Index r = row; r < row + decltype(group)::value; ++r) {
                    __m512 grad = load(at<T>(dy) + r * dy_stride + c, lanes);
                    if (mask) {
                        const __m512 kept = load(at<T>(mask) + r * mask_stride + c, lanes);
                        grad = _mm512_mul_ps(grad, _mm512_mul_ps(kept, factor));
                        store(at<T>(dbranch) + r * cols + c, grad, lanes);
                    }
                    total = _mm512_add_ps(total, grad);
                }
                if (own) store(own + c, total, lanes);
            });
        });
    }
    if (dbias) sums.total(0, cols, at<T>(dbias));
}

}  // namespace
}  // namespace megacore
MEGACORE_AVX512_END
#endif

namespace {

using megacore::Index;

void forward(Address branch, Index branch_stride, Address bias, Address residual,
             Index residual_stride, Address mask, Index mask_stride, float scale, Address y,
             Index rows, Index cols, bool half, int threads) {
#ifdef MEGACORE_HAS_AVX512
    const auto run = half ? megacore::forward<megacore::bf16> : megacore::forward<float>;
    run(branch, branch_stride, bias, residual, residual_stride, mask, mask_stride, scale, y, rows,
        cols, threads);
#else
    no_kernels();
#endif
}

void backward(Address dy, Index dy_stride, Address mask, Index mask_stride, float scale,
              Address dbranch, Address dbias, Index rows, Index cols, bool half, int threads) {
#ifdef MEGACORE_HAS_AVX512
    const auto run = half ? megacore::backward<megacore::bf16> : megacore::backward<float>;
    run(dy, dy_stride, mask, mask_stride, scale, dbranch, dbias, rows, cols, threads);
#else
    no_kernels();
#endif
}

}  // namespace

void add_residual(py::module_& module) {
    module.def("residual_forward", &forward, Unlocked());
    module.def("residual_backward", &backward, Unlocked());
}
