// Reading samples of whole sentences: the rows of a map, the tokens that they mean, and where the results go.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "_arrays.h"
#include "_random_state.h"

namespace megacore {

using Ids = std::vector<std::int64_t>;
using Flags = Array<std::uint8_t>;

struct Row {
    std::int64_t first, end, target;  // sentences, and tokens that the sample was to have
};

// The sentences of a pair of token files, and a map of samples.
class Sentences {
  public:
    Sentences(py::array tokens, const py::array& pointers, const py::array& rows, std::int64_t vocab_size)
        : owner_(std::move(tokens)),
          widen_(widen_of(owner_)),
          data_(static_cast<const char*>(owner_.data())),
          width_(owner_.itemsize()),
          count_(owner_.size()),
          pointers_(pointers),
          rows_(rows),
          vocab_size_(vocab_size) {
        if (owner_.ndim() != 1 || !(owner_.flags() & py::array::c_style)) {
            throw std::invalid_argument("tokens must be a contiguous one-dimensional array");
        }
        if (rows_.size() % 3 != 0) throw std::invalid_argument("the map must be [samples, 3]");
    }

    std::int64_t samples() const { return rows_.size() / 3; }

    Row row(std::int64_t sample) const { return {rows_[3 * sample], rows_[3 * sample + 1], rows_[3 * sample + 2]}; }

    // Reads the tokens of sentences, at most `limit` of them; false where there are no such sentences, or they hold
    // what is no id of the vocabulary.
    bool read(std::int64_t first, std::int64_t end, Ids& ids, std::int64_t limit = kUnlimited) const {
        if (first < 0 || first >= end || end > pointers_.size()) return false;
        const std::int64_t start = offset(first);
        const std::int64_t whole = offset(end);
        if (start < 0 || whole < start || whole > count_) return false;
        const std::int64_t stop = start + std::min(whole - start, limit);
        ids.resize(static_cast<std::size_t>(stop - start));
        widen_(data_ + start * width_, stop - start, ids.data());
        return std::all_of(ids.begin(), ids.end(), [this](std::int64_t id) { return id >= 0 && id < vocab_size_; });
    }

    // The token at which a sentence begins.
    std::int64_t offset(std::int64_t sentence) const {
        return sentence < pointers_.size() ? pointers_[sentence] / width_ : count_;
    }

  private:
    static constexpr std::int64_t kUnlimited = std::numeric_limits<std::int64_t>::max();

    py::array owner_;
    Widen widen_;
    const char* data_;
    std::int64_t width_;
    std::int64_t count_;
    Integers pointers_;
    Integers rows_;
    std::int64_t vocab_size_;
};

// Fills rows of `out` [rows, width], by default the first ones, with `make(index, row)`, which says whether it could.
// Returns -1, or the number of a sample that the map does not describe, and then `out` is of no use. Throws
// std::out_of_range with the index that is none.
template <typename Make>
std::int64_t fill(const Array<std::int64_t>& indices, Array<std::int64_t>& out,
                  const std::optional<Array<std::int64_t>>& rows, std::int64_t samples, std::int64_t width, Make make) {
    if (indices.ndim() != 1 || out.ndim() != 2 || out.shape(1) != width) {
        throw std::invalid_argument("indices must be one-dimensional and out [rows, width]");
    }
    const std::int64_t count = indices.size();
    if (rows ? rows->size() != count : out.shape(0) < count) throw std::invalid_argument("rows do not fit indices");
    const std::int64_t* index = indices.data();
    const std::int64_t* row = rows ? rows->data() : nullptr;
    for (std::int64_t i = 0; i < count; ++i) {
        if (index[i] < 0 || index[i] >= samples) throw std::out_of_range(std::to_string(index[i]));
        if (row && (row[i] < 0 || row[i] >= out.shape(0))) throw std::invalid_argument("rows go beyond out");
    }
    std::int64_t* target = out.mutable_data();  // throws when it is read-only
    py::gil_scoped_release release;
    for (std::int64_t i = 0; i < count; ++i) {
        if (!make(index[i], target + (row ? row[i] : i) * width)) return index[i];
    }
    return -1;
}

// As Megatron core seeds each sample.
inline RandomState random_of(std::uint32_t seed, std::int64_t index) {
    return RandomState(static_cast<std::uint32_t>(seed + static_cast<std::uint64_t>(index)), false);
}

inline Flags checked(Flags continues) {
    if (continues.ndim() != 1) throw std::invalid_argument("continues must be one-dimensional");
    return continues;
}

}  // namespace megacore
