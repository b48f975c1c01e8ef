// Samples of whole sentences, as BERT and T5 take them: (first sentence, end sentence, target length).
#pragma once

#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

namespace megacore {

struct SentenceMapOptions {
    std::int64_t max_samples;  // no epoch begins with that many or more
    std::int64_t max_epochs;
    std::int64_t max_length;   // tokens of a sample
    double short_probability;  // of a shorter target
    std::int64_t min_sentences;
    std::uint32_t seed;
};

class SentenceMap {
  public:
    SentenceMap(const std::int64_t* document_starts, std::int64_t documents, const std::int32_t* lengths,
                const SentenceMapOptions& options)
        : starts_(document_starts),
          documents_(documents),
          lengths_(lengths),
          options_(options),
          targets_(options.seed),
          // A sample is short when a draw is a multiple of it; 0: never.
          short_ratio_(options.short_probability > 0
                           ? static_cast<std::uint32_t>(std::lround(1.0 / options.short_probability))
                           : 0) {}

    template <typename T>
    std::vector<T> build() {
        std::vector<T> rows;
        count([&rows](std::int64_t first, std::int64_t end, std::int64_t target) {
            rows.push_back(static_cast<T>(first));
            rows.push_back(static_cast<T>(end));
            rows.push_back(static_cast<T>(target));
        });
        shuffle(rows);
        return rows;
    }

    // (epochs, samples), after add(first sentence, end sentence, target length) of each sample, unshuffled.
    template <typename Add>
    std::pair<std::int64_t, std::int64_t> count(Add add) {
        const std::vector<std::int64_t> usable = usable_documents();
        std::int64_t samples = 0;
        std::int64_t epoch = 0;
        for (; epoch < options_.max_epochs && samples < options_.max_samples && !usable.empty(); ++epoch) {
            for (const std::int64_t document : usable) samples += add_document(document, add);
        }
        return {epoch, samples};
    }

  private:
    static constexpr std::int32_t kLongSentence = 512;

    std::vector<std::int64_t> usable_documents() const {
        std::vector<std::int64_t> usable;
        for (std::int64_t document = 0; document < documents_; ++document) {
            const std::int64_t sentences = starts_[document + 1] - starts_[document];
            // A document of one sentence may have a long one.
            if (sentences >= options_.min_sentences && !(sentences > 1 && has_long_sentence(document))) {
                usable.push_back(document);
            }
        }
        return usable;
    }

    bool has_long_sentence(std::int64_t document) const {
        for (std::int64_t sentence = starts_[document]; sentence < starts_[document + 1]; ++sentence) {
            if (lengths_[sentence] > kLongSentence) return true;
        }
        return false;
    }

    template <typename Add>
    std::int64_t add_document(std::int64_t document, Add& add) {
        const std::int64_t end = starts_[document + 1];
        std::int64_t first = starts_[document];
        std::int64_t target = draw_target();
        std::int64_t tokens = 0;
        std::int64_t samples = 0;
        for (std::int64_t sentence = first; sentence < end; ++sentence) {
            tokens += lengths_[sentence];
            const std::int64_t left = end - sentence - 1;
            const bool full = tokens >= target && left > 1 && sentence + 1 - first >= options_.min_sentences;
            if (!full && left > 0) continue;
            add(first, sentence + 1, target);
            ++samples;
            first = sentence + 1;
            target = draw_target();
            tokens = 0;
        }
        return samples;
    }

    std::int64_t draw_target() {
        if (short_ratio_ == 0) return options_.max_length;
        const auto draw = static_cast<std::uint32_t>(targets_());
        return draw % short_ratio_ == 0 ? 2 + draw % (options_.max_length - 1) : options_.max_length;
    }

    template <typename T>
    void shuffle(std::vector<T>& rows) const {
        std::mt19937_64 generator(static_cast<std::uint64_t>(options_.seed) + 1);
        for (std::int64_t i = static_cast<std::int64_t>(rows.size() / 3) - 1; i > 0; --i) {
            const auto j = static_cast<std::int64_t>(generator() % static_cast<std::uint64_t>(i + 1));
            for (int column = 0; column < 3; ++column) std::swap(rows[3 * i + column], rows[3 * j + column]);
        }
    }

    const std::int64_t* starts_;
    const std::int64_t documents_;
    const std::int32_t* lengths_;
    const SentenceMapOptions options_;
    std::mt19937 targets_;
    const std::uint32_t short_ratio_;
};

}  // namespace megacore
