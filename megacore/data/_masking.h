// Which tokens of a sample are to be predicted: words drawn as Megatron core draws them, or T5's
// random spans.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "_random_state.h"

namespace megacore {

struct MaskingRules {
    double share;                          // of the tokens
    bool whole_words;
    // of 1, 2, … words; how often each number of words or fewer is drawn
    std::vector<double> length_cumulative;
    // above 0: lengths are geometric with it instead, cut at the number of these
    double length_probability;
};

// Draws words of a sample, alone or with those after them, until the share is reached.
class WordChooser {
  public:
    WordChooser(const MaskingRules& rules, const std::uint8_t* continues, std::int64_t cls,
                std::int64_t sep)
        : rules_(rules), continues_(continues), cls_(cls), sep_(sep) {}

    // Calls take(positions, count) for each run of words, in the order in which they are drawn.
    // `target` is the length that the sample was to have.
    template <typename Take>
    void choose(const std::int64_t* tokens, std::int64_t count, std::int64_t target,
                RandomState& random, Take take) {
        find_words(tokens, count);
        const auto words = static_cast<std::int64_t>(starts_.size()) - 1;
        const double limit =
            std::min(rules_.share * static_cast<double>(target),
                     std::max(1.0, std::nearbyint(static_cast<double>(count) * rules_.share)));
        order_.resize(static_cast<std::size_t>(words));
        std::iota(order_.begin(), order_.end(), 0);
        random.shuffle(order_.data(), words);
        taken_.assign(static_cast<std::size_t>(count), 0);
        std::int64_t done = 0;
        for (const std::int32_t word : order_) {
            if (static_cast<double>(done) >= limit) break;
            std::int64_t length = draw_length(random);
            while (length > 0 && static_cast<double>(done + size(word, length, words)) > limit)
                --length;
            if (length == 0) continue;
            const std::int64_t* first = positions_.data() + starts_[word];
            const std::int64_t chosen = size(word, length, words);
            if (std::any_of(first, first + chosen,
                            [this](std::int64_t place) { return taken_[place] != 0; }))
                continue;
            take(first, chosen);
            for (std::int64_t k = 0; k < chosen; ++k) taken_[first[k]] = 1;
            done += chosen;
        }
    }

  private:
    // The places of all tokens that are neither [CLS] nor [SEP], and where among these each word
    // begins.
    void find_words(const std::int64_t* tokens, std::int64_t count) {
        positions_.clear();
        starts_.clear();
        for (std::int64_t i = 0; i < count; ++i) {
            if (tokens[i] == cls_ || tokens[i] == sep_) continue;
            if (starts_.empty() || !rules_.whole_words || !continues_[tokens[i]]) {
                starts_.push_back(static_cast<std::int64_t>(positions_.size()));
            }
            positions_.push_back(i);
        }
        starts_.push_back(static_cast<std::int64_t>(positions_.size()));
    }

    // Tokens of `length` words from `word` on, or of those that there are.
    std::int64_t size(std::int64_t word, std::int64_t length, std::int64_t words) const {
        return starts_[std::min(word + length, words)] - starts_[word];
    }

    std::int64_t draw_length(RandomState& random) const {
        const auto& cumulative = rules_.length_cumulative;
        const auto longest = static_cast<std::int64_t>(cumulative.size());
        const double draw = random.uniform();
        if (rules_.length_probability > 0) {
            const double length =
                std::ceil(std::log1p(-draw) / std::log(1.0 - rules_.length_probability));
            return std::max<std::int64_t>(1, std::min(static_cast<std::int64_t>(length), longest));
        }
        const auto place =
            std::upper_bound(cumulative.begin(), cumulative.end(), draw) - cumulative.begin();
        return std::min<std::int64_t>(place + 1, longest);
    }

    const MaskingRules& rules_;
    const std::uint8_t* continues_;
    const std::int64_t cls_;
    const std::int64_t sep_;
    std::vector<std::int64_t> positions_;
    std::vector<std::int64_t> starts_;
    std::vector<std::int32_t> order_;
    std::vector<std::uint8_t> taken_;
};

// A run of tokens [first, first + count).
struct Span {
    std::int64_t first, count;
};

// Spans of a mean length as T5 draws them: text and spans take turns, text first, each of random
// lengths that add up.
class SpanChooser {
  public:
    SpanChooser(double share, double mean_length) : share_(share), mean_length_(mean_length) {}

    // Ascending; none of less than two tokens.
    void choose(std::int64_t count, RandomState& random, std::vector<Span>& spans) {
        spans.clear();
        const auto wanted =
            static_cast<std::int64_t>(std::nearbyint(static_cast<double>(count) * share_));
        const std::int64_t noise = std::min(std::max<std::int64_t>(wanted, 1), count - 1);
        if (noise < 1) return;
        auto parts =
            static_cast<std::int64_t>(std::nearbyint(static_cast<double>(noise) / mean_length_));
        parts = std::min({std::max<std::int64_t>(parts, 1), noise, count - noise});
        divide(noise, parts, random, noise_);
        divide(count - noise, parts, random, text_);
        std::int64_t place = 0;
        for (std::int64_t k = 0; k < parts; ++k) {
            place += text_[k];
            spans.push_back({place, noise_[k]});
            place += noise_[k];
        }
    }

  private:
    // Cuts `count` into `parts` lengths of at least 1, every way of doing so as likely as another.
    void divide(std::int64_t count, std::int64_t parts, RandomState& random,
                std::vector<std::int64_t>& lengths) {
        begins_.assign(static_cast<std::size_t>(count - 1), 0);
        std::fill_n(begins_.begin(), parts - 1, 1);
        random.shuffle(begins_.data(), count - 1);
        lengths.assign(1, 1);
        for (const std::int32_t begin : begins_) {
            if (begin) {
                lengths.push_back(1);
            } else {
                ++lengths.back();
            }
        }
    }

    const double share_;
    const double mean_length_;
    std::vector<std::int32_t> begins_;
    std::vector<std::int64_t> noise_;
    std::vector<std::int64_t> text_;
};

}  // namespace megacore
