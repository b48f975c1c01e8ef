// The weight gradient dyᵀ x of bf16 factors, added to an fp32 main gradient. Products are summed in
// registers and never rounded to bf16.
//
// AVX512-BF16's dot product takes two rows at a time. Both factors are packed so that these are
// adjacent: x in panels of 32 columns for all threads, dy in panels of 8 columns by the thread that
// processes them. One tile of 8 x 32 sums is the product of a panel of dy and a panel of x. A task
// is all tiles of some panels of dy.
#include "_kernels.h"

#include <algorithm>
#include <memory>
#include <new>

#include "_vector.h"

#ifdef MEGACORE_HAS_AVX512
MEGACORE_AVX512_BEGIN
namespace {

using megacore::bf16;
using megacore::first_lanes;
using megacore::thread_number;

using Pair = std::uint32_t;  // one column of two rows

constexpr std::ptrdiff_t kLanes = 16;
constexpr std::ptrdiff_t kTall = 8;    // columns of dy in a panel, rows of a tile
constexpr std::ptrdiff_t kWide = 32;   // columns of x in a panel, and of a tile
// Pairs of rows that are multiplied at a time, so that a panel of x stays in the first cache.
constexpr std::ptrdiff_t kMostPairs = 256;
// Parts of that many pairs that are packed at a time, so that a task's panels of dy stay in the
// second cache.
constexpr std::ptrdiff_t kMostParts = 4;
constexpr std::ptrdiff_t kAlignment = 64;
// Pairs between panels of dy, so that they do not conflict in the cache.
constexpr std::ptrdiff_t kPadding = 16;
constexpr std::ptrdiff_t kChunk = 32;    // pairs between two prefetches
constexpr std::ptrdiff_t kCacheLine = 64;

struct Matrix {
    const bf16* data;
    std::ptrdiff_t rows, columns, stride;
};

struct Panel {
    __m512i low, high;  // pairs of columns 0 … 15 and 16 … 31
};

// Load 32 columns of rows `row` and `row` + 1, zero beyond the matrix.
inline __attribute__((always_inline)) Panel interleave(const Matrix& from, std::ptrdiff_t row,
                                                       std::ptrdiff_t column) {
    const std::ptrdiff_t count = std::min(from.columns - column, kWide);
    const __mmask32 lanes = count == kWide ? 0xFFFFFFFFu : (1u << count) - 1u;
    const bf16* at = from.data + row * from.stride + column;
    const __m512i even = _mm512_maskz_loadu_epi16(lanes, at);
    const __m512i odd = _mm512_maskz_loadu_epi16(row + 1 < from.rows ? lanes : 0, at + from.stride);
    const __m512i first =
        _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6,
                         37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i second = _mm512_add_epi16(first, _mm512_set1_epi16(16));
    return {_mm512_permutex2var_epi16(even, first, odd),
            _mm512_permutex2var_epi16(even, second, odd)};
}

// Pack a panel of x, [pairs, 32].
void pack_wide(const Matrix& x, std::ptrdiff_t row, std::ptrdiff_t pairs, std::ptrdiff_t column,
               Pair* to) {
    for (std::ptrdiff_t pair = 0; pair < pairs; ++pair, to += kWide) {
        const Panel panel = interleave(x, row + 2 * pair, column);
        _mm512_store_si512(to, panel.low);
        _mm512_store_si512(to + kLanes, panel.high);
    }
}

// Pack panels of dy, each [pairs, 8] and `spacing` apart, of columns in groups of 32. The outer
// loop is over pairs of rows because each row is in other memory pages.
void pack_tall(const Matrix& dy, std::ptrdiff_t row, std::ptrdiff_t pairs, std::ptrdiff_t first,
               std::ptrdiff_t end, std::ptrdiff_t spacing, Pair* to) {
    for (std::ptrdiff_t pair = 0; pair < pairs; ++pair, to += kTall) {
        Pair* at = to;
        for (std::ptrdiff_t column = first; column < end;
             column += kWide, at += kWide / kTall * spacing) {
            const Panel panel = interleave(dy, row + 2 * pair, column);
            _mm256_store_si256(reinterpret_cast<__m256i*>(at), _mm512_castsi512_si256(panel.low));
            _mm256_store_si256(reinterpret_cast<__m256i*>(at + spacing),
                               _mm512_extracti64x4_epi64(panel.low, 1));
            _mm256_store_si256(reinterpret_cast<__m256i*>(at + 2 * spacing),
                               _mm512_castsi512_si256(panel.high));
            _mm256_store_si256(reinterpret_cast<__m256i*>(at + 3 * spacing),
                               _mm512_extracti64x4_epi64(panel.high, 1));
        }
    }
}

// Prefetcher of the next part of dy, a few rows at a time: rows are short and far apart, which the
// CPU does not predict.
class Ahead {
  public:
    // Prefetch columns [first, end) of `rows` rows from `row` on in at most `looks` steps.
    Ahead(const Matrix& dy, std::ptrdiff_t row, std::ptrdiff_t rows, std::ptrdiff_t first,
          std::ptrdiff_t end, std::ptrdiff_t looks)
        : at_(reinterpret_cast<const char*>(dy.data + row * dy.stride + first)),
          stride_(dy.stride * static_cast<std::ptrdiff_t>(sizeof(bf16))),
          width_((end - first) * static_cast<std::ptrdiff_t>(sizeof(bf16))),
          rows_(end > first ? rows : 0),
          rows_per_look_((rows + looks - 1) / looks) {}

    void look() {
        for (std::ptrdiff_t i = std::min(rows_, rows_per_look_); i > 0;
             --i, --rows_, at_ += stride_) {
            for (std::ptrdiff_t byte = 0; byte < width_; byte += kCacheLine)
                _mm_prefetch(at_ + byte, _MM_HINT_T1);
        }
    }

  private:
    const char* at_;
    std::ptrdiff_t stride_, width_, rows_, rows_per_look_;
};

// Add a tile to `sums`, of which only `rows` rows and `columns` columns exist.
void add_tile(const Pair* tall, const Pair* wide, std::ptrdiff_t pairs, float* sums,
              std::ptrdiff_t stride, std::ptrdiff_t rows, std::ptrdiff_t columns, Ahead& ahead) {
    __m512 tile[kTall][2];
#pragma GCC unroll 8
    for (int row = 0; row < kTall; ++row) tile[row][0] = tile[row][1] = _mm512_setzero_ps();
    for (std::ptrdiff_t row = 0; row < rows; ++row) {
        _mm_prefetch(reinterpret_cast<const char*>(sums + row * stride), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(sums + row * stride + kLanes), _MM_HINT_T0);
    }
    while (pairs > 0) {
        ahead.look();
        const std::ptrdiff_t chunk = std::min(pairs, kChunk);
        for (std::ptrdiff_t pair = 0; pair < chunk; ++pair, tall += kTall, wide += kWide) {
            const auto low = reinterpret_cast<__m512bh>(_mm512_load_si512(wide));
            const auto high = reinterpret_cast<__m512bh>(_mm512_load_si512(wide + kLanes));
#pragma GCC unroll 8
            for (int row = 0; row < kTall; ++row) {
                const auto factor =
                    reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(tall[row])));
                tile[row][0] = _mm512_dpbf16_ps(tile[row][0], factor, low);
                tile[row][1] = _mm512_dpbf16_ps(tile[row][1], factor, high);
            }
        }
        pairs -= chunk;
    }
    const __mmask16 lanes[2] = {first_lanes(columns),
                                first_lanes(std::max<std::ptrdiff_t>(columns - kLanes, 0))};
#pragma GCC unroll 8
    for (int row = 0; row < kTall; ++row) {
        if (row >= rows) break;
        for (int half = 0; half < 2; ++half) {
            float* at = sums + row * stride + half * kLanes;
            const __m512 sum = _mm512_add_ps(megacore::load(at, lanes[half]), tile[row][half]);
            megacore::store(at, sum, lanes[half]);
        }
    }
}

struct FreeAligned {
    void operator()(Pair* memory) const {
        ::operator delete[](memory, std::align_val_t{kAlignment});
    }
};

// Return the number of columns of dy in a task: the most that fit into the cache, unless threads
// would then wait for the last tasks.
std::ptrdiff_t columns_per_task(std::ptrdiff_t columns, int threads) {
    std::ptrdiff_t best = 0, least = 0;
    for (const std::ptrdiff_t width : {3 * kWide, 2 * kWide, kWide}) {
        const std::ptrdiff_t tasks = (columns + width - 1) / width;
        const std::ptrdiff_t time = (tasks + threads - 1) / threads * width;
        if (best == 0 || time < least) best = width, least = time;
    }
    return best;
}

void accumulate(float* main_grad, std::ptrdiff_t stride, const Matrix& dy, const Matrix& x,
                int threads) {
    if (dy.rows == 0) return;
    const std::ptrdiff_t all = (dy.rows + 1) / 2, most = std::min(kMostPairs, all),
                         panels = (x.columns + kWide - 1) / kWide;
    const std::ptrdiff_t parts = std::min(kMostParts, (all + most - 1) / most);
    const std::ptrdiff_t step = columns_per_task(dy.columns, threads),
                         tasks = (dy.columns + step - 1) / step;
    const std::ptrdiff_t spacing = most * kTall + kPadding, tall_size = step / kTall * spacing;
    const std::ptrdiff_t wide_size = panels * most * kWide, shared = parts * wide_size,
                         own = parts * tall_size;
    const std::unique_ptr<Pair[], FreeAligned> memory(
        new (std::align_val_t{kAlignment}) Pair[static_cast<std::size_t>(shared + threads * own)]);
#pragma omp parallel num_threads(threads)
    for (std::ptrdiff_t block = 0; block < dy.rows; block += 2 * parts * most) {
        const std::ptrdiff_t end_row = std::min(dy.rows, block + 2 * parts * most),
                             count = (end_row - block + 2 * most - 1) / (2 * most);
        const auto row_of = [&](std::ptrdiff_t part) { return block + 2 * part * most; };
        const auto pairs_of = [&](std::ptrdiff_t part) {
            return std::min(most, (end_row - row_of(part) + 1) / 2);
        };
        Pair* const wide = memory.get();
#pragma omp for schedule(static)
        for (std::ptrdiff_t index = 0; index < count * panels; ++index) {
            const std::ptrdiff_t part = index / panels, panel = index % panels;
            pack_wide(x, row_of(part), pairs_of(part), panel * kWide,
                      wide + part * wide_size + panel * most * kWide);
        }
        Pair* const tall = memory.get() + shared + thread_number() * own;
#pragma omp for schedule(dynamic, 1)
        for (std::ptrdiff_t task = 0; task < tasks; ++task) {
            const std::ptrdiff_t first = task * step, end = std::min(first + step, dy.columns);
            for (std::ptrdiff_t part = 0; part < count; ++part) {
                pack_tall(dy, row_of(part), pairs_of(part), first, end, spacing,
                          tall + part * tall_size);
            }
            const std::ptrdiff_t next = std::min(first + threads * step, dy.columns);
            Ahead ahead(dy, block, end_row - block, next, std::min(next + step, dy.columns),
                        panels * ((end - first + kTall - 1) / kTall) * count *
                            ((most + kChunk - 1) / kChunk));
            for (std::ptrdiff_t panel = 0; panel < panels; ++panel) {
                for (std::ptrdiff_t part = 0; part < count; ++part) {
                    for (std::ptrdiff_t column = first; column < end; column += kTall) {
                        add_tile(tall + part * tall_size + (column - first) / kTall * spacing,
                                 wide + part * wide_size + panel * most * kWide, pairs_of(part),
                                 main_grad + column * stride + panel * kWide, stride,
                                 std::min(end - column, kTall), x.columns - panel * kWide, ahead);
                    }
                }
            }
        }
    }
}

}  // namespace
MEGACORE_AVX512_END
#endif

void add_weight_grad(py::module_& module) {
#ifdef MEGACORE_HAS_AVX512
    module.def(
        "accumulate_weight_grad",
        [](Address main_grad, std::ptrdiff_t stride, Address dy, std::ptrdiff_t dy_columns,
           std::ptrdiff_t dy_stride, Address x, std::ptrdiff_t x_columns, std::ptrdiff_t x_stride,
           std::ptrdiff_t rows, int threads) {
            accumulate(reinterpret_cast<float*>(main_grad), stride,
                       {reinterpret_cast<const bf16*>(dy), rows, dy_columns, dy_stride},
                       {reinterpret_cast<const bf16*>(x), rows, x_columns, x_stride}, threads);
        },
        Unlocked());
#endif
}
