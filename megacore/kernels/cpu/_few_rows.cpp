// The linear layer y = x Wᵀ + b of few rows in fp32, which is bound by reading W once from memory.
//
// BLAS reads a few adjacent rows of W at a time; one core of a Zen 3 then reaches 14 GB/s. Here a
// thread reads four distant runs of rows at the same time, each from its beginning to its end, as
// the CPU's prefetchers expect: 24 GB/s. Each element of y is summed in the same order for any
// number of rows and threads.
#include "_kernels.h"

#include "_vector.h"

#ifdef MEGACORE_HAS_AVX512
namespace {

constexpr int kStreams = 4;

struct Product {
    const float* x;
    std::ptrdiff_t rows, in_features;
    const float* weight;
    std::ptrdiff_t out_features;
    const float* bias;
    float share;  // factor on the bias
    float* y;
};

}  // namespace

#define MEGACORE_LANES 16
#define MEGACORE_WIDE 6
MEGACORE_AVX512_BEGIN
namespace {
namespace avx512 {
#include "_few_rows.h"
}
}  // namespace
MEGACORE_AVX512_END
#undef MEGACORE_LANES
#undef MEGACORE_WIDE

#define MEGACORE_LANES 8
#define MEGACORE_WIDE 3
#if defined(__clang__)
_Pragma("clang attribute push(__attribute__((target(\"avx2,fma\"))), apply_to=function)")
#else
_Pragma("GCC push_options")
_Pragma("GCC target(\"avx2,fma\")")
#endif
namespace {
namespace avx2 {
#include "_few_rows.h"
}
}  // namespace
#if defined(__clang__)
_Pragma("clang attribute pop")
#else
_Pragma("GCC pop_options")
#endif
#endif

namespace {

bool runs() {
#ifdef MEGACORE_HAS_AVX512
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

void multiply(Address x, std::ptrdiff_t rows, std::ptrdiff_t in_features, Address weight,
              std::ptrdiff_t out_features, Address bias, float share, Address y, int threads) {
#ifdef MEGACORE_HAS_AVX512
    const Product product = {reinterpret_cast<const float*>(x),
                             rows,
                             in_features,
                             reinterpret_cast<const float*>(weight),
                             out_features,
                             reinterpret_cast<const float*>(bias),
                             share,
                             reinterpret_cast<float*>(y)};
    const auto outputs = megacore::runs_fp32() ? avx512::outputs : avx2::outputs;
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int part = 0; part < threads; ++part)
        outputs(product, out_features * part / threads, out_features * (part + 1) / threads);
#else
    no_kernels();
#endif
}

}  // namespace

void add_few_rows(py::module_& module) {
    module.def("runs_few_rows", &runs);
    module.def("few_rows", &multiply, Unlocked());
}
