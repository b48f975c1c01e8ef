// Reading of samples through the index maps, one micro batch at a time, and packing of whole
// documents. Every index in a file is checked before use, so a damaged file causes an exception.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "_arrays.h"
#include "_best_fit.h"

namespace py = pybind11;

namespace {

using megacore::Array;
using megacore::Integers;
using megacore::kPadding;
using megacore::prefetch;
using megacore::Widen;
using megacore::widen_of;

constexpr std::int64_t kBlock = 32;             // rows that are looked up together
constexpr std::int64_t kLookahead = 64;         // documents of a row that are looked up ahead
constexpr std::int64_t kCacheLine = 64;
// distance between prefetching and copying of tokens
constexpr std::int64_t kPrefetchBytes = 4096;
constexpr std::int64_t kChunkBytes = 1024;      // bytes copied between two prefetches

// Contiguous tokens and the address to copy them to.
struct Run {
    const char* source;
    std::int64_t tokens;
    std::int64_t* target;
};

// Reader of the samples of one split of one pair of token files.
class Gatherer {
  public:
    // extra: 1 if a sample has a token beyond seq_length, else 0. whole_documents: true if samples
    // end at the ends of documents; they are then cut or padded to the length of a sample. With
    // best_fit also, a sample ends before the next one's first document, and its documents after
    // the first begin with their rests (see Pieces). Otherwise only the last sample may be short,
    // if short_last.
    Gatherer(py::array tokens, const py::array& pointers, const py::array& document_index,
             const py::array& sample_index, const py::array& shuffle_index, std::int64_t seq_length,
             std::int64_t extra, bool whole_documents, bool short_last, bool best_fit)
        : owner_(std::move(tokens)),
          widen_(widen_of(owner_)),
          tokens_(static_cast<const char*>(owner_.data())),
          width_(owner_.itemsize()),
          count_(owner_.size()),
          pointers_(pointers),
          documents_(document_index),
          starts_(sample_index),
          order_(shuffle_index),
          columns_(seq_length + 1),
          capacity_(seq_length + extra),
          extra_(extra),
          whole_documents_(whole_documents),
          short_last_(short_last),
          best_fit_(best_fit),
          pieces_{seq_length, extra} {
        if (seq_length < 1 || extra < 0 || extra > 1) {
            throw std::invalid_argument("seq_length must be positive, extra 0 or 1");
        }
        if (best_fit && !whole_documents)
            throw std::invalid_argument("best_fit packs whole documents");
        if (owner_.ndim() != 1 || !(owner_.flags() & py::array::c_style)) {
            throw std::invalid_argument("tokens must be a contiguous one-dimensional array");
        }
        if (starts_.size() != 2 * (order_.size() + 1))
            throw std::invalid_argument("the maps differ in length");
    }

    // Copies samples into rows of `out` [rows, seq_length + 1], by default the first rows, and pads
    // them with -1. Returns -1, or the (unshuffled) number of a sample for which the maps are
    // invalid; the content of `out` is then undefined. Throws std::out_of_range with an index that
    // is out of range.
    std::int64_t gather(const Array<std::int64_t>& indices, Array<std::int64_t>& out,
                        const std::optional<Array<std::int64_t>>& rows) const {
        if (indices.ndim() != 1 || out.ndim() != 2 || out.shape(1) != columns_) {
            throw std::invalid_argument(
                "indices must be one-dimensional and out [rows, seq_length + 1]");
        }
        const std::int64_t count = indices.size();
        if (rows ? rows->size() != count : out.shape(0) < count)
            throw std::invalid_argument("rows do not fit indices");
        const std::int64_t* index = indices.data();
        const std::int64_t* row = rows ? rows->data() : nullptr;
        for (std::int64_t i = 0; i < count; ++i) {
            if (index[i] < 0 || index[i] >= order_.size())
                throw std::out_of_range(std::to_string(index[i]));
            if (row && (row[i] < 0 || row[i] >= out.shape(0)))
                throw std::invalid_argument("rows go beyond out");
        }
        std::int64_t* target = out.mutable_data();  // throws if it is read-only
        py::gil_scoped_release release;
        std::vector<Run> runs;
        for (std::int64_t first = 0; first < count; first += kBlock) {
            const std::int64_t bad = gather_block(index + first, row ? row + first : nullptr,
                                                  std::min(kBlock, count - first),
                                                  row ? target : target + first * columns_, runs);
            if (bad >= 0) return bad;
        }
        return -1;
    }

  private:
    struct Place {
        std::int64_t sample, first, offset, last, end;
    };

    // Each step prefetches the data of the next step for all rows, which gives two to three times
    // as many samples per second.
    std::int64_t gather_block(const std::int64_t* index, const std::int64_t* row,
                              std::int64_t count, std::int64_t* target,
                              std::vector<Run>& runs) const {
        std::array<Place, kBlock> places;
        for (std::int64_t i = 0; i < count; ++i) order_.prefetch_at(index[i]);
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t sample = order_[index[i]];
            if (sample < 0 || sample >= order_.size()) return std::max<std::int64_t>(sample, 0);
            places[i].sample = sample;
            starts_.prefetch_at(2 * sample);
        }
        for (std::int64_t i = 0; i < count; ++i) {
            if (!locate(places[i])) return places[i].sample;
            documents_.prefetch_at(places[i].first);
        }
        for (std::int64_t i = 0; i < count; ++i) {
            const std::int64_t last = std::min(places[i].last, places[i].first + kLookahead);
            for (std::int64_t at = places[i].first; at <= last; ++at) {
                const std::int64_t document = documents_[at];
                if (document < 0 || document >= pointers_.size()) return places[i].sample;
                pointers_.prefetch_at(document);
            }
        }
        runs.clear();
        for (std::int64_t i = 0; i < count; ++i) {
            if (!resolve(places[i], target + (row ? row[i] : i) * columns_, runs))
                return places[i].sample;
        }
        copy(runs);
        return -1;
    }

    // Finds the start and the end of a sample; `end` is relative to the start of document `last`.
    // Returns false if the maps are invalid.
    bool locate(Place& place) const {
        place.first = starts_[2 * place.sample];
        place.offset = starts_[2 * place.sample + 1];
        place.last = starts_[2 * place.sample + 2];
        place.end = best_fit_ ? 0 : starts_[2 * place.sample + 3];
        // The last sample may end in an empty document, at -extra.
        const bool is_short = short_last_ && place.sample + 1 == order_.size();
        if (place.first < 0 || place.offset < 0 || place.last < 0 ||
            place.end < (is_short ? -extra_ : 0) || place.end > count_)
            return false;
        place.end += whole_documents_ && place.end == 0 ? 0 : extra_;
        if (place.end == 0) {
            --place.last;
            place.end = -1;  // the complete document
        }
        return place.first <= place.last && place.last < documents_.size();
    }

    // Appends the runs of tokens of one sample and pads its row; returns false if the maps are
    // invalid.
    bool resolve(const Place& place, std::int64_t* target, std::vector<Run>& runs) const {
        std::int64_t filled = 0;
        std::int64_t begin = place.offset;
        for (std::int64_t at = place.first; at <= place.last; ++at, begin = 0) {
            const std::int64_t document = documents_[at];
            if (document < 0 || document >= pointers_.size()) return false;
            const std::int64_t start = pointers_[document] / width_;
            const std::int64_t next =
                document + 1 < pointers_.size() ? pointers_[document + 1] / width_ : count_;
            if (start < 0 || next < start || next > count_) return false;
            const std::int64_t end = at == place.last && place.end >= 0 ? place.end : next - start;
            const bool is_rest = best_fit_ && at > place.first;
            if (is_rest) begin = pieces_.rest(next - start);
            if (begin > end || end > next - start) return false;
            std::int64_t tokens = end - begin;
            if (tokens > capacity_ - filled) {
                if (!whole_documents_ || is_rest) return false;
                tokens = capacity_ - filled;
            }
            if (tokens > 0)
                runs.push_back({tokens_ + (start + begin) * width_, tokens, target + filled});
            filled += tokens;
            if (whole_documents_ && !best_fit_ && filled == capacity_) break;
        }
        const bool may_be_short =
            whole_documents_ || (short_last_ && place.sample + 1 == order_.size());
        if (filled < capacity_ && !(may_be_short && filled > 0)) return false;
        std::fill(target + filled, target + columns_, kPadding);
        return true;
    }

    void copy(const std::vector<Run>& runs) const {
        std::size_t ahead = 0;        // run that is prefetched
        std::int64_t ahead_byte = 0;  // position in this run
        auto look_ahead = [&](std::int64_t bytes) {
            while (bytes > 0 && ahead < runs.size()) {
                const std::int64_t size = runs[ahead].tokens * width_;
                for (; bytes > 0 && ahead_byte < size;
                     ahead_byte += kCacheLine, bytes -= kCacheLine) {
                    prefetch(runs[ahead].source + ahead_byte);
                }
                if (ahead_byte >= size) {
                    prefetch(runs[ahead].source + size - 1);
                    ++ahead;
                    ahead_byte = 0;
                }
            }
        };
        look_ahead(kPrefetchBytes);
        const std::int64_t chunk = kChunkBytes / width_;
        for (const Run& run : runs) {
            for (std::int64_t at = 0; at < run.tokens; at += chunk) {
                const std::int64_t tokens = std::min(chunk, run.tokens - at);
                look_ahead(tokens * width_);
                widen_(run.source + at * width_, tokens, run.target + at);
            }
        }
    }

    py::array owner_;
    Widen widen_;
    const char* tokens_;
    std::int64_t width_;
    std::int64_t count_;
    Integers pointers_;
    Integers documents_;
    Integers starts_;
    Integers order_;
    std::int64_t columns_;
    std::int64_t capacity_;
    std::int64_t extra_;
    bool whole_documents_;
    bool short_last_;
    bool best_fit_;
    megacore::Pieces pieces_;
};

// Returns rows (position in the document index, token offset there): the start of each sample of
// whole documents, and the end. A document longer than a sample gives several samples, each of
// which starts `seq_length` tokens after the previous one.
template <typename T>
Array<T> pack_until_overflow(const Array<std::int32_t>& lengths,
                             const Array<std::int32_t>& document_index, std::int64_t seq_length,
                             std::int64_t extra) {
    if (lengths.ndim() != 1 || document_index.ndim() != 1) {
        throw std::invalid_argument("lengths and document_index must be one-dimensional");
    }
    if (seq_length < 1 || extra < 0 || extra > 1) {
        throw std::invalid_argument("seq_length must be positive, extra 0 or 1");
    }
    const std::int32_t* length_of = lengths.data();
    const std::int32_t* document_at = document_index.data();
    const std::int64_t sequences = lengths.size();
    const std::int64_t positions = document_index.size();
    const std::int64_t capacity = seq_length + extra;
    auto rows = std::make_unique<std::vector<T>>();
    {
        py::gil_scoped_release release;
        auto add = [&rows](std::int64_t position, std::int64_t offset) {
            rows->push_back(static_cast<T>(position));
            rows->push_back(static_cast<T>(offset));
        };
        std::int64_t filled = 0;  // tokens of the current sample
        for (std::int64_t position = 0; position < positions; ++position) {
            const std::int64_t document = document_at[position];
            if (document < 0 || document >= sequences)
                throw std::invalid_argument("document_index is out of range");
            std::int64_t left = length_of[document];
            if (left < 0) throw std::invalid_argument("a length is negative");
            if (left == 0) continue;
            if (filled == 0 || left > capacity - filled) {
                add(position, 0);
                filled = 0;
                std::int64_t offset = 0;
                while (left > capacity) {
                    offset += seq_length;
                    left -= seq_length;
                    add(position, offset);
                }
            }
            filled += left;
        }
        add(positions, 0);
    }
    const auto count = static_cast<py::ssize_t>(rows->size() / 2);
    T* data = rows->data();
    py::capsule owner(rows.get(),
                      [](void* vector) { delete static_cast<std::vector<T>*>(vector); });
    rows.release();
    return Array<T>({count, static_cast<py::ssize_t>(2)}, data, owner);
}

void check_best_fit(const Array<std::int32_t>& lengths, std::int64_t seq_length,
                    std::int64_t extra) {
    if (lengths.ndim() != 1) throw std::invalid_argument("lengths must be one-dimensional");
    if (seq_length < 1 || extra < 0 || extra > 1)
        throw std::invalid_argument("seq_length must be positive, extra 0 or 1");
}

// Returns (samples, pieces) of an epoch of these sequences.
std::pair<std::int64_t, std::int64_t> count_best_fit(const Array<std::int32_t>& lengths,
                                                     std::int64_t seq_length, std::int64_t extra) {
    check_best_fit(lengths, seq_length, extra);
    const std::int32_t* values = lengths.data();
    const std::int64_t count = lengths.size();
    py::gil_scoped_release release;
    const megacore::BestFitCounts counts =
        megacore::count_best_fit(values, count, {seq_length, extra});
    return {counts.samples, counts.pieces};
}

// Packs the sequences of an epoch into `entries` [pieces] and `rows` [samples, 2].
template <typename T>
void pack_best_fit(const Array<std::int32_t>& lengths, const Array<std::int32_t>& order,
                   std::int64_t seq_length, std::int64_t extra, std::int64_t first,
                   Array<std::int32_t>& entries, Array<T>& rows) {
    check_best_fit(lengths, seq_length, extra);
    if (order.ndim() != 1 || entries.ndim() != 1 || rows.ndim() != 2 || rows.shape(1) != 2)
        throw std::invalid_argument("order and entries have one dimension, rows [samples, 2]");
    const std::int32_t* length_of = lengths.data();
    const std::int64_t sequences = lengths.size();
    const std::int32_t* document_at = order.data();
    const std::int64_t count = order.size();
    const megacore::BestFitCounts expected{rows.shape(0), entries.size()};
    std::int32_t* entry = entries.mutable_data();
    T* row = rows.mutable_data();
    py::gil_scoped_release release;
    megacore::pack_best_fit(length_of, sequences, document_at, count, {seq_length, extra}, expected,
                            first, entry, row);
}

template <typename T>
void define_best_fit(py::module_& module, const char* name) {
    module.def(name, &pack_best_fit<T>, py::arg("lengths").noconvert(),
               py::arg("order").noconvert(), py::arg("seq_length"), py::arg("extra"),
               py::arg("first"), py::arg("entries").noconvert(), py::arg("rows").noconvert());
}

}  // namespace

void add_gather(py::module_& module) {
    py::class_<Gatherer>(module, "Gatherer")
        .def(py::init<py::array, const py::array&, const py::array&, const py::array&,
                      const py::array&, std::int64_t, std::int64_t, bool, bool, bool>(),
             py::kw_only(), py::arg("tokens"), py::arg("pointers"), py::arg("document_index"),
             py::arg("sample_index"), py::arg("shuffle_index"), py::arg("seq_length"),
             py::arg("extra"), py::arg("whole_documents"), py::arg("short_last"),
             py::arg("best_fit") = false)
        .def("gather", &Gatherer::gather, py::arg("indices").noconvert(),
             py::arg("out").noconvert(), py::arg("rows").noconvert() = py::none());
    module.def("pack_until_overflow_int32", &pack_until_overflow<std::int32_t>,
               py::arg("lengths").noconvert(), py::arg("document_index").noconvert(),
               py::arg("seq_length"), py::arg("extra"));
    module.def("pack_until_overflow_int64", &pack_until_overflow<std::int64_t>,
               py::arg("lengths").noconvert(), py::arg("document_index").noconvert(),
               py::arg("seq_length"), py::arg("extra"));
    module.def("count_best_fit", &count_best_fit, py::arg("lengths").noconvert(),
               py::arg("seq_length"), py::arg("extra"));
    define_best_fit<std::int32_t>(module, "pack_best_fit_int32");
    define_best_fit<std::int64_t>(module, "pack_best_fit_int64");
}
