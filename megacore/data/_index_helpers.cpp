// Python bindings of the compiled parts of the index maps. Arguments are checked first, and the
// work is done without the GIL. index_helpers_ref.py is a NumPy implementation, with which the
// tests compare the results. `portable` disables vector instructions that not every processor has;
// the results are the same.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <random>
#include <stdexcept>
#include <utility>
#include <vector>

#include "_blend.h"
#include "_random_state.h"

namespace py = pybind11;

namespace megacore {
namespace {

// Starts of the samples of a GPT data set, found in one pass over the document index.

// Lengths in 16 bits: twice as many fit into the cache, which the pass accesses at random.
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
    static constexpr std::int32_t kLong = 65535;  // represents this and all greater lengths

    const std::int32_t* lengths_;
    std::unique_ptr<std::uint16_t[]> short_;
};

struct Documents {
    const std::int32_t* lengths;  // of each sequence
    std::int64_t sequences;
    const std::int32_t* index;  // sequences in reading order
    std::int64_t positions;
};

// Writes `samples` + 1 rows (position in the document index, token offset there): the start of each
// sample and the end of the last one. Consecutive samples of seq_length + extra tokens overlap by
// `extra`. With `partial` the last sample ends at the end of the documents.
template <typename T>
void build_sample_index(const Documents& documents, std::int64_t seq_length, std::int64_t samples,
                        std::int64_t extra, bool partial, T* rows) {
    constexpr std::int64_t prefetched = 64;
    const ShortLengths lengths(documents.lengths, documents.sequences);
    const std::int64_t whole = samples - partial;
    std::int64_t sample = 1;                   // next row to write
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
        // Branch-free, because a branch would often be mispredicted: the row is always written, and
        // counts only if the sample ends in this document.
        write(sample, position, ahead - extra);
        const std::int64_t ends = (ahead - length - 1) >> 63;  // -1 if the sample ends here, else 0
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

// Samples of whole sentences for BERT and T5: (first sentence, end sentence, target length).

struct SentenceMapOptions {
    std::int64_t max_samples;  // no epoch starts when there are at least this many samples
    std::int64_t max_epochs;
    std::int64_t max_length;   // tokens of a sample
    double short_probability;  // probability of a shorter target length
    std::int64_t min_sentences;
    std::uint32_t seed;
};

class SentenceMap {
  public:
    SentenceMap(const std::int64_t* document_starts, std::int64_t documents,
                const std::int32_t* lengths, const SentenceMapOptions& options)
        : starts_(document_starts),
          documents_(documents),
          lengths_(lengths),
          options_(options),
          targets_(options.seed),
          // A target length is short if a draw is a multiple of this number; 0: never.
          short_ratio_(options.short_probability > 0 ? static_cast<std::uint32_t>(std::lround(
                                                           1.0 / options.short_probability))
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

    // Calls add(first sentence, end sentence, target length) for each sample, unshuffled, and
    // returns (epochs, samples).
    template <typename Add>
    std::pair<std::int64_t, std::int64_t> count(Add add) {
        const std::vector<std::int64_t> usable = usable_documents();
        std::int64_t samples = 0;
        std::int64_t epoch = 0;
        for (; epoch < options_.max_epochs && samples < options_.max_samples && !usable.empty();
             ++epoch) {
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
            // The sentence of a document with a single one may be long.
            if (sentences >= options_.min_sentences &&
                !(sentences > 1 && has_long_sentence(document))) {
                usable.push_back(document);
            }
        }
        return usable;
    }

    bool has_long_sentence(std::int64_t document) const {
        for (std::int64_t sentence = starts_[document]; sentence < starts_[document + 1];
             ++sentence) {
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
            const bool full =
                tokens >= target && left > 1 && sentence + 1 - first >= options_.min_sentences;
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
        return draw % short_ratio_ == 0 ? 2 + draw % (options_.max_length - 1)
                                        : options_.max_length;
    }

    template <typename T>
    void shuffle(std::vector<T>& rows) const {
        std::mt19937_64 generator(static_cast<std::uint64_t>(options_.seed) + 1);
        for (std::int64_t i = static_cast<std::int64_t>(rows.size() / 3) - 1; i > 0; --i) {
            const auto j =
                static_cast<std::int64_t>(generator() % static_cast<std::uint64_t>(i + 1));
            for (int column = 0; column < 3; ++column)
                std::swap(rows[3 * i + column], rows[3 * j + column]);
        }
    }

    const std::int64_t* starts_;
    const std::int64_t documents_;
    const std::int32_t* lengths_;
    const SentenceMapOptions options_;
    std::mt19937 targets_;
    const std::uint32_t short_ratio_;
};

}  // namespace
}  // namespace megacore

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

constexpr py::ssize_t kMaxDatasets = std::numeric_limits<std::int16_t>::max();

void require(bool condition, const char* message) {
    if (!condition) throw std::invalid_argument(message);
}

template <typename T>
void shuffle(megacore::RandomState& state, Array<T>& values) {
    require(values.ndim() == 1, "shuffle takes a one-dimensional array");
    T* data = values.mutable_data();  // throws if the array is read-only
    const std::int64_t count = values.size();
    py::gil_scoped_release release;
    state.shuffle(data, count);
}

template <typename T>
Array<T> build_sample_index(const Array<std::int32_t>& lengths,
                            const Array<std::int32_t>& document_index, std::int64_t seq_length,
                            std::int64_t num_samples, std::int64_t extra, bool partial,
                            std::optional<Array<T>> out) {
    require(lengths.ndim() == 1 && document_index.ndim() == 1,
            "lengths and document_index must be one-dimensional");
    require(seq_length >= 1 && num_samples >= 0 && extra >= 0 && extra <= 1,
            "seq_length must be positive, num_samples not negative, extra 0 or 1");
    require(!partial || (num_samples > 0 && document_index.size() > 0),
            "there is no last sample to be partial");
    Array<T> rows = out ? std::move(*out)
                        : Array<T>({static_cast<py::ssize_t>(num_samples) + 1,
                                    static_cast<py::ssize_t>(2)});
    require(rows.ndim() == 2 && rows.shape(0) == num_samples + 1 && rows.shape(1) == 2,
            "out must have the shape (num_samples + 1, 2)");
    T* data = rows.mutable_data();
    const megacore::Documents documents{lengths.data(), lengths.size(), document_index.data(),
                                        document_index.size()};
    py::gil_scoped_release release;
    megacore::build_sample_index(documents, seq_length, num_samples, extra, partial, data);
    return rows;
}

py::tuple run_blend(std::vector<double> weights, megacore::Counts limits,
                    std::vector<double> surplus, std::int64_t size, bool portable) {
    Array<std::int16_t> dataset_index(size);
    Array<std::int64_t> sample_index(size);
    megacore::Blend blend(std::move(weights), std::move(limits), std::move(surplus), portable,
                          dataset_index.mutable_data(), sample_index.mutable_data());
    {
        py::gil_scoped_release release;
        blend.run(size);
    }
    return py::make_tuple(dataset_index, sample_index);
}

template <typename T>
void check_datasets(const Array<T>& values) {
    require(values.ndim() == 1 && values.size() >= 1,
            "a blend takes a one-dimensional array of at least one data set");
    require(values.size() <= kMaxDatasets, "a blend has at most 32767 data sets");
}

py::tuple build_blend(const Array<double>& weights, std::int64_t size, bool portable,
                      std::vector<double> surplus) {
    check_datasets(weights);
    require(size >= 0, "the size of a blend must not be negative");
    std::vector<double> values(weights.data(), weights.data() + weights.size());
    double sum = 0;
    for (const double weight : values) {
        require(weight >= 0, "weights must not be negative");
        sum += weight;
    }
    require(std::abs(sum - 1) < 1e-6, "weights must add up to 1");
    require(surplus.empty() || surplus.size() == values.size(),
            "surplus must have a value for each data set");
    const double places = static_cast<double>(1 << 20);
    bool gives = surplus.empty();
    for (const double value : surplus) {
        require(std::isinf(value) || value * places == std::floor(value * places),
                "surplus must be multiples of 2^-20");
        gives = gives || !std::isinf(value);
    }
    require(gives, "at least one data set must give samples");
    return run_blend(std::move(values), {}, std::move(surplus), size, portable);
}

py::tuple build_exhaustive_blend(const Array<std::int64_t>& sizes, bool portable) {
    check_datasets(sizes);
    megacore::Counts limits(sizes.data(), sizes.data() + sizes.size());
    std::int64_t total = 0;
    for (const std::int64_t size : limits) {
        require(size >= 0, "sizes must not be negative");
        require(size <= std::numeric_limits<std::int64_t>::max() / 16 - total,
                "the sizes exceed the memory of any machine");
        total += size;
    }
    std::vector<double> weights;
    for (const std::int64_t size : limits) {
        weights.push_back(total == 0 ? 0.0
                                     : static_cast<double>(size) / static_cast<double>(total));
    }
    return run_blend(std::move(weights), std::move(limits), {}, total, portable);
}

// Checks the arguments and calls use(map) without the GIL.
template <typename Use>
void with_sentence_map(const Array<std::int64_t>& document_starts,
                       const Array<std::int32_t>& lengths,
                       const megacore::SentenceMapOptions& options, Use use) {
    require(document_starts.ndim() == 1 && document_starts.size() > 0 && lengths.ndim() == 1,
            "document_starts and lengths must be one-dimensional, document_starts with the end of "
            "the last document");
    require(options.max_samples >= 0 && options.max_epochs >= 0,
            "max_samples and max_epochs must not be negative");
    require(
        options.max_length >= 2 && options.max_length <= std::numeric_limits<std::int32_t>::max(),
        "max_length must be at least 2");
    require(options.short_probability == 0 ||
                (options.short_probability > 1e-9 && options.short_probability <= 1),
            "short_probability must be 0, or at most 1 and above 1e-9");
    require(options.min_sentences >= 1, "min_sentences must be positive");
    const std::int64_t* starts = document_starts.data();
    const std::int64_t documents = document_starts.size() - 1;
    require(starts[0] >= 0 && starts[documents] <= lengths.size(),
            "document_starts is out of range");
    py::gil_scoped_release release;
    for (std::int64_t k = 0; k < documents; ++k)
        require(starts[k] <= starts[k + 1], "document_starts is falling");
    megacore::SentenceMap map(starts, documents, lengths.data(), options);
    use(map);
}

template <typename T>
Array<T> build_sentence_map(const Array<std::int64_t>& document_starts,
                            const Array<std::int32_t>& lengths, std::int64_t max_samples,
                            std::int64_t max_epochs, std::int64_t max_length,
                            double short_probability, std::int64_t min_sentences,
                            std::uint32_t seed) {
    auto rows = std::make_unique<std::vector<T>>();
    with_sentence_map(document_starts, lengths,
                      {max_samples, max_epochs, max_length, short_probability, min_sentences, seed},
                      [&rows](megacore::SentenceMap& map) { *rows = map.build<T>(); });
    const auto count = static_cast<py::ssize_t>(rows->size() / 3);
    const T* data = rows->data();
    py::capsule owner(rows.get(),
                      [](void* vector) { delete static_cast<std::vector<T>*>(vector); });
    rows.release();
    return Array<T>({count, static_cast<py::ssize_t>(3)}, data, owner);
}

// Returns (epochs, samples) of the map that build_sentence_map builds from the same arguments.
std::pair<std::int64_t, std::int64_t> count_sentence_map(
    const Array<std::int64_t>& document_starts, const Array<std::int32_t>& lengths,
    std::int64_t max_samples, std::int64_t max_epochs, std::int64_t max_length,
    double short_probability, std::int64_t min_sentences, std::uint32_t seed) {
    std::pair<std::int64_t, std::int64_t> counts;
    with_sentence_map(document_starts, lengths,
                      {max_samples, max_epochs, max_length, short_probability, min_sentences, seed},
                      [&counts](megacore::SentenceMap& map) {
                          counts = map.count([](std::int64_t, std::int64_t, std::int64_t) {});
                      });
    return counts;
}

template <typename T>
void define_sized(py::module_& module, const char* sample_index, const char* sentence_map) {
    using Unsigned = std::make_unsigned_t<T>;
    module.def(sample_index, &build_sample_index<T>, py::arg("lengths").noconvert(),
               py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"),
               py::arg("extra"), py::arg("partial") = false,
               py::arg("out").noconvert() = py::none());
    module.def(sentence_map, &build_sentence_map<Unsigned>, py::arg("document_starts").noconvert(),
               py::arg("lengths").noconvert(), py::arg("max_samples"), py::arg("max_epochs"),
               py::arg("max_length"), py::arg("short_probability"), py::arg("min_sentences"),
               py::arg("seed"));
}

}  // namespace

void add_index_helpers(py::module_& module) {
    py::class_<megacore::RandomState>(module, "RandomState")
        .def(py::init<std::uint32_t, bool>(), py::arg("seed"), py::arg("portable") = false)
        .def("shuffle", &shuffle<std::int32_t>, py::arg("values").noconvert())
        .def("shuffle", &shuffle<std::uint32_t>, py::arg("values").noconvert())
        .def("shuffle", &shuffle<std::int64_t>, py::arg("values").noconvert());
    define_sized<std::int32_t>(module, "build_sample_index_int32", "build_sentence_map_uint32");
    define_sized<std::int64_t>(module, "build_sample_index_int64", "build_sentence_map_uint64");
    module.def("count_sentence_map", &count_sentence_map, py::arg("document_starts").noconvert(),
               py::arg("lengths").noconvert(), py::arg("max_samples"), py::arg("max_epochs"),
               py::arg("max_length"), py::arg("short_probability"), py::arg("min_sentences"),
               py::arg("seed"));
    module.def("build_blend", &build_blend, py::arg("weights").noconvert(), py::arg("size"),
               py::arg("portable") = false, py::arg("surplus") = std::vector<double>{});
    module.def("build_exhaustive_blend", &build_exhaustive_blend, py::arg("sizes").noconvert(),
               py::arg("portable") = false);
}
