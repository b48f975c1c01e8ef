// Softmax of attention's scaled and masked scores with dropout, forward and backward, including the
// gradient of a bias.
#include "_kernels.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "_rows.h"

#ifdef MEGACORE_HAS_AVX512
MEGACORE_AVX512_BEGIN
namespace megacore {
namespace {

struct Shape {
    Index batch, heads, queries, keys;
    bool causal;
    // Return the number of keys that a query sees. The queries are at the positions of the last
    // keys; queries before the first key see none.
    Index seen(Index query) const {
        return causal ? std::max<Index>(0, keys - queries + query + 1) : keys;
    }
    Index row(Index b, Index n, Index q) const { return ((b * heads + n) * queries + q) * keys; }
};

template <class T>
void forward_row(const T* scores, const T* bias, const T* kept, T* probs, T* dropped,
                 float* scratch, Index seen, Index keys, float scale, float keep_scale) {
    const __m512 factor = _mm512_set1_ps(scale);
    const __m512 lowest = _mm512_set1_ps(-std::numeric_limits<float>::infinity());
    __m512 highest = lowest;
    columns(seen, [&](Index c, auto lanes) __attribute__((always_inline)) {
        __m512 score = _mm512_mul_ps(load(scores + c, lanes), factor);
        if (bias) score = _mm512_add_ps(score, load(bias + c, lanes));
        store(scratch + c, score, lanes);
        highest = _mm512_max_ps(highest, present_or(score, lowest, lanes));
    });
    const float top = maximum(highest);
    // A query that sees nothing has only zero weights.
    const __m512 shift =
        _mm512_set1_ps(top == -std::numeric_limits<float>::infinity() ? 0.0f : top);
    __m512 total = _mm512_setzero_ps();
    columns(seen, [&](Index c, auto lanes) __attribute__((always_inline)) {
        const __m512 power = exp(_mm512_sub_ps(load(scratch + c, lanes), shift));
        store(scratch + c, power, lanes);
        total = _mm512_add_ps(total, present(power, lanes));
    });
    const float mass = sum(total);
    const __m512 share = _mm512_set1_ps(mass == 0.0f ? 0.0f : 1.0f / mass);
    const __m512 keep = _mm512_set1_ps(keep_scale);
    columns(seen, [&](Index c, auto lanes) __attribute__((always_inline)) {
        const __m512 prob = _mm512_mul_ps(load(scratch + c, lanes), share);
        store(probs + c, prob, lanes);
        if (kept)
            store(dropped + c, _mm512_mul_ps(prob, _mm512_mul_ps(load(kept + c, lanes), keep)),
                  lanes);
    });
    std::fill(probs + seen, probs + keys, T{});
    if (kept) std::fill(dropped + seen, dropped + keys, T{});
}

// If dbias is not null, the row's gradient is added to it.
template <class T>
void backward_row(const T* grads, const T* probs, const T* kept, T* dscores, float* dbias,
                  Index seen, Index keys, float scale, float keep_scale) {
    const __m512 keep = _mm512_set1_ps(keep_scale);
    const __m512 factor = _mm512_set1_ps(scale);
    const auto grad = [&](Index c, auto lanes) __attribute__((always_inline)) {
        const __m512 value = load(grads + c, lanes);
        return kept ? _mm512_mul_ps(value, _mm512_mul_ps(load(kept + c, lanes), keep)) : value;
    };
    __m512 total = _mm512_setzero_ps();
    columns(seen, [&](Index c, auto lanes) __attribute__((always_inline)) {
        total = _mm512_fmadd_ps(grad(c, lanes), load(probs + c, lanes), total);
    });
    const __m512 mean = _mm512_set1_ps(sum(total));
    columns(seen, [&](Index c, auto lanes) __attribute__((always_inline)) {
        const __m512 inner =
            _mm512_mul_ps(load(probs + c, lanes), _mm512_sub_ps(grad(c, lanes), mean));
        if (dbias) store(dbias + c, _mm512_add_ps(load(dbias + c, lanes), inner), lanes);
        store(dscores + c, _mm512_mul_ps(inner, factor), lanes);
    });
    std::fill(dscores + seen, dscores + keys, T{});
}

template <class T>
void forward(std::uintptr_t scores, std::uintptr_t bias, Index bias_batch, Index bias_head,
             Index bias_query, std::uintptr_t kept, std::uintptr_t probs, std::uintptr_t dropped,
             const Shape& shape, float scale, float keep_scale, int threads) {
    threads = useful(threads, shape.row(shape.batch, 0, 0));
    // Allocated here because the parallel region must not throw.
    std::vector<float> scratch(threads * shape.keys);
#pragma omp parallel for num_threads(threads) schedule(static) collapse(3)
    for (Index b = 0; b < shape.batch; ++b) {
        for (Index n = 0; n < shape.heads; ++n) {
            for (Index q = 0; q < shape.queries; ++q) {
                const Index row = shape.row(b, n, q);
                const Index of_bias = b * bias_batch + n * bias_head + q * bias_query;
                forward_row(at<T>(scores) + row, bias ? at<T>(bias) + of_bias : nullptr,
                            kept ? at<T>(kept) + row : nullptr, at<T>(probs) + row,
                            kept ? at<T>(dropped) + row : nullptr,
                            scratch.data() + thread_number() * shape.keys, shape.seen(q),
                            shape.keys, scale, keep_scale);
            }
        }
    }
}

// The bias's gradient [heads, queries, keys] is the sum over the batch, in order.
template <class T>
void backward(std::uintptr_t grads, std::uintptr_t probs, std::uintptr_t kept,
              std::uintptr_t dscores, std::uintptr_t dbias, const Shape& shape, float scale,
              float keep_scale, int threads) {
    threads = useful(threads, shape.row(shape.batch, 0, 0));
    std::vector<float> sums(dbias ? threads * shape.keys : 0);
#pragma omp parallel for num_threads(threads) schedule(static) collapse(2)
    for (Index n = 0; n < shape.heads; ++n) {
        for (Index q = 0; q < shape.queries; ++q) {
            float* const own = dbias ? sums.data() + thread_number() * shape.keys : nullptr;
            if (own) std::fill_n(own, shape.keys, 0.0f);
            for (Index b = 0; b < shape.batch; ++b) {
                const Index row = shape.row(b, n, q);
                backward_row(at<T>(grads) + row, at<T>(probs) + row,
                             kept ? at<T>(kept) + row : nullptr, at<T>(dscores) + row, own,
                             shape.seen(q), shape.keys, scale, keep_scale);
            }
            if (own) add_blocks(own, 1, 0, shape.keys, at<T>(dbias) + shape.row(0, n, q));
        }
    }
}

}  // namespace
}  // namespace megacore
MEGACORE_AVX512_END
#endif

namespace {

using megacore::Index;

// All tensors except the bias are contiguous [batch, heads, queries, keys]. bias and kept may be
// null.
void forward(Address scores, Address bias, Index bias_batch, Index bias_head, Index bias_query,
             Address kept, Address probs, Address dropped, Index batch, Index heads, Index queries,
             Index keys, bool causal, float scale, float keep_scale, bool half, int threads) {
#ifdef MEGACORE_HAS_AVX512
    const auto run = half ? megacore::forward<megacore::bf16> : megacore::forward<float>;
    run(scores, bias, bias_batch, bias_head, bias_query, kept, probs, dropped,
        {batch, heads, queries, keys, causal}, scale, keep_scale, threads);
#else
    no_kernels();
#endif
}

void backward(Address grads, Address probs, Address kept, Address dscores, Address dbias,
              Index batch, Index heads, Index queries, Index keys, bool causal, float scale,
              float keep_scale, bool half, int threads) {
#ifdef MEGACORE_HAS_AVX512
    const auto run = half ? megacore::backward<megacore::bf16> : megacore::backward<float>;
    run(grads, probs, kept, dscores, dbias, {batch, heads, queries, keys, causal}, scale,
        keep_scale, threads);
#else
    no_kernels();
#endif
}

}  // namespace

void add_softmax(py::module_& module) {
    module.def("softmax_forward", &forward, Unlocked());
    module.def("softmax_backward", &backward, Unlocked());
}
