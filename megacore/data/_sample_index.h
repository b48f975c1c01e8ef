// Where the samples of a GPT data set begin, found in one pass over the document index.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <stdexcept>

namespace megacore {

// Lengths in 16 bits: with half the bytes, twice as many stay in the cache for the random accesses of the walk.
class ShortLengths {
  public:
    ShortLengths(const std::int32_t* lengths, std::int64_t count)
        : lengths_(lengths), short_(new std::uint16_t[static_cast<std::size_t>(count)]) {
        bool negative = false;
        for (std::int64_t k = 0; k < count; ++k) {
            negative |= lengths[k] < 0;
            short_[k] = static_cast<std::uint16_t>(std::min(lengths[k], kLong));
        }
        if (negative) throw std::invalid_argument("a length is negative");
    }

    std::int64_t operator[](std::int64_t k) const {
        const std::int64_t length = short_[k];
        return __builtin_expect(length == kLong, 0) ? lengths_[k] : length;
    }

    void prefetch(std::int64_t k) const { __builtin_prefetch(short_.get() + k); }

  private:
    static constexpr std::int32_t kLong = 65535;  // stands for itself and all that is longer

    const std::int32_t* lengths_;
    std::unique_ptr<std::uint16_t[]> short_;
};

struct Documents {
    const std::int32_t* lengths;  // of each sequence
    std::int64_t sequences;
    const std::int32_t* index;  // the sequences in the order in which they are read
    std::int64_t positions;
};

// Rows (position in the document index, token offset there) at which samples begin, and where the last one ends:
// `samples` + 1 of them. Consecutive samples of seq_length + extra tokens overlap by `extra`. With `partial` the last
// sample ends where the documents do.
template <typename T>
void build_sample_index(const Documents& documents, std::int64_t seq_length, std::int64_t samples, std::int64_t extra,
                        bool partial, T* rows) {
    constexpr std::int64_t prefetched = 64;
    const ShortLengths lengths(documents.lengths, documents.sequences);
    const std::int64_t whole = samples - partial;
    std::int64_t sample = 1;                   // whose end is looked for
    std::int64_t ahead = seq_length + extra;  // tokens from the document's start to that end

    auto write = [rows](std::int64_t row, std::int64_t position, std::int64_t offset) {
        rows[2 * row] = static_cast<T>(position);
        rows[2 * row + 1] = static_cast<T>(offset);
    };
    auto length_at = [&](std::int64_t position) {
        const std::int64_t document = documents.index[position];
        if (__builtin_expect(document < 0 || document >= documents.sequences, 0)) {
            throw std::invalid_argument("document_index is out of range");
        }
        return lengths[document];
    };
    auto read = [&](std::int64_t position) {
        const std::int64_t length = length_at(position);
        // Without a branch, which would be guessed wrong at every other sample: the row is written in any case, and
        // stays when the sample ends in this document.
        write(sample, position, ahead - extra);
        const std::int64_t ends = (ahead - length - 1) >> 63;  // -1 if it does, else 0
        sample -= ends;
        ahead += seq_length & ends;
        while (__builtin_expect(ahead <= length && sample <= whole, 0)) {
            write(sample++, position, ahead - extra);
            ahead += seq_length;
        }
        ahead -= length;
    };

    write(0, 0, 0);
    std::int64_t position = 0;
    for (; position < documents.positions - prefetched && sample <= whole; ++position) {
        lengths.prefetch(documents.index[position + prefetched]);
        read(position);
    }
    for (; position < documents.positions && sample <= whole; ++position) read(position);
    if (sample <= whole) throw std::invalid_argument("the documents end before the samples do");
    if (partial) {
        const std::int64_t last = documents.positions - 1;
        write(samples, last, length_at(last) - extra);
    }
}

}  // namespace megacore
