// The two walks of the GPT index maps that are too slow in Python: the shuffle and the sample index.
// index_helpers_ref.py is the same in NumPy; the tests hold one against the other.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <random>
#include <stdexcept>
#include <utility>

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

// numpy.random.RandomState(seed): MT19937 with its legacy seeding, which is the standard library's.
class RandomState {
  public:
    explicit RandomState(std::uint32_t seed) : generator_(seed) {}

    // In place, with the draws of RandomState.shuffle on a one-dimensional array.
    template <typename T>
    void shuffle(Array<T>& values) {
        if (values.ndim() != 1) throw std::invalid_argument("shuffle takes a one-dimensional array");
        T* data = values.mutable_data();  // throws when the array is read-only
        const std::int64_t count = values.size();
        py::gil_scoped_release release;
        for (std::int64_t i = count - 1; i > 0; --i) {
            std::swap(data[i], data[draw_up_to(static_cast<std::uint64_t>(i))]);
        }
    }

  private:
    // Uniform in [0, maximum]: masked to the least 2^k - 1 that reaches maximum, redrawn while above it.
    std::uint64_t draw_up_to(std::uint64_t maximum) {
        std::uint64_t mask = maximum;
        for (int shift = 1; shift < 64; shift *= 2) mask |= mask >> shift;
        const bool wide = maximum > 0xffffffffULL;
        std::uint64_t value;
        do {
            value = (wide ? draw_64_bits() : draw_32_bits()) & mask;
        } while (value > maximum);
        return value;
    }

    std::uint64_t draw_32_bits() { return static_cast<std::uint32_t>(generator_()); }

    std::uint64_t draw_64_bits() {
        const std::uint64_t high = draw_32_bits();
        return high << 32 | draw_32_bits();
    }

    std::mt19937 generator_;
};

// Rows (position in the document index, token offset there) at which the samples begin, and where the last one ends.
template <typename T>
Array<T> build_sample_index(const Array<std::int32_t>& lengths, const Array<std::int32_t>& document_index,
                            std::int64_t seq_length, std::int64_t num_samples, std::int64_t extra) {
    if (lengths.ndim() != 1 || document_index.ndim() != 1) {
        throw std::invalid_argument("lengths and document_index must be one-dimensional");
    }
    if (seq_length < 1 || num_samples < 0 || extra < 0 || extra > 1) {
        throw std::invalid_argument("seq_length must be positive, num_samples not negative, extra 0 or 1");
    }
    Array<T> rows({static_cast<py::ssize_t>(num_samples) + 1, static_cast<py::ssize_t>(2)});
    T* row = rows.mutable_data();
    const std::int32_t* length_of = lengths.data();
    const std::int32_t* document_at = document_index.data();
    const std::int64_t sequences = lengths.size();
    const std::int64_t positions = document_index.size();

    py::gil_scoped_release release;
    std::int64_t position = 0;
    std::int64_t offset = 0;
    row[0] = 0;
    row[1] = 0;
    for (std::int64_t sample = 1; sample <= num_samples; ++sample) {
        std::int64_t wanted = seq_length + extra;
        while (true) {
            if (position >= positions) throw std::invalid_argument("the documents end before the samples do");
            const std::int64_t document = document_at[position];
            if (document < 0 || document >= sequences) throw std::invalid_argument("document_index is out of range");
            const std::int64_t available = length_of[document] - offset;
            if (available >= wanted) {
                offset += wanted - extra;
                break;
            }
            wanted -= available;
            offset = 0;
            ++position;
        }
        row[2 * sample] = static_cast<T>(position);
        row[2 * sample + 1] = static_cast<T>(offset);
    }
    return rows;
}

PYBIND11_MODULE(_index_helpers, module) {
    module.doc() = "Compiled parts of the GPT index maps.";
    py::class_<RandomState>(module, "RandomState")
        .def(py::init<std::uint32_t>(), py::arg("seed"))
        .def("shuffle", &RandomState::shuffle<std::int32_t>, py::arg("values").noconvert())
        .def("shuffle", &RandomState::shuffle<std::uint32_t>, py::arg("values").noconvert())
        .def("shuffle", &RandomState::shuffle<std::int64_t>, py::arg("values").noconvert());
    module.def("build_sample_index_int32", &build_sample_index<std::int32_t>, py::arg("lengths").noconvert(),
               py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"), py::arg("extra"));
    module.def("build_sample_index_int64", &build_sample_index<std::int64_t>, py::arg("lengths").noconvert(),
               py::arg("document_index").noconvert(), py::arg("seq_length"), py::arg("num_samples"), py::arg("extra"));
}
