// Choice of the data set of each sample of a blend: that with the largest weight x max(i, 1) -
// taken, and of equals the first, in double precision exactly as written here (a fused multiply-add
// would give other results).
//
// Each sample depends on the previous one, so the processor mostly waits. Therefore the samples are
// divided into segments that are computed in parallel from guessed counts. If the end of a segment
// differs from the guess for the next one, the next one is computed again from the true counts,
// until they agree with the first computation at one of the marks.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>
#include <vector>

#include "_cpu.h"

namespace megacore {

using Counts = std::vector<std::int64_t>;

class Blend {
  public:
    // `limits` are the numbers of samples available in the data sets, or empty for no limits.
    // `surplus`, or nothing for zeros, is what each data set has given beyond its share before these
    // samples: multiples of 2^-20, so that sums with counts are exact, or infinity for a data set
    // that gives none.
    Blend(std::vector<double> weights, Counts limits, std::vector<double> surplus, bool portable,
          std::int16_t* dataset_index, std::int64_t* sample_index)
        : weights_(std::move(weights)),
          limits_(std::move(limits)),
          surplus_(std::move(surplus)),
          taken_(weights_.size(), 0),
          dataset_index_(dataset_index),
          sample_index_(sample_index),
          portable_(portable || !runs_avx512()) {}

    void run(std::int64_t size) {
        const std::size_t count = weights_.size();
        std::int64_t done = 0;
#ifdef MEGACORE_HAS_AVX512
        if (!portable_ && count <= 8) {
            done = run_segments<1, 8>(size);
        } else if (!portable_ && count <= 16) {
            done = run_segments<2, 4>(size);
        } else if (!portable_ && count <= 32) {
            done = run_segments<4, 2>(size);
        } else if (!portable_ && count <= 64) {
            done = run_segments<8, 1>(size);
        }
#endif
        walk(done, size);
    }

  private:
    // Computes the samples first … last-1 one by one.
    void walk(std::int64_t first, std::int64_t last) {
        const std::size_t count = weights_.size();
        const double* const weight = weights_.data();
        std::vector<double> counts(count);
        for (std::size_t d = 0; d < count; ++d) counts[d] = real_count(d, taken_[d]);
        double* const taken = counts.data();
        for (std::int64_t i = first; i < last; ++i) {
            const double x = std::max(static_cast<double>(i), 1.0);
            std::size_t best = 0;
            double most = weight[0] * x - taken[0];
            for (std::size_t d = 1; d < count; ++d) {
                const double error = weight[d] * x - taken[d];
                if (error > most) {
                    most = error;
                    best = d;
                }
            }
            dataset_index_[i] = static_cast<std::int16_t>(best);
            sample_index_[i] = taken_[best]++;
            taken[best] = real_count(best, taken_[best]);
        }
    }

    // Returns the count with the surplus; infinity for an exhausted data set, so that it is not
    // chosen.
    double real_count(std::size_t d, std::int64_t count) const {
        if (used_up(d)) return std::numeric_limits<double>::infinity();
        return surplus_.empty() ? static_cast<double>(count)
                                : surplus_[d] + static_cast<double>(count);
    }

    bool used_up(std::size_t d) const {
        return (!limits_.empty() && taken_[d] >= limits_[d]) ||
               (!surplus_.empty() && std::isinf(surplus_[d]));
    }

#ifdef MEGACORE_HAS_AVX512
    static constexpr std::int64_t kMark = 512;
    static constexpr std::int64_t kSegment = 64 * kMark;
    static constexpr int kLanes = 8;

    // Counts of S segments that are computed in parallel, in V vectors each.
    template <int V, int S>
    struct State {
        // infinity for unused lanes and exhausted data sets
        alignas(64) double taken[S][V * kLanes];
        alignas(64) std::int64_t counts[S][V * kLanes];
        std::int64_t at[S];  // next sample
    };

    // Computes as many complete rounds of segments as fit and returns the number of samples.
    template <int V, int S>
    std::int64_t run_segments(std::int64_t size) {
        constexpr std::int64_t round = S * kSegment;
        alignas(64) double weights[V * kLanes] = {};
        std::copy(weights_.begin(), weights_.end(), weights);
        walk(0, std::min<std::int64_t>(1, size));  // sample 0, for which max(i, 1) is not i
        std::int64_t done = std::min<std::int64_t>(1, size);
        for (; size - done >= round; done += round) {
            const Counts before = taken_;
            run_round<V, S>(weights, done);
            if (overdrawn()) {
                taken_ = before;
                walk(done, done + round);
            }
        }
        return done;
    }

    // Returns true if a data set is exhausted, which the vector code does not check.
    bool overdrawn() const {
        for (std::size_t d = 0; d < limits_.size(); ++d) {
            if (taken_[d] > limits_[d]) return true;
        }
        return false;
    }

    // Computes S segments of samples from `first` on.
    template <int V, int S>
    void run_round(const double* weights, std::int64_t first) {
        State<V, S> state;
        // counts of each segment at its start and at each mark
        std::vector<std::vector<Counts>> marks(S);
        for (int s = 0; s < S; ++s) {
            state.at[s] = first + s * kSegment;
            set(state, s, s == 0 ? taken_ : guess(state.at[s]));
            marks[s].push_back(counts_of(state, s));
        }
        for (std::int64_t mark = 0; mark < kSegment; mark += kMark) {
            steps<V, S>(weights, state, dataset_index_, sample_index_);
            for (int s = 0; s < S; ++s) marks[s].push_back(counts_of(state, s));
        }
        taken_ = marks[0].back();
        for (int s = 1; s < S; ++s) join<V>(weights, first + s * kSegment, marks[s]);
    }

    // Computes a segment again from the true counts until they agree with the counts of its first
    // computation.
    template <int V>
    void join(const double* weights, std::int64_t first, const std::vector<Counts>& marks) {
        State<V, 1> state;
        state.at[0] = first;
        set(state, 0, taken_);
        std::size_t mark = 0;
        while (mark + 1 < marks.size() && taken_ != marks[mark]) {
            steps<V, 1>(weights, state, dataset_index_, sample_index_);
            taken_ = counts_of(state, 0);
            ++mark;
        }
        if (taken_ == marks[mark]) taken_ = marks.back();
    }

    // Returns a guess of the counts before sample i: they add up to i and are proportional to the
    // weights.
    Counts guess(std::int64_t i) const {
        const double x = static_cast<double>(i);
        Counts counts(taken_);
        std::int64_t missing = i;
        for (std::size_t d = 0; d < counts.size(); ++d) {
            if (!used_up(d)) counts[d] = static_cast<std::int64_t>(std::floor(weights_[d] * x));
            missing -= counts[d];
        }
        const std::int64_t step = missing < 0 ? -1 : 1;
        for (; missing != 0; missing -= step) {
            std::size_t best = counts.size();
            double most = -std::numeric_limits<double>::infinity();
            for (std::size_t d = 0; d < counts.size(); ++d) {
                const double error =
                    static_cast<double>(step) * (weights_[d] * x - static_cast<double>(counts[d]));
                if (error > most && !used_up(d)) {
                    most = error;
                    best = d;
                }
            }
            if (best == counts.size()) break;  // all data sets are exhausted
            counts[best] += step;
        }
        return counts;
    }

    template <int V, int S>
    void set(State<V, S>& state, int s, const Counts& counts) const {
        std::fill_n(state.taken[s], V * kLanes, std::numeric_limits<double>::infinity());
        for (std::size_t d = 0; d < counts.size(); ++d) {
            state.counts[s][d] = counts[d];
            state.taken[s][d] = real_count(d, counts[d]);
        }
    }

    template <int V, int S>
    Counts counts_of(const State<V, S>& state, int s) const {
        return Counts(state.counts[s], state.counts[s] + weights_.size());
    }

    // Computes kMark samples of each segment.
    template <int V, int S>
    MEGACORE_AVX512 static void steps(const double* weights, State<V, S>& state,
                                      std::int16_t* dataset_index, std::int64_t* sample_index) {
        const __m512d one = _mm512_set1_pd(1.0);
        __m512d weight[V];
        __m512d taken[S][V];
        __m512d x[S];
        for (int v = 0; v < V; ++v) weight[v] = _mm512_load_pd(weights + v * kLanes);
        for (int s = 0; s < S; ++s) {
            for (int v = 0; v < V; ++v) taken[s][v] = _mm512_load_pd(state.taken[s] + v * kLanes);
            x[s] = _mm512_set1_pd(static_cast<double>(state.at[s]));
        }
        for (std::int64_t step = 0; step < kMark; ++step) {
#pragma GCC unroll 8
            for (int s = 0; s < S; ++s) {
                __m512d error[V];
                __m512d most = _mm512_set1_pd(-std::numeric_limits<double>::infinity());
                for (int v = 0; v < V; ++v) {
                    error[v] = _mm512_sub_pd(_mm512_mul_pd(weight[v], x[s]), taken[s][v]);
                    most = v == 0 ? error[0] : _mm512_max_pd(most, error[v]);
                }
                most = _mm512_max_pd(most, _mm512_shuffle_f64x2(most, most, 0x4e));
                most = _mm512_max_pd(most, _mm512_shuffle_f64x2(most, most, 0xb1));
                most = _mm512_max_pd(most, _mm512_permute_pd(most, 0x55));
                std::uint64_t equal = 0;
                for (int v = 0; v < V; ++v) {
                    equal |=
                        static_cast<std::uint64_t>(_mm512_cmp_pd_mask(error[v], most, _CMP_EQ_OQ))
                        << (v * kLanes);
                }
                const std::uint64_t first = equal & (0U - equal);
                for (int v = 0; v < V; ++v) {
                    const auto here = static_cast<__mmask8>(first >> (v * kLanes));
                    taken[s][v] = _mm512_mask_add_pd(taken[s][v], here, taken[s][v], one);
                }
                x[s] = _mm512_add_pd(x[s], one);
                const int best = __builtin_ctzll(equal);
                dataset_index[state.at[s] + step] = static_cast<std::int16_t>(best);
                sample_index[state.at[s] + step] = state.counts[s][best]++;
            }
        }
        for (int s = 0; s < S; ++s) {
            for (int v = 0; v < V; ++v) _mm512_store_pd(state.taken[s] + v * kLanes, taken[s][v]);
            state.at[s] += kMark;
        }
    }
#endif

    const std::vector<double> weights_;
    const Counts limits_;
    const std::vector<double> surplus_;
    Counts taken_;
    std::int16_t* const dataset_index_;
    std::int64_t* const sample_index_;
    const bool portable_;
};

}  // namespace megacore
