// AdamW over lists of fp32 tensors, and the sum of their squares.
//
// The tensors are cut into blocks that all threads share, so that small tensors do not each start a
// parallel region. An element is computed by the same instructions wherever it is.
#include "_kernels.h"

#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "_vector.h"

#ifdef MEGACORE_HAS_AVX512
MEGACORE_AVX512_BEGIN
namespace {

using megacore::bf16;
using megacore::first_lanes;
using megacore::load;
using megacore::store;

constexpr std::ptrdiff_t kLanes = 16;
constexpr std::ptrdiff_t kBlock = 8192;   // elements of an update that a thread takes at a time
constexpr __mmask16 kAll = 0xFFFF;
// Bits of SSE's control register that flush denormal results and operands to zero.
constexpr unsigned kFlushDenormals = 0x8040;

struct Block {
    std::size_t tensor;
    std::ptrdiff_t first, count;
};

std::vector<Block> blocks_of(const std::vector<std::ptrdiff_t>& sizes, std::ptrdiff_t length) {
    std::vector<Block> blocks;
    for (std::size_t tensor = 0; tensor < sizes.size(); ++tensor) {
        for (std::ptrdiff_t first = 0; first < sizes[tensor]; first += length) {
            blocks.push_back({tensor, first, std::min(length, sizes[tensor] - first)});
        }
    }
    return blocks;
}

// Convert floats to bf16, rounded to nearest, ties to even, like torch: denormals stay, NaN becomes
// 0x7FC0.
inline __m256i to_bf16(__m512 x) {
    const __m512i bits = _mm512_castps_si512(x);
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const __m512i rounded =
        _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_mov_epi32(_mm512_srli_epi32(rounded, 16), nan, _mm512_set1_epi32(0x7FC0)));
}

struct Adam {
    float factor, decay, first_weight, beta2, second_weight, root_factor, eps, step_size;

    Adam(std::int64_t step, double lr, double beta1, double beta2, double weight_decay, double eps,
         double divisor)
        : factor(static_cast<float>(1 / divisor)),
          decay(static_cast<float>(1 - lr * weight_decay)),
          first_weight(static_cast<float>(1 - beta1)),
          beta2(static_cast<float>(beta2)),
          second_weight(static_cast<float>(1 - beta2)),
          root_factor(
              static_cast<float>(1 / std::sqrt(1 - std::pow(beta2, static_cast<double>(step))))),
          eps(static_cast<float>(eps)),
          step_size(static_cast<float>(lr / (1 - std::pow(beta1, static_cast<double>(step))))) {}
};

struct Addresses {
    float* weight;
    const float* gradient;
    float* exp_avg;
    float* exp_avg_sq;
    bf16* target;  // may be null
};

// Update one vector like torch's fused kernel, except that two divisions by constants are products
// here: three divisions and the root would make the divider slower than the memory.
inline __attribute__((always_inline)) void update(const Addresses& at, std::ptrdiff_t i,
                                                  const Adam& adam, __mmask16 lanes) {
    const __m512 g = _mm512_mul_ps(load(at.gradient + i, lanes), _mm512_set1_ps(adam.factor));
    __m512 m = load(at.exp_avg + i, lanes), v = load(at.exp_avg_sq + i, lanes),
           w = load(at.weight + i, lanes);
    m = _mm512_fmadd_ps(_mm512_set1_ps(adam.first_weight), _mm512_sub_ps(g, m), m);
    const __m512 square = _mm512_mul_ps(_mm512_mul_ps(g, g), _mm512_set1_ps(adam.second_weight));
    v = _mm512_fmadd_ps(v, _mm512_set1_ps(adam.beta2), square);
    const __m512 denominator = _mm512_fmadd_ps(_mm512_sqrt_ps(v), _mm512_set1_ps(adam.root_factor),
                                               _mm512_set1_ps(adam.eps));
    const __m512 change =
        _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(adam.step_size), m), denominator);
    w = _mm512_fmsub_ps(w, _mm512_set1_ps(adam.decay), change);
    store(at.exp_avg + i, m, lanes);
    store(at.exp_avg_sq + i, v, lanes);
    store(at.weight + i, w, lanes);
    if (at.target) _mm256_mask_storeu_epi16(at.target + i, lanes, to_bf16(w));
}

void update(const Addresses& at, const Adam& adam, const Block& block) {
    const std::ptrdiff_t end = block.first + block.count;
    std::ptrdiff_t i = block.first;
    for (; i + kLanes <= end; i += kLanes) update(at, i, adam, kAll);
    if (i < end) update(at, i, adam, first_lanes(end - i));
}

void adamw(const std::vector<Addresses>& tensors, const std::vector<std::ptrdiff_t>& sizes,
           const Adam& adam, int threads) {
    const std::vector<Block> blocks = blocks_of(sizes, kBlock);
    const auto count = static_cast<std::ptrdiff_t>(blocks.size());
#pragma omp parallel num_threads(static_cast<int>(std::clamp<std::ptrdiff_t>(count, 1, threads)))
    {
        // The moments of weights without gradients decay until they are denormal. Denormals take up
        // to twice the time, and these values are far below eps.
        const unsigned modes = _mm_getcsr();
        _mm_setcsr(modes | kFlushDenormals);
#pragma omp for schedule(dynamic, 2)
        for (std::ptrdiff_t i = 0; i < count; ++i)
            update(tensors[blocks[i].tensor], adam, blocks[i]);
        _mm_setcsr(modes);
    }
}

}  // namespace
MEGACORE_AVX512_END
#endif

void add_adam(py::module_& module) {
#ifdef MEGACORE_HAS_AVX512
    using List = std::vector<std::uintptr_t>;
    module.def(
        "adamw",
        [](const List& weights, const List& gradients, const List& exp_avgs,
           const List& exp_avg_sqs, const List& targets, const std::vector<std::ptrdiff_t>& sizes,
           std::int64_t step, double lr, double beta1, double beta2, double weight_decay,
           double eps, double divisor, int threads) {
            std::vector<Addresses> tensors;
            for (std::size_t i = 0; i < sizes.size(); ++i) {
                tensors.push_back(
                    {reinterpret_cast<float*>(weights.at(i)),
                     reinterpret_cast<const float*>(gradients.at(i)),
                     reinterpret_cast<float*>(exp_avgs.at(i)),
                     reinterpret_cast<float*>(exp_avg_sqs.at(i)),
                     targets.empty() ? nullptr : reinterpret_cast<bf16*>(targets.at(i))});
            }
            adamw(tensors, sizes, Adam(step, lr, beta1, beta2, weight_decay, eps, divisor),
                  threads);
        },
        Unlocked());
#endif
}
