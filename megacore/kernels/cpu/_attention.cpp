// Attention forward and backward for bf16 and fp32.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>

#include "_attention_backward.h"

namespace py = pybind11;

namespace megacore {

// A tensor [b, n, s, d] as Python tells it: its address and its strides on b, n and s in elements.
using Place = std::array<std::int64_t, 4>;
using Sizes = std::array<std::int64_t, 6>;

#ifdef MEGACORE_HAS_AVX512
namespace {

template <class T>
Heads<T> heads(const Place& place) {
    return {reinterpret_cast<T*>(place[0]), place[1], place[2], place[3]};
}

// Memory of one thread that is kept between calls: fresh pages would cost more than a small layer's attention.
class ThreadMemory {
public:
    ThreadMemory() = default;
    ThreadMemory(const ThreadMemory&) = delete;
    ThreadMemory& operator=(const ThreadMemory&) = delete;
    ~ThreadMemory() { std::free(memory_); }

    // Null when there is not enough.
    word* reserve(std::ptrdiff_t words) {
        if (words > size_) {
            std::free(memory_);
            memory_ = static_cast<word*>(std::aligned_alloc(64, round_up(words, LANES) * sizeof(word)));
            size_ = memory_ == nullptr ? 0 : words;
        }
        return memory_;
    }

private:
    word* memory_ = nullptr;
    std::ptrdiff_t size_ = 0;
};

thread_local ThreadMemory thread_memory;

template <class T>
void forward(const Shape& shape, const Place& query, const Place& key, const Place& value, const Place& out,
             float* lse, int threads) {
    const std::ptrdiff_t units = shape.batch * shape.groups, blocks = (shape.queries + GROUP - 1) / GROUP;
    // Few heads are divided further; a query's result does not depend on where.
    const std::ptrdiff_t wanted = (4 * threads + units - 1) / units;
    const std::ptrdiff_t ranges = std::max<std::ptrdiff_t>(1, std::min(wanted, blocks / 4));
    const std::ptrdiff_t length = (blocks + ranges - 1) / ranges * GROUP;
    bool exhausted = false;
#pragma omp parallel num_threads(threads) reduction(|| : exhausted)
    {
        ForwardScratch<T> scratch(shape);
        word* const memory = thread_memory.reserve(scratch.total());
        exhausted = memory == nullptr;
        if (!exhausted) scratch.place(memory);
#pragma omp for schedule(dynamic, 1)
        for (std::ptrdiff_t i = 0; i < units * ranges; ++i) {
            const std::ptrdiff_t unit = i % units, first = (ranges - 1 - i / units) * length;
            const std::ptrdiff_t last = std::min(first + length, shape.queries);
            if (exhausted || first >= last) continue;
            forward_task<T>(shape, scratch, unit / shape.groups, unit % shape.groups, first, last,
                            heads<const T>(query), heads<const T>(key), heads<const T>(value), heads<T>(out), lse);
        }
    }
    if (exhausted) throw std::bad_alloc();
}

template <class T>
void backward(const Shape& shape, BackwardTensors<T>& tensors, int threads) {
    const KeyRanges ranges(shape);
    const std::ptrdiff_t units = shape.batch * shape.groups, blocks = (shape.queries + QUERIES - 1) / QUERIES;
    const std::ptrdiff_t all_blocks = shape.batch * shape.heads * blocks;
    std::unique_ptr<float[]> parts;
    if (ranges.count > 1) {
        parts.reset(new float[ranges.count * all_blocks * round_up(shape.size, LANES) * QUERIES]);
    }
    tensors.parts = parts.get();
    bool exhausted = false;
#pragma omp parallel num_threads(threads) reduction(|| : exhausted)
    {
        BackwardScratch<T> scratch(shape);
        word* const memory = thread_memory.reserve(scratch.total());
        exhausted = memory == nullptr;
        if (!exhausted) scratch.place(memory);
#pragma omp for schedule(dynamic, 1)
        for (std::ptrdiff_t i = 0; i < units * ranges.count; ++i) {
            const std::ptrdiff_t unit = i % units;
            if (exhausted) continue;
            backward_task<T>(shape, scratch, unit / shape.groups, unit % shape.groups, i / units, tensors);
        }
        if (ranges.count > 1) {
#pragma omp for schedule(static)
            for (std::ptrdiff_t i = 0; i < all_blocks; ++i) {
                const std::ptrdiff_t head = i / blocks;
                sum_parts<T>(shape, ranges, head / shape.heads, head % shape.heads, i % blocks * QUERIES, tensors);
            }
        }
    }
    if (exhausted) throw std::bad_alloc();
}

Shape shape_of(const Sizes& sizes, double scale, bool causal) {
    return {sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], static_cast<float>(scale), causal};
}

}  // namespace
#endif

// Raise unless the kernel of this type runs here.
void require(bool is_bf16) {
    if (!(is_bf16 ? runs_bf16() : runs_fp32())) throw std::runtime_error("this CPU has no AVX-512 for attention");
}

void attention_forward(bool is_bf16, const Sizes& sizes, double scale, bool causal, const Place& query,
                       const Place& key, const Place& value, const Place& out, std::uintptr_t lse, int threads) {
    require(is_bf16);
#ifdef MEGACORE_HAS_AVX512
    const auto run = is_bf16 ? &forward<bf16> : &forward<float>;
    run(shape_of(sizes, scale, causal), query, key, value, out, reinterpret_cast<float*>(lse), threads);
#endif
}

#ifdef MEGACORE_HAS_AVX512
template <class T>
void run_backward(const Shape& shape, const std::array<Place, 5>& inputs, std::uintptr_t lse,
                  const std::array<Place, 3>& grads, int threads) {
    BackwardTensors<T> tensors{heads<const T>(inputs[0]),
                               heads<const T>(inputs[1]),
                               heads<const T>(inputs[2]),
                               heads<const T>(inputs[3]),
                               heads<const T>(inputs[4]),
                               reinterpret_cast<const float*>(lse),
                               heads<T>(grads[0]),
                               heads<T>(grads[1]),
                               heads<T>(grads[2]),
                               nullptr};
    backward<T>(shape, tensors, threads);
}
#endif

void attention_backward(bool is_bf16, const Sizes& sizes, double scale, bool causal,
                        const std::array<Place, 5>& inputs, std::uintptr_t lse, const std::array<Place, 3>& grads,
                        int threads) {
    require(is_bf16);
#ifdef MEGACORE_HAS_AVX512
    const auto run = is_bf16 ? &run_backward<bf16> : &run_backward<float>;
    run(shape_of(sizes, scale, causal), inputs, lse, grads, threads);
#endif
}

}  // namespace megacore

PYBIND11_MODULE(_attention, module) {
    module.doc() = "softmax(q k^T scale) v and its gradients; sizes are (b, n, g, queries, keys, d).";
    module.def("forward", &megacore::attention_forward, py::call_guard<py::gil_scoped_release>());
    module.def("backward", &megacore::attention_backward, py::call_guard<py::gil_scoped_release>());
}
