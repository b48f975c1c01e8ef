// The product of few rows with a weight, for one set of instructions: included by _few_rows.cpp once
// for each, with MEGACORE_LANES floats in a vector and tiles of MEGACORE_WIDE rows of x.

typedef float Vector __attribute__((vector_size(MEGACORE_LANES * sizeof(float)), aligned(4)));

// Compute y[r, t * o_step] = x[r] · w[t * step] + bias[t * o_step] for kStreams rows of w and R of x.
template <int T, int R>
inline __attribute__((always_inline)) void tile(const Product& p, std::ptrdiff_t row,
                                                std::ptrdiff_t output, std::ptrdiff_t step) {
    const std::ptrdiff_t n = p.in_features;
    const float* x = p.x + row * n;
    const float* w = p.weight + output * n;
    Vector sums[T][R];
    for (int t = 0; t < T; ++t)
        for (int r = 0; r < R; ++r) sums[t][r] = Vector{};
    std::ptrdiff_t i = 0;
    for (; i + MEGACORE_LANES <= n; i += MEGACORE_LANES) {
        Vector inputs[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) inputs[r] = *reinterpret_cast<const Vector*>(x + r * n + i);
#pragma GCC unroll 8
        for (int t = 0; t < T; ++t) {
            const Vector weights = *reinterpret_cast<const Vector*>(w + t * step * n + i);
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[t][r] += weights * inputs[r];
        }
    }
    for (int t = 0; t < T; ++t) {
        const std::ptrdiff_t column = output + t * step;
        const float shift = p.bias ? p.share * p.bias[column] : 0.0f;
        for (int r = 0; r < R; ++r) {
            float sum = 0.0f;
            for (int lane = 0; lane < MEGACORE_LANES; ++lane) sum += sums[t][r][lane];
            for (std::ptrdiff_t j = i; j < n; ++j) sum += w[t * step * n + j] * x[r * n + j];
            p.y[(row + r) * p.out_features + column] = sum + shift;
        }
    }
}

// Compute T outputs, `step` apart, of the rows from `row` on, R rows at a time and then the rest.
template <int T, int R>
inline __attribute__((always_inline)) void rows_from(const Product& p, std::ptrdiff_t row,
                                                     std::ptrdiff_t output, std::ptrdiff_t step) {
    for (; row + R <= p.rows; row += R) tile<T, R>(p, row, output, step);
    if constexpr (R > 1) {
        if (row < p.rows) rows_from<T, R - 1>(p, row, output, step);
    }
}

// Compute the outputs first … end - 1 of all rows.
void outputs(const Product& p, std::ptrdiff_t first, std::ptrdiff_t end) {
    const std::ptrdiff_t run = (end - first) / kStreams;
    for (std::ptrdiff_t output = first; output < first + run; ++output)
        rows_from<kStreams, MEGACORE_WIDE>(p, 0, output, run);
    for (std::ptrdiff_t output = first + run * kStreams; output < end; ++output)
        rows_from<1, MEGACORE_WIDE>(p, 0, output, 0);
}
