// Vectorised MT19937 (Matsumoto and Nishimura 1998): draws for dropout, bitwise equal to those of
// torch's CPU generator.
#include "_kernels.h"

#include <pybind11/stl.h>

#include <cmath>
#include <utility>
#include <vector>

#include "_rows.h"

namespace {

using megacore::Index;
using Ranges = std::vector<std::pair<Index, Index>>;

}  // namespace

#ifdef MEGACORE_HAS_AVX512
MEGACORE_AVX512_BEGIN
namespace megacore {
namespace {

constexpr Index kWords = 624, kMiddle = 397;

// State of the generator as torch.get_rng_state() returns it.
struct State {
    std::uint64_t seed;
    std::int32_t left;  // remaining words of this block, plus one
    std::int32_t seeded;
    std::uint64_t next;
    std::uint64_t words[kWords];
};

inline __m512i read(const std::uint32_t* from, __mmask16 lanes) {
    return _mm512_maskz_loadu_epi32(lanes, from);
}

class Engine {
  public:
    explicit Engine(const State& state)
        : left_(state.left - 1), next_(static_cast<Index>(state.next)) {
        for (Index i = 0; i < kWords; ++i) words_[i] = static_cast<std::uint32_t>(state.words[i]);
    }

    void save(State& state) const {
        state.left = static_cast<std::int32_t>(left_ + 1);
        state.next = static_cast<std::uint64_t>(next_);
        for (Index i = 0; i < kWords; ++i) state.words[i] = words_[i];
    }

    // Write ones where a 53-bit number is below the threshold, else zeros. Each number takes a pair
    // of words, the upper one first.
    template <class T>
    void below(std::uint64_t threshold, T* out, Index count) {
        while (count > 0) {
            if (left_ == 0) renew();
            const Index pairs = std::min(left_ / 2, count);
            for (Index done = 0; done < pairs; done += 16) {
                const Index some = std::min<Index>(16, pairs - done);
                const std::uint32_t* from = words_ + next_ + 2 * done;
                const __m512i first = read(from, first_lanes(2 * some));
                const __m512i second =
                    read(from + 16, first_lanes(std::max<Index>(0, 2 * some - 16)));
                put(out + done, compare(first, second, threshold), first_lanes(some));
            }
            out += pairs;
            count -= pairs;
            next_ += 2 * pairs;
            left_ -= 2 * pairs;
            if (count > 0 && left_ == 1) {  // a pair across two blocks
                const std::uint32_t upper = word(), lower = word();
                put(out++, static_cast<__mmask16>(number(upper, lower) < threshold), 1);
                --count;
            }
        }
    }

    // Pass over numbers without writing them.
    void skip(Index count) {
        for (Index words = 2 * count; words > 0;) {
            if (left_ == 0) renew();
            const Index some = std::min(left_, words);
            next_ += some;
            left_ -= some;
            words -= some;
        }
    }

  private:
    static void put(float* out, __mmask16 ones, __mmask16 lanes) {
        _mm512_mask_storeu_ps(out, lanes, _mm512_maskz_mov_ps(ones, _mm512_set1_ps(1.0f)));
    }
    static void put(bf16* out, __mmask16 ones, __mmask16 lanes) {
        _mm256_mask_storeu_epi16(out, lanes, _mm256_maskz_set1_epi16(ones, 0x3F80));
    }

    static std::uint64_t number(std::uint32_t upper, std::uint32_t lower) {
        return (static_cast<std::uint64_t>(upper & 0x1FFFFF) << 32) | lower;
    }

    static __m512i tempered(__m512i y) {
        y = _mm512_xor_si512(y, _mm512_srli_epi32(y, 11));
        y = _mm512_xor_si512(y, _mm512_and_si512(_mm512_slli_epi32(y, 7), word_of(0x9d2c5680)));
        y = _mm512_xor_si512(y, _mm512_and_si512(_mm512_slli_epi32(y, 15), word_of(0xefc60000)));
        return _mm512_xor_si512(y, _mm512_srli_epi32(y, 18));
    }
    static __m512i word_of(std::uint32_t value) {
        return _mm512_set1_epi32(static_cast<int>(value));
    }

    // Compare numbers with the threshold; the lower words are only needed for equal upper words.
    static __mmask16 compare(__m512i first, __m512i second, std::uint64_t threshold) {
        const __m512i even =
            _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const __m512i words = tempered(_mm512_permutex2var_epi32(first, even, second));
        const __m512i upper = _mm512_and_si512(words, word_of(0x1FFFFF));
        const __m512i limit = word_of(static_cast<std::uint32_t>(threshold >> 32));
        const __mmask16 below = _mm512_cmplt_epu32_mask(upper, limit);
        const __mmask16 equal = _mm512_cmpeq_epi32_mask(upper, limit);
        if (!equal) return below;
        const __m512i odd = _mm512_add_epi32(even, _mm512_set1_epi32(1));
        const __m512i lower = tempered(_mm512_permutex2var_epi32(first, odd, second));
        const __m512i rest = word_of(static_cast<std::uint32_t>(threshold));
        return static_cast<__mmask16>(below | (equal & _mm512_cmplt_epu32_mask(lower, rest)));
    }

    // Compute words [first, end) of the next block:
    // words[i + offset] ^ twist(words[i], words[i + 1]).
    void twist(Index first, Index end, Index offset) {
        for (Index i = first; i < end; i += 16) {
            const __mmask16 lanes = first_lanes(end - i);
            const __m512i one = read(words_ + i, lanes), other = read(words_ + i + 1, lanes);
            // the upper bit is that of `one`
            const __m512i mixed = _mm512_ternarylogic_epi32(word_of(0x80000000), one, other, 0xCA);
            const __mmask16 is_odd = _mm512_test_epi32_mask(other, _mm512_set1_epi32(1));
            const __m512i twisted = _mm512_xor_si512(
                _mm512_srli_epi32(mixed, 1), _mm512_maskz_mov_epi32(is_odd, word_of(0x9908b0df)));
            _mm512_mask_storeu_epi32(words_ + i, lanes,
                                     _mm512_xor_si512(read(words_ + i + offset, lanes), twisted));
        }
    }

    void renew() {
        twist(0, kWords - kMiddle, kMiddle);
        words_[kWords] = words_[0];  // successor of the last word
        twist(kWords - kMiddle, kWords, kMiddle - kWords);
        left_ = kWords;
        next_ = 0;
    }

    std::uint32_t word() {
        if (left_ == 0) renew();
        --left_;
        const __m512i y = tempered(word_of(words_[next_++]));
        return static_cast<std::uint32_t>(_mm512_cvtsi512_si32(y));
    }

    Index left_, next_;
    std::uint32_t words_[kWords + 1];
};

template <class T>
void bernoulli(std::uintptr_t address, double p, std::uintptr_t out, Index rows, Index length,
               const Ranges& ranges) {
    State& state = *at<State>(address);
    Engine engine(state);
    const auto threshold = static_cast<std::uint64_t>(std::ceil(std::ldexp(p, 53)));
    T* next = at<T>(out);
    for (Index row = 0; row < rows; ++row) {
        Index drawn = 0;
        for (const auto& [begin, end] : ranges) {
            engine.skip(begin - drawn);
            engine.below(threshold, next, end - begin);
            next += end - begin;
            drawn = end;
        }
        engine.skip(length - drawn);
    }
    engine.save(state);
}

}  // namespace
}  // namespace megacore
MEGACORE_AVX512_END
#endif

namespace {

// Draw ones of probability p and zeros for rows of `length` numbers, write those of each row's
// ascending ranges to `out`, and advance the state.
void bernoulli(std::uintptr_t state, double p, std::uintptr_t out, Index rows, Index length,
               const Ranges& ranges, bool half) {
#ifdef MEGACORE_HAS_AVX512
    half ? megacore::bernoulli<megacore::bf16>(state, p, out, rows, length, ranges)
         : megacore::bernoulli<float>(state, p, out, rows, length, ranges);
#else
    no_kernels();
#endif
}

}  // namespace

void add_draw(py::module_& module) {
    module.def("bernoulli", &bernoulli, Unlocked());
}
