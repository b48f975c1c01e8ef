// The compiled parts of the index maps as Python sees them: arguments are checked here, and the work, which is in the
// headers, is done without Python's lock. index_helpers_ref.py is the same in NumPy; the tests hold one against the
// other. `portable` leaves out the vector instructions that not every machine has; the results are the same.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "_blend.h"
#include "_random_state.h"
#include "_sample_index.h"
#include "_sentence_map.h"

namespace py = pybind11;

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
    T* data = values.mutable_data();  // throws when the array is read-only
    const std::int64_t count = values.size();
    py::gil_scoped_release release;
    state.shuffle(data, count);
}

template <typename T>
Array<T> build_sample_index(const Array<std::int32_t>& lengths, const Array<std::int32_t>& document_index,
                            std::int64_t seq_length, std::int64_t num_samples, std::int64_t extra, bool partial) {
    require(lengths.ndim() == 1 && document_index.ndim() == 1, "lengths and document_index must be one-dimensional");
    require(seq_length >= 1 && num_samples >= 0 && extra >= 0 && extra <= 1,
            "seq_length must be positive, num_samples not negative, extra 0 or 1");
    require(!partial || (num_samples > 0 && document_index.size() > 0), "there is no last sample to be partial");
    Array<T> rows({static_cast<py::ssize_t>(num_samples) + 1, static_cast<py::ssize_t>(2)});
    T* data = rows.mutable_data();
    const megacore::Documents documents{lengths.data(), lengths.size(), document_index.data(), document_index.size()};
    py::gil_scoped_release release;
    megacore::build_sample_index(documents, seq_length, num_samples, extra, partial, data);
    return rows;
}

py::tuple run_blend(std::vector<double> weights, megacore::Counts limits, std::int64_t size, bool portable) {
    Array<std::int16_t> dataset_index(size);
    Array<std::int64_t> sample_index(size);
    megacore::Blend blend(std::move(weights), std::move(limits), portable, dataset_index.mutable_data(),
                          sample_index.mutable_data());
    {
        py::gil_scoped_release release;
        blend.run(size);
    }
    return py::make_tuple(dataset_index, sample_index);
}

template <typename T>
void check_datasets(const Array<T>& values) {
    require(values.ndim() == 1 && values.size() >= 1, "a blend takes a one-dimensional array of at least one data set");
    require(values.size() <= kMaxDatasets, "a blend has at most 32767 data sets");
}

py::tuple build_blend(const Array<double>& weights, std::int64_t size, bool portable) {
    check_datasets(weights);
    require(size >= 0, "the size of a blend must not be negative");
    std::vector<double> values(weights.data(), weights.data() + weights.size());
    double sum = 0;
    for (const double weight : values) {
        require(weight >= 0, "weights must not be negative");
        sum += weight;
    }
    require(std::abs(sum - 1) < 1e-6, "weights must add up to 1");
    return run_blend(std::move(values), {}, size, portable);
}

py::tuple build_exhaustive_blend(const Array<std::int64_t>& sizes, bool portable) {
    check_datasets(sizes);
    megacore::Counts limits(sizes.data(), sizes.data() + sizes.size());
    std::int64_t total = 0;
    for (const std::int64_t size : limits) {
        require(size >= 0, "sizes must not be negative");
        require(size <= std::numeric_limits<std::int64_t>::max() / 16 - total, "the sizes exceed the memory of any machine");
        total += size;
    }
    std::vector<double> weights;
    for (const std::int64_t size : limits) {
        weights.push_back(total == 0 ? 0.0 : static_cast<double>(size) / static_cast<double>(total));
    }
    return run_blend(std::move(weights), std::move(limits), total, portable);
}

// Calls use(map) without Python's lock, once everything that it is built from is checked.
template <typename Use>
void with_sentence_map(const Array<std::int64_t>& document_starts, const Array<std::int32_t>& lengths,
                       const megacore::SentenceMapOptions& options, Use use) {
    require(document_starts.ndim() == 1 && document_starts.size() > 0 && lengths.ndim() == 1,
            "document_starts and lengths must be one-dimensional, document_starts with the end of the last document");
    require(options.max_samples >= 0 && options.max_epochs >= 0, "max_samples and max_epochs must not be negative");
    require(options.max_length >= 2 && options.max_length <= std::numeric_limits<std::int32_t>::max(),
            "max_length must be at least 2");
    require(options.short_probability == 0 || (options.short_probability > 1e-9 && options.short_probability <= 1),
            "short_probability must be 0, or at most 1 and above 1e-9");
    require(options.min_sentences >= 1, "min_sentences must be positive");
    const std::int64_t* starts = document_starts.data();
    const std::int64_t documents = document_starts.size() - 1;
    require(starts[0] >= 0 && starts[documents] <= lengths.size(), "document_starts is out of range");
    py::gil_scoped_release release;
    for (std::int64_t k = 0; k < documents; ++k) require(starts[k] <= starts[k + 1], "document_starts is falling");
    megacore::SentenceMap map(starts, documents, lengths.data(), options);
    use(map);
}

template <typename T>
Array<T> build_sentence_map(const Array<std::int64_t>& document_starts, const Array<std::int32_t>& lengths,
                            std::int64_t max_samples, std::int64_t max_epochs, std::int64_t max_length,
                            double short_probability, std::int64_t min_sentences, std::uint32_t seed) {
    auto rows = std::make_unique<std::vector<T>>();
    with_sentence_map(document_starts, lengths,
                      {max_samples, max_epochs, max_length, short_probability, min_sentences, seed},
                      [&rows](megacore::SentenceMap& map) { *rows = map.build<T>(); });
    const auto count = static_cast<py::ssize_t>(rows->size() / 3);
    const T* data = rows->data();
    py::capsule owner(rows.get(), [](void* vector) { delete static_cast<std::vector<T>*>(vector); });
    rows.release();
    return Array<T>({count, static_cast<py::ssize_t>(3)}, data, owner);
}

// (epochs, samples) of the map that the same values give.
std::pair<std::int64_t, std::int64_t> count_sentence_map(const Array<std::int64_t>& document_starts,
                                                         const Array<std::int32_t>& lengths, std::int64_t max_samples,
                                                         std::int64_t max_epochs, std::int64_t max_length,
                                                         double short_probability, std::int64_t min_sentences,
                                                         std::uint32_t seed) {
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
               py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"), py::arg("extra"),
               py::arg("partial") = false);
    module.def(sentence_map, &build_sentence_map<Unsigned>, py::arg("document_starts").noconvert(),
               py::arg("lengths").noconvert(), py::arg("max_samples"), py::arg("max_epochs"), py::arg("max_length"),
               py::arg("short_probability"), py::arg("min_sentences"), py::arg("seed"));
}

}  // namespace

PYBIND11_MODULE(_index_helpers, module) {
    module.doc() = "Compiled parts of the index maps.";
    py::class_<megacore::RandomState>(module, "RandomState")
        .def(py::init<std::uint32_t, bool>(), py::arg("seed"), py::arg("portable") = false)
        .def("shuffle", &shuffle<std::int32_t>, py::arg("values").noconvert())
        .def("shuffle", &shuffle<std::uint32_t>, py::arg("values").noconvert())
        .def("shuffle", &shuffle<std::int64_t>, py::arg("values").noconvert());
    define_sized<std::int32_t>(module, "build_sample_index_int32", "build_sentence_map_uint32");
    define_sized<std::int64_t>(module, "build_sample_index_int64", "build_sentence_map_uint64");
    module.def("count_sentence_map", &count_sentence_map, py::arg("document_starts").noconvert(),
               py::arg("lengths").noconvert(), py::arg("max_samples"), py::arg("max_epochs"), py::arg("max_length"),
               py::arg("short_probability"), py::arg("min_sentences"), py::arg("seed"));
    module.def("build_blend", &build_blend, py::arg("weights").noconvert(), py::arg("size"),
               py::arg("portable") = false);
    module.def("build_exhaustive_blend", &build_exhaustive_blend, py::arg("sizes").noconvert(),
               py::arg("portable") = false);
}
