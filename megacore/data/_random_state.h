// The parts of numpy.random.RandomState(seed) that are used here: MT19937 with its legacy seeding,
// random_sample, randint, and a Fisher-Yates shuffle from the end. The draws of the shuffle do not
// depend on the values, so they are made one block ahead and the elements to swap are prefetched.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>

#include "_cpu.h"

namespace megacore {

class Mt19937 {
  public:
    Mt19937(std::uint32_t seed, bool portable) : avx512_(!portable && runs_avx512()) {
        state_[0] = seed;
        for (std::uint32_t k = 1; k < kWords; ++k) {
            state_[k] = 1812433253U * (state_[k - 1] ^ (state_[k - 1] >> 30)) + k;
        }
    }

    std::uint32_t next() {
        if (position_ == kWords) refill();
        return words_[position_++];
    }

    // Returns the next words, at least one, without consuming them; skip() consumes them.
    std::pair<const std::uint32_t*, int> ready() {
        if (position_ == kWords) refill();
        return {words_ + position_, kWords - position_};
    }
    void skip(int count) { position_ += count; }

    bool avx512() const { return avx512_; }

  private:
    static constexpr int kWords = 624;
    static constexpr int kMiddle = 397;

    void refill() {
        position_ = 0;
#ifdef MEGACORE_HAS_AVX512
        if (avx512_) return refill_avx512(state_, words_);
#endif
        refill_words(state_, words_);
    }

#ifdef MEGACORE_HAS_AVX512
    MEGACORE_AVX512 static void refill_avx512(std::uint32_t* state, std::uint32_t* words) {
        refill_words(state, words);
    }
#endif

    static MEGACORE_INLINE std::uint32_t twist(std::uint32_t far, std::uint32_t here,
                                               std::uint32_t after) {
        const std::uint32_t y = (here & 0x80000000U) | (after & 0x7fffffffU);
        return far ^ (y >> 1) ^ (0x9908b0dfU & (0U - (after & 1U)));
    }

    // Compilers can vectorise these loops, because each word read was written at least 227 words
    // earlier or not at all.
    static MEGACORE_INLINE void refill_words(std::uint32_t* state, std::uint32_t* words) {
        constexpr int behind = kWords - kMiddle;
        for (int k = 0; k < behind; ++k)
            state[k] = twist(state[k + kMiddle], state[k], state[k + 1]);
        for (int k = behind; k < kWords - 1; ++k)
            state[k] = twist(state[k - behind], state[k], state[k + 1]);
        state[kWords - 1] = twist(state[kMiddle - 1], state[kWords - 1], state[0]);
        for (int k = 0; k < kWords; ++k) {
            std::uint32_t y = state[k];
            y ^= y >> 11;
            y ^= (y << 7) & 0x9d2c5680U;
            y ^= (y << 15) & 0xefc60000U;
            words[k] = y ^ (y >> 18);
        }
    }

    alignas(64) std::uint32_t state_[kWords];
    alignas(64) std::uint32_t words_[kWords];
    int position_ = kWords;
    bool avx512_;
};

class RandomState {
  public:
    RandomState(std::uint32_t seed, bool portable) : generator_(seed, portable) {}

    // Shuffles in place, exactly as numpy.random.RandomState.shuffle does a one-dimensional array.
    template <typename T>
    void shuffle(T* values, std::int64_t count) {
        std::int64_t i = count - 1;
        for (; i > 0xffffffffLL; --i)
            std::swap(values[i], values[draw_wide(static_cast<std::uint64_t>(i))]);
        int steps = draw_block(i, targets_[0]);
        for (int turn = 0; steps > 0; turn ^= 1) {
            const std::uint32_t* now = targets_[turn];
            std::uint32_t* later = targets_[turn ^ 1];
            const int coming = draw_block(i - steps, later);
            // pads the last block, so that all entries can be prefetched
            std::fill(later + coming, later + steps, 0U);
            for (int k = 0; k < steps; ++k, --i) {
                __builtin_prefetch(values + later[k], 1);
                std::swap(values[i], values[now[k]]);
            }
            steps = coming;
        }
    }

    // random_sample(): a number in [0, 1) with 53 bits.
    double uniform() {
        const std::uint32_t high = generator_.next() >> 5;
        const std::uint32_t low = generator_.next() >> 6;
        return (high * 67108864.0 + low) / 9007199254740992.0;
    }

    // randint(count): an integer in [0, count).
    std::int64_t below(std::int64_t count) {
        const auto maximum = static_cast<std::uint64_t>(count - 1);
        if (count < 2) return 0;
        if (maximum > 0xffffffffULL) return static_cast<std::int64_t>(draw_wide(maximum));
        const std::uint32_t mask =
            0xffffffffU >> __builtin_clz(static_cast<std::uint32_t>(maximum));
        std::uint32_t value;
        do {
            value = generator_.next() & mask;
        } while (value > maximum);
        return value;
    }

  private:
    static constexpr int kBlock = 128;

    // Draws the targets of the steps i, i-1, … of a shuffle, at most one block of them, and returns
    // their number (0 if i is 0).
    int draw_block(std::int64_t i, std::uint32_t* targets) {
        const int steps = static_cast<int>(std::min<std::int64_t>(i, kBlock));
        auto maximum = static_cast<std::uint32_t>(i);
        for (int done = 0; done < steps;) {
            // The mask is the least 2^k - 1 that is not below the maximum. It stays the same until
            // the maximum is half of it.
            const std::uint32_t mask = 0xffffffffU >> __builtin_clz(maximum);
            const int same =
                static_cast<int>(std::min<std::int64_t>(steps - done, maximum - (mask >> 1)));
            draw_masked(maximum, mask, same, targets + done);
            done += same;
            maximum -= static_cast<std::uint32_t>(same);
        }
        return std::max(steps, 0);
    }

    // Draws `count` numbers, uniform in [0, maximum], [0, maximum - 1], …, by rejection.
    void draw_masked(std::uint32_t maximum, std::uint32_t mask, int count, std::uint32_t* targets) {
        for (int done = 0; done < count;) {
            const auto [words, ready] = generator_.ready();
            int used = 0;
#ifdef MEGACORE_HAS_AVX512
            if (generator_.avx512()) {
                used = accept_avx512(words, ready, maximum - static_cast<std::uint32_t>(done), mask,
                                     count - done, targets + done, &done);
            }
#endif
            while (used < ready && done < count) {
                const std::uint32_t value = words[used++] & mask;
                targets[done] = value;
                done += value <= maximum - static_cast<std::uint32_t>(done);
            }
            generator_.skip(used);
        }
    }

#ifdef MEGACORE_HAS_AVX512
    // Processes 16 words at a time, while the acceptance of each word does not depend on the words
    // before it. Returns the number of words used, and adds the number of accepted ones to `done`.
    MEGACORE_AVX512 static int accept_avx512(const std::uint32_t* words, int ready,
                                             std::uint32_t maximum, std::uint32_t mask, int count,
                                             std::uint32_t* targets, int* done) {
        int used = 0;
        int accepted = 0;
        for (; used + 16 <= ready && accepted + 16 <= count && maximum >= 16; used += 16) {
            const __m512i value = _mm512_and_si512(_mm512_loadu_si512(words + used),
                                                   _mm512_set1_epi32(static_cast<int>(mask)));
            const __mmask16 below =
                _mm512_cmple_epu32_mask(value, _mm512_set1_epi32(static_cast<int>(maximum - 15)));
            const __mmask16 above =
                _mm512_cmpgt_epu32_mask(value, _mm512_set1_epi32(static_cast<int>(maximum)));
            if ((below | above) != 0xffff) break;
            _mm512_storeu_si512(targets + accepted, _mm512_maskz_compress_epi32(below, value));
            const int more = __builtin_popcount(below);
            accepted += more;
            maximum -= static_cast<std::uint32_t>(more);
        }
        *done += accepted;
        return used;
    }
#endif

    // Draws a number for a maximum beyond 32 bits from two words, the high one first.
    std::uint64_t draw_wide(std::uint64_t maximum) {
        const std::uint64_t mask = ~0ULL >> __builtin_clzll(maximum);
        std::uint64_t value;
        do {
            value = generator_.next();
            value = (value << 32 | generator_.next()) & mask;
        } while (value > maximum);
        return value;
    }

    Mt19937 generator_;
    std::uint32_t targets_[2][kBlock];
};

}  // namespace megacore
