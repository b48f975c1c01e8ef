// Attention forward and backward for bf16 and fp32. The backward pass recomputes the weights from
// the log-sum-exp (Dao et al. 2022).
//
// A task of the backward pass processes a range of the keys of one key-value head, and iterates
// over the queries in blocks of 64. With more than one range, each task stores its part of the
// queries' gradient, and the parts are then summed in order.
#include "_kernels.h"

#include <pybind11/stl.h>

#include <array>
#include <cstdlib>
#include <memory>
#include <new>
#include <stdexcept>

#include "_attention_forward.h"

#ifdef MEGACORE_HAS_AVX512
namespace megacore {

constexpr std::ptrdiff_t QUERIES = 64;
constexpr std::ptrdiff_t BACKWARD_KEYS = 64;

// Tensors of the backward pass; `parts` is null or [ranges][b][n][blocks of queries][d rounded up
// to 16][64].
template <class T>
struct BackwardTensors {
    Heads<const T> grad_out, query, key, value, out;
    const float* lse;
    Heads<T> grad_query, grad_key, grad_value;
    float* parts;
};

// Division of the keys, which provides work for several threads if there are few heads. It depends
// only on the shape, so that the order of the sums is fixed.
struct KeyRanges {
    std::ptrdiff_t count, length;

    explicit KeyRanges(const Shape& shape) {
        constexpr std::ptrdiff_t TASKS = 8, LEAST = 256;
        const std::ptrdiff_t units = shape.batch * shape.groups;
        const std::ptrdiff_t most = std::max<std::ptrdiff_t>(1, shape.keys / LEAST);
        const std::ptrdiff_t wanted = std::min((TASKS + units - 1) / units, most);
        length = round_up((shape.keys + wanted - 1) / wanted, BACKWARD_KEYS);
        count = (shape.keys + length - 1) / length;
    }
};

// Memory of one thread: a range of keys, and one block of queries.
template <class T>
struct BackwardScratch {
    std::ptrdiff_t words, keys, rows;

    explicit BackwardScratch(const Shape& shape)
        : words((shape.size + WIDTH<T> - 1) / WIDTH<T>),
          keys(KeyRanges(shape).length),
          rows(round_up(shape.size, LANES)) {}

    std::ptrdiff_t total() const {
        return 2 * keys * words + keys / WIDTH<T> * rows + 2 * keys * rows +
               QUERIES * (2 * words + 2 * rows / WIDTH<T> + 2 + rows + 2 * ROWS / WIDTH<T> +
                          BACKWARD_KEYS / WIDTH<T>);
    }
    void place(word* memory) {
        key = memory;
        value = key + keys * words;
        key_across = value + keys * words;
        query = key_across + keys / WIDTH<T> * rows;
        grad_out = query + words * QUERIES;
        query_across = grad_out + words * QUERIES;
        grad_out_across = query_across + QUERIES / WIDTH<T> * rows;
        weights = grad_out_across + QUERIES / WIDTH<T> * rows;
        grad_scores = weights + ROWS * QUERIES / WIDTH<T>;
        grad_scores_across = grad_scores + ROWS * QUERIES / WIDTH<T>;
        lse = reinterpret_cast<float*>(grad_scores_across + BACKWARD_KEYS / WIDTH<T> * QUERIES);
        delta = lse + QUERIES;
        grad_query = delta + QUERIES;
        grad_key = grad_query + rows * QUERIES;
        grad_value = grad_key + keys * rows;
    }

    // Packed as words along d, or across rows: see _attention_tile.h.
    word *key = nullptr, *value = nullptr, *key_across = nullptr;
    word *query = nullptr, *grad_out = nullptr, *query_across = nullptr, *grad_out_across = nullptr;
    // The first two are for 8 keys: [8][words along 64 queries]. The last is for a block of keys:
    // [words along the keys][64].
    word *weights = nullptr, *grad_scores = nullptr, *grad_scores_across = nullptr;
    float *lse = nullptr, *delta = nullptr;
    float *grad_query = nullptr;                        // [d][64]
    float *grad_key = nullptr, *grad_value = nullptr;  // [keys][d]
};

}  // namespace megacore

MEGACORE_AVX512_BEGIN
namespace megacore {

// Store one row of a tile of 32 columns as words along the row.
template <class T>
MEGACORE_INLINE void store_rows(word* to, std::ptrdiff_t row, const __m512 (&x)[2]) {
    if constexpr (WIDTH<T> == 2) {
        store_words(to + row * QUERIES / 2, round_row(x[0], x[1]));
    } else {
        store_words(to + row * QUERIES, _mm512_castps_si512(x[0]));
        store_words(to + row * QUERIES + LANES, _mm512_castps_si512(x[1]));
    }
}

// Store two rows of a tile of 32 columns as words across the rows.
template <class T>
MEGACORE_INLINE void store_across(word* to, const __m512 (&x)[2], const __m512 (&y)[2]) {
    if constexpr (WIDTH<T> == 2) {
        const __m512i first = round_row(x[0], x[1]), second = round_row(y[0], y[1]);
        store_words(to, pair_rows(first, second, false));
        store_words(to + LANES, pair_rows(first, second, true));
    } else {
        store_rows<T>(to, 0, x);
        store_rows<T>(to, 1, y);
    }
}

// Compute the weights of 8 keys for 32 queries, and the gradients of their scores.
template <class T>
inline void grad_score_tile(const Shape& shape, const BackwardScratch<T>& scratch,
                            const View& view, std::ptrdiff_t first_key, std::ptrdiff_t key,
                            std::ptrdiff_t block_row, std::ptrdiff_t column) {
    const __m512 factor = _mm512_set1_ps(shape.scale * LOG2_E);
    const std::ptrdiff_t panel = (key - first_key) * scratch.words;
    const bool edge = !view.every.contains(key, ROWS);
    Tile<2> scores, grads;
    alignas(64) float weights[ROWS][GROUP];
    scores.multiply<T, 1, ROWS>(scratch.key + panel, scratch.query + column, QUERIES,
                                scratch.words);
    const __m512 lse[2] = {load(scratch.lse + column), load(scratch.lse + column + LANES)};
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; ++r) {
        __m512 p[2];
#pragma GCC unroll 2
        for (int v = 0; v < 2; ++v) {
            p[v] = exp2(_mm512_fmsub_ps(scores.sums[r][v], factor, lse[v]));
            if (edge) p[v] = _mm512_maskz_mov_ps(seeing(view, v * LANES, key + r), p[v]);
            store(weights[r] + v * LANES, p[v]);
        }
        store_rows<T>(scratch.weights + column / WIDTH<T>, r, p);
    }
    grads.multiply<T, 1, ROWS>(scratch.value + panel, scratch.grad_out + column, QUERIES,
                               scratch.words);
    const __m512 delta[2] = {load(scratch.delta + column), load(scratch.delta + column + LANES)};
    word* across = scratch.grad_scores_across + block_row / WIDTH<T> * QUERIES + column;
#pragma GCC unroll 4
    for (int r = 0; r < ROWS; r += 2) {
        __m512 x[2][2];
#pragma GCC unroll 4
        for (int i = 0; i < 4; ++i) {
            const __m512 p = load(weights[r + i / 2] + i % 2 * LANES);
            x[i / 2][i % 2] =
                _mm512_mul_ps(p, _mm512_sub_ps(grads.sums[r + i / 2][i % 2], delta[i % 2]));
        }
        store_rows<T>(scratch.grad_scores + column / WIDTH<T>, r, x[0]);
        store_rows<T>(scratch.grad_scores + column / WIDTH<T>, r + 1, x[1]);
        store_across<T>(across, x[0], x[1]);
        across += 2 / WIDTH<T> * QUERIES;
    }
}

// Process one block of keys with one block of queries, whose groups of 32 have `views`.
template <class T>
inline void backward_block(const Shape& shape, const BackwardScratch<T>& scratch,
                           const View (&views)[2], std::ptrdiff_t first_key, std::ptrdiff_t begin,
                           std::ptrdiff_t count) {
    constexpr std::ptrdiff_t STRIDE = QUERIES / WIDTH<T>;
    for (std::ptrdiff_t j = 0; j < count; j += ROWS) {
        const std::ptrdiff_t key = begin + j;
        // Skip the groups of 32 queries that see none of these keys.
        const std::ptrdiff_t start = views[0].some.meets(key, ROWS) ? 0 : GROUP,
                             end = views[1].some.meets(key, ROWS) ? QUERIES : GROUP;
        if (start == end) continue;
        for (std::ptrdiff_t column = start; column < end; column += GROUP) {
            grad_score_tile(shape, scratch, views[column / GROUP], first_key, key, j, column);
        }
        const std::ptrdiff_t steps = (end - start) / WIDTH<T>, skipped = start / WIDTH<T>;
        const std::ptrdiff_t place = (key - first_key) * scratch.rows;
        add_product<T, STRIDE, 1>(scratch.weights + skipped,
                                  scratch.grad_out_across + skipped * scratch.rows, scratch.rows,
                                  steps, scratch.grad_value + place, scratch.rows, scratch.rows);
        add_product<T, STRIDE, 1>(scratch.grad_scores + skipped,
                                  scratch.query_across + skipped * scratch.rows, scratch.rows,
                                  steps, scratch.grad_key + place, scratch.rows, scratch.rows);
    }
    for (std::ptrdiff_t column = 0; column < QUERIES; column += GROUP) {
        const Interval seen = views[column / GROUP].some & Interval{begin, begin + count};
        if (seen.empty()) continue;
        const std::ptrdiff_t first = round_down(seen.begin - begin, ROWS),
                             last = round_up(seen.end - begin, ROWS);
        for (std::ptrdiff_t row = 0; row < scratch.rows; row += ROWS) {
            const word* const key =
                scratch.key_across +
                (row * scratch.keys + (begin - first_key + first) * ROWS) / WIDTH<T>;
            add_product<T, 1, ROWS>(
                key, scratch.grad_scores_across + first / WIDTH<T> * QUERIES + column, QUERIES,
                (last - first) / WIDTH<T>, scratch.grad_query + row * QUERIES + column, QUERIES,
                GROUP);
        }
    }
}

// Return the sums of x * y along each of the first 16 rows. ALL means that all 16 rows exist and
// consist of full vectors.
template <class T, bool ALL>
MEGACORE_INLINE __m512 row_dots(const Rows<const T>& x, const Rows<const T>& y) {
    __m512 products[LANES] = {};
    for (std::ptrdiff_t i = 0; i < x.size; i += LANES) {
        const __mmask16 lanes = ALL ? 0xFFFF : first_lanes(x.size - i);
#pragma GCC unroll 16
        for (int r = 0; r < LANES; ++r) {
            if (!ALL && r >= x.count) continue;
            const T *const first = x.data + r * x.stride + i, *const second =
                                                                  y.data + r * y.stride + i;
            const __m512 a = ALL ? load(first) : load(first, lanes),
                         b = ALL ? load(second) : load(second, lanes);
            products[r] = _mm512_fmadd_ps(a, b, products[r]);
        }
    }
    __m512i sums[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; ++r) sums[r] = _mm512_castps_si512(products[r]);
    transpose(sums);
    __m512 total = _mm512_setzero_ps();
#pragma GCC unroll 16
    for (int r = 0; r < LANES; ++r) total = _mm512_add_ps(total, _mm512_castsi512_ps(sums[r]));
    return total;
}

// Pack a block of queries, with the gradients and statistics that belong to them.
template <class T>
inline void pack_queries(const BackwardScratch<T>& scratch, const Rows<const T>& query,
                         const Rows<const T>& grad_out, const Rows<const T>& out,
                         const float* lse) {
    pack_transposed(query, QUERIES, scratch.query);
    pack_transposed(grad_out, QUERIES, scratch.grad_out);
    pack_across(query, QUERIES, scratch.query_across);
    pack_across(grad_out, QUERIES, scratch.grad_out_across);
    for (std::ptrdiff_t i = 0; i < QUERIES; i += LANES) {
        const __m512 natural =
            load(lse + i, first_lanes(std::max<std::ptrdiff_t>(0, query.count - i)));
        store(scratch.lse + i, _mm512_mul_ps(natural, _mm512_set1_ps(LOG2_E)));
        const bool all = i + LANES <= query.count && query.size % LANES == 0;
        store(scratch.delta + i, all ? row_dots<T, true>(grad_out.from(i), out.from(i))
                                     : row_dots<T, false>(grad_out.from(i), out.from(i)));
    }
}

// Write [size][64] to rows.
template <class T>
inline void write_grad_query(const float* from, float scale, const Rows<T>& to) {
    for (std::ptrdiff_t i = 0; i < QUERIES && i < to.count; i += LANES) {
        unpack_transposed(from + i, QUERIES, _mm512_set1_ps(scale), to.from(i));
    }
}

// Return the address of one part of a block's gradient.
inline float* part_of(float* parts, const Shape& shape, std::ptrdiff_t range, std::ptrdiff_t batch,
                      std::ptrdiff_t head, std::ptrdiff_t first_query) {
    const std::ptrdiff_t blocks = (shape.queries + QUERIES - 1) / QUERIES;
    const std::ptrdiff_t index =
        ((range * shape.batch + batch) * shape.heads + head) * blocks + first_query / QUERIES;
    return parts + index * round_up(shape.size, LANES) * QUERIES;
}

// Process one range of the keys of one key-value head.
template <class T>
inline void backward_task(const Shape& shape, const BackwardScratch<T>& scratch,
                          std::ptrdiff_t batch, std::ptrdiff_t group, std::ptrdiff_t range,
                          const BackwardTensors<T>& tensors) {
    const std::ptrdiff_t first = range * scratch.keys,
                         count = std::min(scratch.keys, shape.keys - first);
    const auto rows = [&](auto& heads, std::ptrdiff_t head, std::ptrdiff_t length) {
        return heads.rows(batch, head, length, shape.size);
    };
    const Rows<const T> key = tensors.key.rows(batch, group, first + count, shape.size).from(first);
    const Rows<const T> value =
        tensors.value.rows(batch, group, first + count, shape.size).from(first);
    pack_row_panels(key, scratch.key);
    pack_row_panels(value, scratch.value);
    pack_across_panels(key, scratch.keys, scratch.key_across);
    std::fill_n(scratch.grad_key, 2 * scratch.keys * scratch.rows, 0.0f);
    for (std::ptrdiff_t head = group * shape.sharing(); head < (group + 1) * shape.sharing();
         ++head) {
        const Rows<const T> query = rows(tensors.query, head, shape.queries);
        const Rows<const T> grad_out = rows(tensors.grad_out, head, shape.queries);
        const Rows<const T> out = rows(tensors.out, head, shape.queries);
        const Rows<T> grad_query = rows(tensors.grad_query, head, shape.queries);
        const float* const lse = tensors.lse + (batch * shape.heads + head) * shape.queries;
        for (std::ptrdiff_t i = 0; i < shape.queries; i += QUERIES) {
            const View views[2] = {view_of(shape, batch, i), view_of(shape, batch, i + GROUP)};
            const Interval seen =
                (views[0].some | views[1].some) & Interval{first, first + count};
            if (tensors.parts != nullptr && seen.empty()) continue;
            pack_queries(scratch, query.from(i), grad_out.from(i), out.from(i), lse + i);
            query.from(i + QUERIES).template prefetch<false>(QUERIES);
            grad_out.from(i + QUERIES).template prefetch<false>(QUERIES);
            out.from(i + QUERIES).template prefetch<false>(QUERIES);
            if (tensors.parts == nullptr) grad_query.from(i).template prefetch<true>(QUERIES);
            std::fill_n(scratch.grad_query, scratch.rows * QUERIES, 0.0f);
            for (std::ptrdiff_t j = first + round_down(seen.begin - first, BACKWARD_KEYS);
                 j < seen.end; j += BACKWARD_KEYS) {
                backward_block(shape, scratch, views, first, j,
                               round_up(std::min(BACKWARD_KEYS, seen.end - j), ROWS));
            }
            if (tensors.parts == nullptr) {
                write_grad_query(scratch.grad_query, shape.scale, grad_query.from(i));
            } else {
                std::copy_n(scratch.grad_query, scratch.rows * QUERIES,
                            part_of(tensors.parts, shape, range, batch, head, i));
            }
        }
    }
    unpack(scratch.grad_key, shape.scale, rows(tensors.grad_key, group, first + count).from(first));
    unpack(scratch.grad_value, 1.0f, rows(tensors.grad_value, group, first + count).from(first));
}

// Sum the parts of the gradient of one block of queries over the ranges of keys.
template <class T>
inline void sum_parts(const Shape& shape, const KeyRanges& ranges, std::ptrdiff_t batch,
                      std::ptrdiff_t head, std::ptrdiff_t first_query,
                      const BackwardTensors<T>& tensors) {
    float* const total = part_of(tensors.parts, shape, 0, batch, head, first_query);
    const std::ptrdiff_t size = round_up(shape.size, LANES) * QUERIES;
    const Interval seen = seen_by(shape, batch, first_query, first_query + QUERIES);
    if (!seen.meets(0, ranges.length)) std::fill_n(total, size, 0.0f);
    for (std::ptrdiff_t range = 1; range < ranges.count; ++range) {
        if (!seen.meets(range * ranges.length, ranges.length)) continue;
        const float* const part = part_of(tensors.parts, shape, range, batch, head, first_query);
        for (std::ptrdiff_t i = 0; i < size; i += LANES) {
            store(total + i, _mm512_add_ps(load(total + i), load(part + i)));
        }
    }
    const Rows<T> to = tensors.grad_query.rows(batch, head, shape.queries, shape.size);
    write_grad_query(total, shape.scale, to.from(first_query));
}

}  // namespace megacore
MEGACORE_AVX512_END
#endif

namespace megacore {

// A tensor [b, n, s, d] from Python: its address, then its strides of b, n and s in elements.
using Place = std::array<std::int64_t, 4>;
// (b, n, g, queries, keys, d).
using Sizes = std::array<std::int64_t, 6>;
// Addresses of the first and last visible key of each query (0: none), and their stride of b.
using SpanPlace = std::array<std::int64_t, 3>;

#ifdef MEGACORE_HAS_AVX512
namespace {

template <class T>
Heads<T> heads(const Place& place) {
    return {reinterpret_cast<T*>(place[0]), place[1], place[2], place[3]};
}

// Memory of one thread that is reused between calls: new pages would cost more than the attention
// of a small layer.
class ThreadMemory {
public:
    ThreadMemory() = default;
    ThreadMemory(const ThreadMemory&) = delete;
    ThreadMemory& operator=(const ThreadMemory&) = delete;
    ~ThreadMemory() { std::free(memory_); }

    // Return null if there is not enough memory.
    word* reserve(std::ptrdiff_t words) {
        if (words > size_) {
            std::free(memory_);
            memory_ =
                static_cast<word*>(std::aligned_alloc(64, round_up(words, LANES) * sizeof(word)));
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
void forward(const Shape& shape, const Place& query, const Place& key, const Place& value,
             const Place& out, float* lse, int threads) {
    const std::ptrdiff_t units = shape.batch * shape.groups,
                         blocks = (shape.queries + GROUP - 1) / GROUP;
    // With few heads, the queries are divided too; a query's result does not depend on that.
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
                            heads<const T>(query), heads<const T>(key), heads<const T>(value),
                            heads<T>(out), lse);
        }
    }
    if (exhausted) throw std::bad_alloc();
}

template <class T>
void backward(const Shape& shape, BackwardTensors<T>& tensors, int threads) {
    const KeyRanges ranges(shape);
    const std::ptrdiff_t units = shape.batch * shape.groups,
                         blocks = (shape.queries + QUERIES - 1) / QUERIES;
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
            backward_task<T>(shape, scratch, unit / shape.groups, unit % shape.groups, i / units,
                             tensors);
        }
        if (ranges.count > 1) {
#pragma omp for schedule(static)
            for (std::ptrdiff_t i = 0; i < all_blocks; ++i) {
                const std::ptrdiff_t head = i / blocks;
                sum_parts<T>(shape, ranges, head / shape.heads, head % shape.heads,
                             i % blocks * QUERIES, tensors);
            }
        }
    }
    if (exhausted) throw std::bad_alloc();
}

Shape shape_of(const Sizes& sizes, double scale, bool causal, const SpanPlace& spans) {
    return {sizes[0],
            sizes[1],
            sizes[2],
            sizes[3],
            sizes[4],
            sizes[5],
            static_cast<float>(scale),
            causal,
            reinterpret_cast<const std::int32_t*>(spans[0]),
            reinterpret_cast<const std::int32_t*>(spans[1]),
            spans[2]};
}

}  // namespace
#endif

// Throw an error unless the kernel of this type runs on this CPU.
void require(bool is_bf16) {
    if (!(is_bf16 ? runs_bf16() : runs_fp32()))
        throw std::runtime_error("this CPU has no AVX-512 for attention");
}

void attention_forward(bool is_bf16, const Sizes& sizes, double scale, bool causal,
                       const SpanPlace& spans, const Place& query, const Place& key,
                       const Place& value, const Place& out, std::uintptr_t lse, int threads) {
    require(is_bf16);
#ifdef MEGACORE_HAS_AVX512
    const auto run = is_bf16 ? &forward<bf16> : &forward<float>;
    run(shape_of(sizes, scale, causal, spans), query, key, value, out,
        reinterpret_cast<float*>(lse), threads);
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
                        const SpanPlace& spans, const std::array<Place, 5>& inputs,
                        std::uintptr_t lse, const std::array<Place, 3>& grads, int threads) {
    require(is_bf16);
#ifdef MEGACORE_HAS_AVX512
    const auto run = is_bf16 ? &run_backward<bf16> : &run_backward<float>;
    run(shape_of(sizes, scale, causal, spans), inputs, lse, grads, threads);
#endif
}

}  // namespace megacore

void add_attention(py::module_& module) {
    module.def("attention_forward", &megacore::attention_forward, Unlocked());
    module.def("attention_backward", &megacore::attention_backward, Unlocked());
}
