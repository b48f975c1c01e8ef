// Cross entropy of rows of logits, which are replaced by its gradient. Rows are independent of each
// other, so the results do not depend on the number of threads.
#include "_kernels.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>

#include "_vector.h"

#ifdef MEGACORE_HAS_AVX512
MEGACORE_AVX512_BEGIN
namespace {

using megacore::bf16;
using megacore::exp;
using megacore::first_lanes;
using megacore::load;
using megacore::store;
using megacore::thread_number;

constexpr std::ptrdiff_t kLanes = 16;
// Number of independent accumulators, so that additions need not wait for each other.
constexpr int kParts = 4;
constexpr std::ptrdiff_t kStep = kParts * kLanes;
constexpr int kRowsAtOnce = 8;  // rows that a thread takes at a time

template <typename T>
struct Rows {
    T* data;
    std::ptrdiff_t count, width, stride;
    const std::int64_t* columns;

    T* row(std::ptrdiff_t index) const { return data + index * stride; }
    // Return the label's column, or -1 if it is not in this part of the vocabulary.
    std::ptrdiff_t label(std::ptrdiff_t index) const {
        return columns[index] >= 0 && columns[index] < width
                   ? static_cast<std::ptrdiff_t>(columns[index])
                   : -1;
    }
};

// [3 or 4, n]: maximum, logit of the label, sum of the exponentials, optionally sum of the logits.
struct Statistics {
    float* data;
    std::ptrdiff_t count;
    bool with_sum;

    void set(std::ptrdiff_t row, float maximum, float label, float total, float sum) const {
        data[row] = maximum;
        data[count + row] = label;
        data[2 * count + row] = total;
        if (with_sum) data[3 * count + row] = sum;
    }
};

template <typename T>
float load_one(const T* from) {
    return _mm512_cvtss_f32(load(from, 1));
}

template <typename T>
void store_one(T* to, float value) {
    store(to, _mm512_set1_ps(value), 1);
}

// Call body(column, part, lanes) for 16 columns at a time; only the last call may have fewer.
template <typename Body>
inline __attribute__((always_inline)) void for_columns(std::ptrdiff_t width, Body body) {
    std::ptrdiff_t column = 0;
    for (; column + kStep <= width; column += kStep) {
#pragma GCC unroll 4
        for (int part = 0; part < kParts; ++part)
            body(column + part * kLanes, part, static_cast<__mmask16>(0xFFFF));
    }
    for (int part = 0; column < width; column += kLanes, ++part)
        body(column, part, first_lanes(width - column));
}

inline __m512 add_parts(const __m512* parts) {
    return _mm512_add_ps(_mm512_add_ps(parts[0], parts[1]), _mm512_add_ps(parts[2], parts[3]));
}

// Return the maximum of a row, ignoring NaN, which the sum of the exponentials detects.
template <typename T>
float row_maximum(const T* row, std::ptrdiff_t width) {
    __m512 parts[kParts];
    std::fill_n(parts, kParts, _mm512_set1_ps(-std::numeric_limits<float>::infinity()));
    for_columns(width, [&](std::ptrdiff_t column, int part,
                           __mmask16 lanes) __attribute__((always_inline)) {
        parts[part] =
            _mm512_mask_max_ps(parts[part], lanes, load(row + column, lanes), parts[part]);
    });
    return megacore::maximum(
        _mm512_max_ps(_mm512_max_ps(parts[0], parts[1]), _mm512_max_ps(parts[2], parts[3])));
}

template <typename T>
float row_sum(const T* row, std::ptrdiff_t width) {
    __m512 parts[kParts] = {};
    for_columns(width, [&](std::ptrdiff_t column, int part, __mmask16 lanes)
                           __attribute__((always_inline)) {
                               parts[part] = _mm512_add_ps(parts[part], load(row + column, lanes));
                           });
    return megacore::sum(add_parts(parts));
}

// Return the sum of exp(logit - reference) over a row. The exponentials are stored in `kept`, which
// may be the row or null.
template <typename T>
float row_exponentials(const T* row, std::ptrdiff_t width, float reference, float* kept) {
    const __m512 shift = _mm512_set1_ps(reference);
    __m512 parts[kParts] = {};
    for_columns(width, [&](std::ptrdiff_t column, int part,
                           __mmask16 lanes) __attribute__((always_inline)) {
        const __m512 e = exp(_mm512_sub_ps(load(row + column, lanes), shift));
        parts[part] = _mm512_mask_add_ps(parts[part], lanes, parts[part], e);
        if (kept) store(kept + column, e, lanes);
    });
    return megacore::sum(add_parts(parts));
}

// Return the number that is subtracted from logits; 0 if all are -inf, so that their exponentials
// are zero instead of NaN.
inline float reference_of(float maximum) {
    return maximum == -std::numeric_limits<float>::infinity() ? 0.0f : maximum;
}

template <typename T>
void label_statistics(const Rows<T>& rows, const Statistics& statistics, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, kRowsAtOnce)
    for (std::ptrdiff_t index = 0; index < rows.count; ++index) {
        const T* row = rows.row(index);
        const std::ptrdiff_t label = rows.label(index);
        const float maximum = row_maximum(row, rows.width);
        const float sum = statistics.with_sum ? row_sum(row, rows.width) : 0.0f;
        const float total = row_exponentials(row, rows.width, reference_of(maximum), nullptr);
        statistics.set(index, maximum, label < 0 ? 0.0f : load_one(row + label), total, sum);
    }
}

template <typename T>
void softmax_gradient(const Rows<T>& rows, const float* log_normaliser, const float* factor,
                      float label_weight, float evenly, int threads) {
#pragma omp parallel for num_threads(threads) schedule(dynamic, kRowsAtOnce)
    for (std::ptrdiff_t index = 0; index < rows.count; ++index) {
        T* row = rows.row(index);
        const std::ptrdiff_t label = rows.label(index);
        const __m512 shift = _mm512_set1_ps(log_normaliser[index]);
        const __m512 scale = _mm512_set1_ps(factor ? factor[index] : 1.0f);
        const __m512 less = _mm512_set1_ps(evenly);
        const auto gradient = [&](__m512 logits) __attribute__((always_inline)) {
            return _mm512_fmsub_ps(exp(_mm512_sub_ps(logits, shift)), scale, less);
        };
        const float own =
            label < 0 ? 0.0f : _mm512_cvtss_f32(gradient(load(row + label, 1))) - label_weight;
        for_columns(rows.width, [&](std::ptrdiff_t column, int,
                                    __mmask16 lanes) __attribute__((always_inline)) {
            store(row + column, gradient(load(row + column, lanes)), lanes);
        });
        if (label >= 0) store_one(row + label, own);
    }
}

struct Loss {
    float smoothing, z_loss, scale;
    float* out;
};

// Compute one row of the loss while it is in the cache; `kept` has the width of a row.
template <typename T>
void cross_entropy_row(const Rows<T>& rows, std::ptrdiff_t index, const Loss& loss, float* kept) {
    T* row = rows.row(index);
    const std::ptrdiff_t label = rows.label(index), width = rows.width;
    if (label < 0) {  // an error in the data, which must not go unnoticed
        const __m512 nan = _mm512_set1_ps(std::numeric_limits<float>::quiet_NaN());
        for_columns(width, [&](std::ptrdiff_t column, int, __mmask16 lanes)
                               __attribute__((always_inline)) { store(row + column, nan, lanes); });
        loss.out[index] = std::numeric_limits<float>::quiet_NaN();
        return;
    }
    const float maximum = row_maximum(row, width), reference = reference_of(maximum),
                own = load_one(row + label);
    const float sum = loss.smoothing > 0 ? row_sum(row, width) : 0.0f;
    const float total = row_exponentials(row, width, reference, kept);

    const float log_total = static_cast<float>(std::log(static_cast<double>(total)));
    const float log_normaliser = log_total + reference;
    float value = log_total - (own - reference);
    if (loss.smoothing > 0) value += loss.smoothing * (own - sum / static_cast<float>(width));
    if (loss.z_loss > 0) value += loss.z_loss * log_normaliser * log_normaliser;
    loss.out[index] = value;

    const float factor =
        loss.scale * (loss.z_loss > 0 ? 1.0f + 2.0f * loss.z_loss * log_normaliser : 1.0f) / total;
    const float evenly = loss.scale * loss.smoothing / static_cast<float>(width);
    const float at_label = kept[label] * factor - evenly - loss.scale * (1.0f - loss.smoothing);
    const __m512 scale = _mm512_set1_ps(factor), less = _mm512_set1_ps(evenly);
    for_columns(
        width, [&](std::ptrdiff_t column, int, __mmask16 lanes) __attribute__((always_inline)) {
            store(row + column, _mm512_fmsub_ps(load(kept + column, lanes), scale, less), lanes);
        });
    store_one(row + label, at_label);
}

// Return the memory for a row's exponentials, which are rounded only once, in the gradient. A row
// of bf16 cannot store them, so each thread has a buffer.
inline float* kept_of(float* row, float*, std::ptrdiff_t) { return row; }
inline float* kept_of(bf16*, float* buffers, std::ptrdiff_t width) {
    return buffers + thread_number() * width;
}

template <typename T>
void cross_entropy(const Rows<T>& rows, const Loss& loss, int threads) {
    const std::unique_ptr<float[]> buffers(
        sizeof(T) < sizeof(float) ? new float[threads * rows.width] : nullptr);
#pragma omp parallel for num_threads(threads) schedule(dynamic, kRowsAtOnce)
    for (std::ptrdiff_t index = 0; index < rows.count; ++index) {
        cross_entropy_row(rows, index, loss, kept_of(rows.row(index), buffers.get(), rows.width));
    }
}

}  // namespace
MEGACORE_AVX512_END
#endif

#ifdef MEGACORE_HAS_AVX512
namespace {

template <typename T>
Rows<T> rows_of(Address logits, std::ptrdiff_t count, std::ptrdiff_t width, std::ptrdiff_t stride,
                Address columns) {
    return {reinterpret_cast<T*>(logits), count, width, stride,
            reinterpret_cast<const std::int64_t*>(columns)};
}

// Call use(rows) with the type of the logits.
template <typename Use>
void with_rows(bool half, Address logits, std::ptrdiff_t count, std::ptrdiff_t width,
               std::ptrdiff_t stride, Address columns, Use use) {
    if (half) {
        use(rows_of<bf16>(logits, count, width, stride, columns));
    } else {
        use(rows_of<float>(logits, count, width, stride, columns));
    }
}

}  // namespace
#endif

void add_cross_entropy(py::module_& module) {
#ifdef MEGACORE_HAS_AVX512
    module.def(
        "label_statistics",
        [](Address logits, bool half, std::ptrdiff_t count, std::ptrdiff_t width,
           std::ptrdiff_t stride, Address columns, bool with_sum, Address statistics, int threads) {
            const Statistics out{reinterpret_cast<float*>(statistics), count, with_sum};
            with_rows(half, logits, count, width, stride, columns,
                      [&](const auto& rows) { label_statistics(rows, out, threads); });
        },
        Unlocked());
    module.def(
        "softmax_gradient",
        [](Address logits, bool half, std::ptrdiff_t count, std::ptrdiff_t width,
           std::ptrdiff_t stride, Address columns, Address log_normaliser, Address factor,
           float label_weight, float evenly, int threads) {
            with_rows(half, logits, count, width, stride, columns, [&](const auto& rows) {
                softmax_gradient(rows, reinterpret_cast<const float*>(log_normaliser),
                                 reinterpret_cast<const float*>(factor), label_weight, evenly,
                                 threads);
            });
        },
        Unlocked());
    module.def(
        "cross_entropy",
        [](Address logits, bool half, std::ptrdiff_t count, std::ptrdiff_t width,
           std::ptrdiff_t stride, Address columns, float smoothing, float z_loss, float scale,
           Address losses, int threads) {
            const Loss loss{smoothing, z_loss, scale, reinterpret_cast<float*>(losses)};
            with_rows(half, logits, count, width, stride, columns,
                      [&](const auto& rows) { cross_entropy(rows, loss, threads); });
        },
        Unlocked());
#endif
}
