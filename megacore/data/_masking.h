// Choice of the tokens of a sample to predict: words, drawn as in Megatron core, or T5's random
// spans.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "_random_state.h"

namespace megacore {

struct MaskingRules {
    double share;                          // fraction of the tokens to predict
    bool whole_words;
    // cumulative distribution of the number of words (1, 2, …) of a draw
    std::vector<double> length_cumulative;
    // if above 0, the number of words is geometric with this probability instead, at most
    // length_cumulative.size()
    double length_probability;
};

// Draws runs of one or more words of a sample until the share is reached.
class WordChooser {
  public:
    WordChooser(const MaskingRules& rules, const std::uint8_t* continues, std::int64_t cls,
                std::int64_t sep)
        : rules_(rules), continues_(continues), cls_(cls), sep_(sep) {}

    // Calls take(positions, count) for each run of words in the order of drawing. `target` is the
    // target length of the sample.
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
    // Finds the positions of all tokens except [CLS] and [SEP], and the start of each word among
    // these positions.
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

    // Returns the number of tokens of `length` words from `word` on, or of fewer at the end.
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

// A range of tokens [first, first + count).
struct Span {
    std::int64_t first, count;
};

// Draws spans with a given mean length as in T5: text and spans alternate, text first, with random
// lengths that add up to the number of tokens.
class SpanChooser {
  public:
    SpanChooser(double share, double mean_length) : share_(share), mean_length_(mean_length) {}

    // Sets `spans` to ascending spans; to none if there are fewer than two tokens.
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
    // Divides `count` into `parts` lengths of at least 1, uniformly among all possibilities.
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
