// The weight gradient dyᵀ x of fp32 or bf16 factors, added to an fp32 main gradient. Products are
// summed in registers and never rounded to bf16.
//
// An instruction multiplies one row of fp32, or two rows of bf16 (AVX512-BF16's dot product): a
// group. Both factors are packed so that a group's rows are adjacent: x in panels of 32 columns for
// all threads, dy in panels of 8 columns by the thread that processes them. One tile of 8 x 32 sums
// is the product of a panel of dy and a panel of x. A task is all tiles of some panels of dy.
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

using Group = std::uint32_t;  // one column of a group of rows
template <class T>
constexpr std::ptrdiff_t kDepth = sizeof(Group) / sizeof(T);  // rows of a group

constexpr std::ptrdiff_t kLanes = 16;
constexpr std::ptrdiff_t kTall = 8;    // columns of dy in a panel, rows of a tile
constexpr std::ptrdiff_t kWide = 32;   // columns of x in a panel, and of a tile
// Groups of rows that are multiplied at a time, so that a panel of x stays in the first cache.
constexpr std::ptrdiff_t kMostGroups = 256;
// Parts of that many groups that are packed at a time, so that a task's panels of dy stay in the
// second cache.
constexpr std::ptrdiff_t kMostParts = 4;
constexpr std::ptrdiff_t kAlignment = 64;
// Groups between panels of dy, so that they do not conflict in the cache.
constexpr std::ptrdiff_t kPadding = 16;
constexpr std::ptrdiff_t kChunk = 32;    // groups between two prefetches
constexpr std::ptrdiff_t kCacheLine = 64;

template <class T>
struct Matrix {
    const T* data;
    std::ptrdiff_t rows, columns, stride;
};

struct Panel {
    __m512i low, high;  // groups of columns 0 … 15 and 16 … 31
};

// Load 32 columns of the group that begins with `row`, zero beyond the matrix.
inline __attribute__((always_inline)) Panel load_group(const Matrix<float>& from,
                                                       std::ptrdiff_t row, std::ptrdiff_t column) {
    const std::ptrdiff_t count = from.columns - column;
    const float* at = from.data + row * from.stride + column;
    return {_mm512_maskz_loadu_epi32(first_lanes(count), at),
            _mm512_maskz_loadu_epi32(first_lanes(std::max<std::ptrdiff_t>(count - kLanes, 0)),
                                     at + kLanes)};
}

inline __attribute__((always_inline)) Panel load_group(const Matrix<bf16>& from, std::ptrdiff_t row,
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

// Add the products of a group of dy with 16 groups of x to `sums`.
template <class T>
inline __attribute__((always_inline)) __m512 add_products(__m512 sums, Group dy, __m512i x) {
    const __m512i factor = _mm512_set1_epi32(static_cast<int>(dy));
    if constexpr (kDepth<T> == 1)
        return _mm512_fmadd_ps(_mm512_castsi512_ps(factor), _mm512_castsi512_ps(x), sums);
    else
        return _mm512_dpbf16_ps(sums, reinterpret_cast<__m512bh>(factor),
                                reinterpret_cast<__m512bh>(x));
}

// Pack a panel of x, [groups, 32].
template <class T>
void pack_wide(const Matrix<T>& x, std::ptrdiff_t row, std::ptrdiff_t groups,
               std::ptrdiff_t column, Group* to) {
    for (std::ptrdiff_t group = 0; group < groups; ++group, to += kWide) {
        const Panel panel = load_group(x, row + kDepth<T> * group, column);
        _mm512_store_si512(to, panel.low);
        _mm512_store_si512(to + kLanes, panel.high);
    }
}

// Pack panels of dy, each [groups, 8] and `spacing` apart, 32 columns at a time. The outer loop is
// over groups of rows because each row is in other memory pages.
template <class T>
void pack_tall(const Matrix<T>& dy, std::ptrdiff_t row, std::ptrdiff_t groups, std::ptrdiff_t first,
               std::ptrdiff_t end, std::ptrdiff_t spacing, Group* to) {
    for (std::ptrdiff_t group = 0; group < groups; ++group, to += kTall) {
        Group* at = to;
        for (std::ptrdiff_t column = first; column < end;
             column += kWide, at += kWide / kTall * spacing) {
            const Panel panel = load_group(dy, row + kDepth<T> * group, column);
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
template <class T>
class Ahead {
  public:
    // Prefetch columns [first, end) of `rows` rows from `row` on in at most `looks` steps.
    Ahead(const Matrix<T>& dy, std::ptrdiff_t row, std::ptrdiff_t rows, std::ptrdiff_t first,
          std::ptrdiff_t end, std::ptrdiff_t looks)
        : at_(reinterpret_cast<const char*>(dy.data + row * dy.stride + first)),
          stride_(dy.stride * static_cast<std::ptrdiff_t>(sizeof(T))),
          width_((end - first) * static_cast<std::ptrdiff_t>(sizeof(T))),
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
template <class T>
void add_tile(const Group* tall, const Group* wide, std::ptrdiff_t groups, float* sums,
              std::ptrdiff_t stride, std::ptrdiff_t rows, std::ptrdiff_t columns,
              Ahead<T>& ahead) {
    __m512 tile[kTall][2];
#pragma GCC unroll 8
    for (int row = 0; row < kTall; ++row) tile[row][0] = tile[row][1] = _mm512_setzero_ps();
    for (std::ptrdiff_t row = 0; row < rows; ++row) {
        _mm_prefetch(reinterpret_cast<const char*>(sums + row * stride), _MM_HINT_T0);
        _mm_prefetch(reinterpret_cast<const char*>(sums + row * stride + kLanes), _MM_HINT_T0);
    }
    while (groups > 0) {
        ahead.look();
        const std::ptrdiff_t chunk = std::min(groups, kChunk);
        for (std::ptrdiff_t group = 0; group < chunk; ++group, tall += kTall, wide += kWide) {
            const __m512i low = _mm512_load_si512(wide), high = _mm512_load_si512(wide + kLanes);
#pragma GCC unroll 8
            for (int row = 0; row < kTall; ++row) {
                tile[row][0] = add_products<T>(tile[row][0], tall[row], low);
                tile[row][1] = add_products<T>(tile[row][1], tall[row], high);
            }
        }
        groups -= chunk;
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
    void operator()(Group* memory) const {
        ::operator delete[](memory, std::align_val_t{kAlignment});
    }
};

// Return the number of columns of dy in a task: the most that fit into the cache, unless threads
// would then wait for the last tasks.
std::ptrdiff_t columns_per_task(std::ptrdiff_t columns, int threads) {
    std::ptrdiff_t best = 0, least = 0;
    for (const std::ptrdiff_t width : {4 * kWide, 3 * kWide, 2 * kWide, kWide}) {
        const std::ptrdiff_t tasks = (columns + width - 1) / width;
        const std::ptrdiff_t time = (tasks + threads - 1) / threads * width;
        if (best == 0 || time < least) best = width, least = time;
    }
    return best;
}

template <class T>
void accumulate(float* main_grad, std::ptrdiff_t stride, const Matrix<T>& dy, const Matrix<T>& x,
                int threads) {
    if (dy.rows == 0) return;
    const std::ptrdiff_t all = (dy.rows + kDepth<T> - 1) / kDepth<T>,
                         most = std::min(kMostGroups, all),
                         panels = (x.columns + kWide - 1) / kWide;
    const std::ptrdiff_t parts = std::min(kMostParts, (all + most - 1) / most);
    const std::ptrdiff_t step = columns_per_task(dy.columns, threads),
                         tasks = (dy.columns + step - 1) / step;
    const std::ptrdiff_t spacing = most * kTall + kPadding, tall_size = step / kTall * spacing;
    const std::ptrdiff_t wide_size = panels * most * kWide, shared = parts * wide_size,
                         own = parts * tall_size;
    const std::unique_ptr<Group[], FreeAligned> memory(
        new (std::align_val_t{kAlignment}) Group[static_cast<std::size_t>(shared + threads * own)]);
#pragma omp parallel num_threads(threads)
    for (std::ptrdiff_t block = 0; block < dy.rows; block += kDepth<T> * parts * most) {
        const std::ptrdiff_t end_row = std::min(dy.rows, block + kDepth<T> * parts * most),
                             count = (end_row - block + kDepth<T> * most - 1) / (kDepth<T> * most);
        const auto row_of = [&](std::ptrdiff_t part) { return block + kDepth<T> * part * most; };
        const auto groups_of = [&](std::ptrdiff_t part) {
            return std::min(most, (end_row - row_of(part) + kDepth<T> - 1) / kDepth<T>);
        };
        Group* const wide = memory.get();
#pragma omp for schedule(static)
        for (std::ptrdiff_t index = 0; index < count * panels; ++index) {
            const std::ptrdiff_t part = index / panels, panel = index % panels;
            pack_wide(x, row_of(part), groups_of(part), panel * kWide,
                      wide + part * wide_size + panel * most * kWide);
        }
        Group* const tall = memory.get() + shared + thread_number() * own;
#pragma omp for schedule(dynamic, 1)
        for (std::ptrdiff_t task = 0; task < tasks; ++task) {
            const std::ptrdiff_t first = task * step, end = std::min(first + step, dy.columns);
            for (std::ptrdiff_t part = 0; part < count; ++part) {
                pack_tall(dy, row_of(part), groups_of(part), first, end, spacing,
                          tall + part * tall_size);
            }
            const std::ptrdiff_t next = std::min(first + threads * step, dy.columns);
            Ahead<T> ahead(dy, block, end_row - block, next, std::min(next + step, dy.columns),
                        panels * ((end - first + kTall - 1) / kTall) * count *
                            ((most + kChunk - 1) / kChunk));
            for (std::ptrdiff_t panel = 0; panel < panels; ++panel) {
                for (std::ptrdiff_t part = 0; part < count; ++part) {
                    for (std::ptrdiff_t column = first; column < end; column += kTall) {
                        add_tile(tall + part * tall_size + (column - first) / kTall * spacing,
                                 wide + part * wide_size + panel * most * kWide, groups_of(part),
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
           std::ptrdiff_t rows, bool half, int threads) {
            const auto add = [&](auto type) {
                using T = decltype(type);
                accumulate<T>(reinterpret_cast<float*>(main_grad), stride,
                              {reinterpret_cast<const T*>(dy), rows, dy_columns, dy_stride},
                              {reinterpret_cast<const T*>(x), rows, x_columns, x_stride}, threads);
            };
            half ? add(bf16{}) : add(float{});
        },
        Unlocked());
#endif
}
