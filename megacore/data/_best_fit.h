// Best-fit-decreasing packing of documents into samples (Johnson 1973; Ding et al. 2024,
// arXiv:2404.10830): pieces are placed from the longest to the shortest, each into the sample with
// the least sufficient space, or into a new one. Spaces are found in a two-level bitmap, so the time
// for a piece does not depend on the number of samples.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <utility>
#include <vector>

namespace megacore {

// Division of a document of `length` tokens: consecutive samples of `room` tokens, which overlap by
// `extra`, and a rest of 1 + extra … room tokens. A document that fits into a sample is a rest.
struct Pieces {
    std::int64_t seq_length;
    std::int64_t extra;

    std::int64_t room() const { return seq_length + extra; }

    std::int64_t full(std::int64_t length) const {
        return length > room() ? (length - 1 - extra) / seq_length : 0;
    }

    // First token of the rest.
    std::int64_t rest(std::int64_t length) const { return full(length) * seq_length; }
};

// Set of the numbers 0 … limit with the operation "least element that is at least n".
class SpaceSet {
  public:
    explicit SpaceSet(std::int64_t limit)
        : words_(static_cast<std::size_t>(limit / 64 + 1)), blocks_(words_.size() / 64 + 1) {}

    void add(std::int64_t n) {
        words_[n / 64] |= bit(n);
        blocks_[n / 4096] |= bit(n / 64);
    }

    void remove(std::int64_t n) {
        words_[n / 64] &= ~bit(n);
        if (words_[n / 64] == 0) blocks_[n / 4096] &= ~bit(n / 64);
    }

    // Returns -1 if there is none.
    std::int64_t at_least(std::int64_t n) const {
        const std::uint64_t word = words_[n / 64] & (~std::uint64_t{0} << (n % 64));
        if (word != 0) return n / 64 * 64 + __builtin_ctzll(word);
        const std::int64_t next = n / 64 + 1;
        std::uint64_t mask = ~std::uint64_t{0} << (next % 64);
        for (std::size_t block = next / 64; block < blocks_.size(); ++block) {
            const std::uint64_t set = blocks_[block] & mask;
            mask = ~std::uint64_t{0};
            if (set == 0) continue;
            const std::int64_t at = static_cast<std::int64_t>(block) * 64 + __builtin_ctzll(set);
            return at * 64 + __builtin_ctzll(words_[at]);
        }
        return -1;
    }

  private:
    static std::uint64_t bit(std::int64_t n) { return std::uint64_t{1} << (n % 64); }

    std::vector<std::uint64_t> words_;
    std::vector<std::uint64_t> blocks_;
};

struct BestFitCounts {
    std::int64_t samples = 0;
    std::int64_t pieces = 0;
};

// Counts the samples and pieces that `pack_best_fit` gives for the same lengths in any order.
inline BestFitCounts count_best_fit(const std::int32_t* lengths, std::int64_t count,
                                    const Pieces& pieces) {
    BestFitCounts result;
    const std::int64_t room = pieces.room();
    std::vector<std::int64_t> rests(static_cast<std::size_t>(room + 1));  // by length
    for (std::int64_t i = 0; i < count; ++i) {
        if (lengths[i] < 0) throw std::invalid_argument("a length is negative");
        if (lengths[i] == 0) continue;
        const std::int64_t full = pieces.full(lengths[i]);
        result.samples += full;
        result.pieces += full + 1;
        ++rests[lengths[i] - full * pieces.seq_length];
    }
    std::vector<std::int64_t> samples(static_cast<std::size_t>(room + 1));  // by their space
    SpaceSet spaces(room);
    auto add = [&](std::int64_t space, std::int64_t number) {
        if (space == 0 || number == 0) return;
        samples[space] += number;
        spaces.add(space);
    };
    for (std::int64_t length = room; length > 0; --length) {
        for (std::int64_t left = rests[length]; left > 0;) {
            const std::int64_t least = spaces.at_least(length);
            const std::int64_t space = least < 0 ? room : least;
            // A sample that still has room for a piece has the least sufficient space, and takes
            // the next piece too.
            const std::int64_t each = std::min(space / length, left);
            const std::int64_t taken =
                least < 0 ? left / each : std::min(samples[space], left / each);
            if (least < 0) {
                result.samples += taken;
            } else if ((samples[space] -= taken) == 0) {
                spaces.remove(space);
            }
            add(space - each * length, taken);
            left -= taken * each;
        }
    }
    return result;
}

// Packs one epoch. Writes the sequence of each piece to `entries`, those of a sample one after the
// other in the order of `order`; and to `rows` for each sample the position of its first piece,
// counted from `first`, and the first token of that piece. The other pieces of a sample are rests.
template <typename T>
void pack_best_fit(const std::int32_t* lengths, std::int64_t sequences, const std::int32_t* order,
                   std::int64_t count, const Pieces& pieces, const BestFitCounts& expected,
                   std::int64_t first, std::int32_t* entries, T* rows) {
    constexpr std::int64_t prefetched = 64;
    const std::int64_t room = pieces.room();
    std::vector<std::int64_t> ends(static_cast<std::size_t>(room + 1));  // by length of the rest
    std::vector<std::int32_t> rests(static_cast<std::size_t>(count));
    for (std::int64_t i = 0; i < count; ++i) {
        if (i + prefetched < count) __builtin_prefetch(lengths + order[i + prefetched]);
        if (order[i] < 0 || order[i] >= sequences)
            throw std::invalid_argument("document_index is out of range");
        const std::int64_t length = lengths[order[i]];
        if (length < 0) throw std::invalid_argument("a length is negative");
        rests[i] = static_cast<std::int32_t>(length - pieces.rest(length));
        ++ends[rests[i]];
    }
    std::int64_t before = 0;
    for (std::int64_t length = room; length > 0; --length) {
        const std::int64_t number = ends[length];
        ends[length] = before;
        before += number;
    }
    std::vector<std::int32_t> descending(static_cast<std::size_t>(before));
    for (std::int64_t i = 0; i < count; ++i)
        if (rests[i] > 0) descending[ends[rests[i]]++] = static_cast<std::int32_t>(i);

    constexpr std::int32_t none = -1;
    std::vector<std::int32_t> newest(static_cast<std::size_t>(room + 1), none);  // by their space
    std::vector<std::int32_t> older;    // of each sample: the one before it with the same space
    std::vector<std::int32_t> numbers;  // of each sample: number of its pieces
    std::vector<std::int32_t> sample_of(static_cast<std::size_t>(count), none);
    SpaceSet spaces(room);
    auto place = [&](std::int32_t i, std::int64_t length) {
        std::int64_t space = spaces.at_least(length);
        std::int32_t sample;
        if (space < 0) {
            space = room;
            sample = static_cast<std::int32_t>(older.size());
            older.push_back(none);
            numbers.push_back(0);
        } else {
            sample = newest[space];
            newest[space] = older[sample];
            if (newest[space] == none) spaces.remove(space);
        }
        sample_of[i] = sample;
        ++numbers[sample];
        space -= length;
        if (space == 0) return;
        older[sample] = newest[space];
        newest[space] = sample;
        spaces.add(space);
    };
    std::int64_t placed = 0;
    for (std::int64_t length = room; length > 0; --length)
        for (; placed < ends[length]; ++placed) place(descending[placed], length);

    const auto filled = static_cast<std::int64_t>(numbers.size());
    if (filled > expected.samples || placed > expected.pieces)
        throw std::invalid_argument("the arrays do not fit the documents");
    std::vector<std::int64_t> next(static_cast<std::size_t>(filled));
    std::int64_t position = 0;
    for (std::int64_t sample = 0; sample < filled; ++sample) {
        next[sample] = position;
        rows[2 * sample] = static_cast<T>(first + position);
        position += numbers[sample];
    }
    std::int64_t row = filled;
    for (std::int64_t i = 0; i < count; ++i) {
        if (sample_of[i] == none) continue;
        const std::int64_t length = lengths[order[i]];
        const std::int64_t sample = sample_of[i];
        if (first + next[sample] == static_cast<std::int64_t>(rows[2 * sample]))
            rows[2 * sample + 1] = static_cast<T>(pieces.rest(length));
        entries[next[sample]++] = order[i];
        for (std::int64_t piece = 0; piece < pieces.full(length); ++piece, ++row, ++position) {
            if (row == expected.samples || position == expected.pieces)
                throw std::invalid_argument("the arrays do not fit the documents");
            entries[position] = order[i];
            rows[2 * row] = static_cast<T>(first + position);
            rows[2 * row + 1] = static_cast<T>(piece * pieces.seq_length);
        }
    }
    if (row != expected.samples || position != expected.pieces)
        throw std::invalid_argument("the arrays do not fit the documents");
}

}  // namespace megacore
