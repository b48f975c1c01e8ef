// Samples of whole sentences: BERT's with masked words, T5's with spans replaced by sentinels. A
// sample depends only on the seed and its number. Every index in a file is checked before use.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "_arrays.h"
#include "_masking.h"
#include "_random_state.h"

namespace py = pybind11;

namespace megacore {
namespace {

// Reading of the rows of a sentence map and their tokens, and filling of the output.

using Ids = std::vector<std::int64_t>;
using Flags = Array<std::uint8_t>;

struct Row {
    std::int64_t first, end, target;  // first and end sentence, target length in tokens
};

// The sentences of a pair of token files, and a map of samples.
class Sentences {
  public:
    Sentences(py::array tokens, const py::array& pointers, const py::array& rows,
              std::int64_t vocab_size)
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

    Row row(std::int64_t sample) const {
        return {rows_[3 * sample], rows_[3 * sample + 1], rows_[3 * sample + 2]};
    }

    // Reads at most `limit` tokens of the sentences; returns false if there are no such sentences
    // or an id is not in the vocabulary.
    bool read(std::int64_t first, std::int64_t end, Ids& ids,
              std::int64_t limit = kUnlimited) const {
        if (first < 0 || first >= end || end > pointers_.size()) return false;
        const std::int64_t start = offset(first);
        const std::int64_t whole = offset(end);
        if (start < 0 || whole < start || whole > count_) return false;
        const std::int64_t stop = start + std::min(whole - start, limit);
        ids.resize(static_cast<std::size_t>(stop - start));
        widen_(data_ + start * width_, stop - start, ids.data());
        return std::all_of(ids.begin(), ids.end(),
                           [this](std::int64_t id) { return id >= 0 && id < vocab_size_; });
    }

    // Returns the index of the first token of a sentence.
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

// Fills rows of `out` [rows, width], by default the first rows, with `make(index, row)`, which
// returns true on success. Returns -1, or the number of a sample that failed; the content of `out`
// is then undefined. Throws std::out_of_range with an index that is out of range.
template <typename Make>
std::int64_t fill(const Array<std::int64_t>& indices, Array<std::int64_t>& out,
                  const std::optional<Array<std::int64_t>>& rows, std::int64_t samples,
                  std::int64_t width, Make make) {
    if (indices.ndim() != 1 || out.ndim() != 2 || out.shape(1) != width) {
        throw std::invalid_argument("indices must be one-dimensional and out [rows, width]");
    }
    const std::int64_t count = indices.size();
    if (rows ? rows->size() != count : out.shape(0) < count)
        throw std::invalid_argument("rows do not fit indices");
    const std::int64_t* index = indices.data();
    const std::int64_t* row = rows ? rows->data() : nullptr;
    for (std::int64_t i = 0; i < count; ++i) {
        if (index[i] < 0 || index[i] >= samples) throw std::out_of_range(std::to_string(index[i]));
        if (row && (row[i] < 0 || row[i] >= out.shape(0)))
            throw std::invalid_argument("rows go beyond out");
    }
    std::int64_t* target = out.mutable_data();  // throws if it is read-only
    py::gil_scoped_release release;
    for (std::int64_t i = 0; i < count; ++i) {
        if (!make(index[i], target + (row ? row[i] : i) * width)) return index[i];
    }
    return -1;
}

// Returns the random state of a sample, seeded as in Megatron core.
inline RandomState random_of(std::uint32_t seed, std::int64_t index) {
    return RandomState(static_cast<std::uint32_t>(seed + static_cast<std::uint64_t>(index)), false);
}

inline Flags checked(Flags continues) {
    if (continues.ndim() != 1) throw std::invalid_argument("continues must be one-dimensional");
    return continues;
}

}  // namespace
}  // namespace megacore

namespace {

using megacore::Array;
using megacore::Flags;
using megacore::Ids;
using megacore::Integers;
using megacore::kPadding;
using megacore::MaskingRules;
using megacore::RandomState;
using megacore::Row;
using megacore::Sentences;
using megacore::Span;
using megacore::SpanChooser;
using megacore::WordChooser;

struct BertIds {
    std::int64_t cls, sep, mask;
};

enum class SentenceTask { none, sop, nsp };

SentenceTask task_of(const std::string& name) {
    if (name == "none") return SentenceTask::none;
    if (name == "sop") return SentenceTask::sop;
    if (name == "nsp") return SentenceTask::nsp;
    throw std::invalid_argument("the sentence task is none, sop or nsp");
}

// Builds rows of 3 s + 1 ids: tokens, labels, segments, and 1 if the second segment does not
// continue the first, else 0.
class BertSampler {
  public:
    BertSampler(const py::array& tokens, const py::array& pointers, const py::array& documents,
                const py::array& rows, Flags continues, std::int64_t seq_length, std::uint32_t seed,
                BertIds ids, const std::string& task, MaskingRules rules)
        : continues_(megacore::checked(std::move(continues))),
          sentences_(tokens, pointers, rows, continues_.size()),
          documents_(documents),
          seq_length_(seq_length),
          seed_(seed),
          ids_(ids),
          task_(task_of(task)),
          rules_(std::move(rules)) {
        if (seq_length < 5) throw std::invalid_argument("seq_length must be at least 5");
    }

    std::int64_t gather(const Array<std::int64_t>& indices, Array<std::int64_t>& out,
                        const std::optional<Array<std::int64_t>>& rows) const {
        Scratch scratch{{}, {}, WordChooser(rules_, continues_.data(), ids_.cls, ids_.sep)};
        return megacore::fill(
            indices, out, rows, sentences_.samples(), 3 * seq_length_ + 1,
            [&](std::int64_t index, std::int64_t* row) { return make(index, row, scratch); });
    }

  private:
    struct Scratch {
        Ids own;
        Ids other;
        WordChooser chooser;
    };

    struct Segment {
        const std::int64_t* first;
        const std::int64_t* last;
        std::int64_t size() const { return last - first; }
    };

    bool make(std::int64_t index, std::int64_t* out, Scratch& scratch) const {
        RandomState random = megacore::random_of(seed_, index);
        const Row row = sentences_.row(index);
        const bool pairs = task_ != SentenceTask::none;
        if (!sentences_.read(row.first, row.end, scratch.own) ||
            row.end - row.first < (pairs ? 2 : 1))
            return false;
        if (row.target < 2 || row.target > seq_length_ - 3) return false;
        const std::int64_t* begin = scratch.own.data();
        Segment a{begin, begin + scratch.own.size()};
        Segment b{a.last, a.last};
        bool broken = false;
        if (pairs) {
            const std::int64_t pivot =
                row.end - row.first < 3 ? 1 : 1 + random.below(row.end - row.first - 1);
            a.last = b.first =
                begin + (sentences_.offset(row.first + pivot) - sentences_.offset(row.first));
            broken = random.uniform() < 0.5;
        }
        if (broken && task_ == SentenceTask::sop) std::swap(a, b);
        if (broken && task_ == SentenceTask::nsp) {
            if (!read_other(row.first, random, scratch.other)) return false;
            b = {scratch.other.data(), scratch.other.data() + scratch.other.size()};
        }
        trim(a, b, row.target, random);
        write(a, b, row.target, broken, random, scratch, out);
        return true;
    }

    // Reads the sentences of a random sample of another document. One exists; this is checked when
    // the map is opened.
    bool read_other(std::int64_t sentence, RandomState& random, Ids& ids) const {
        const std::int64_t own = document_of(sentence);
        for (;;) {
            const Row row = sentences_.row(random.below(sentences_.samples()));
            if (document_of(row.first) != own) return sentences_.read(row.first, row.end, ids);
        }
    }

    std::int64_t document_of(std::int64_t sentence) const {
        std::int64_t low = 0;
        std::int64_t high = documents_.size();
        while (low < high) {
            const std::int64_t middle = low + (high - low) / 2;
            if (documents_[middle] <= sentence) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        return low - 1;
    }

    // Removes tokens from a random end of the longer segment until both fit into `target`.
    static void trim(Segment& a, Segment& b, std::int64_t target, RandomState& random) {
        while (a.size() + b.size() > target) {
            Segment& longer = a.size() > b.size() ? a : b;
            if (random.uniform() < 0.5) {
                ++longer.first;
            } else {
                --longer.last;
            }
        }
    }

    void write(const Segment& a, const Segment& b, std::int64_t target, bool broken,
               RandomState& random, Scratch& scratch, std::int64_t* out) const {
        std::int64_t* const labels = out + seq_length_;
        std::int64_t* const segments = labels + seq_length_;
        std::fill(out, out + 3 * seq_length_, kPadding);
        out[3 * seq_length_] = broken;
        std::int64_t* end = out;
        *end++ = ids_.cls;
        end = std::copy(a.first, a.last, end);
        *end++ = ids_.sep;
        std::fill_n(segments, end - out, 0);
        if (b.size() > 0) {
            std::fill_n(segments + (end - out), b.size() + 1, 1);
            end = std::copy(b.first, b.last, end);
            *end++ = ids_.sep;
        }
        scratch.chooser.choose(out, end - out, target, random,
                               [&](const std::int64_t* places, std::int64_t count) {
                                   for (std::int64_t k = 0; k < count; ++k) {
                                       labels[places[k]] = out[places[k]];
                                       out[places[k]] = replacement(out[places[k]], random);
                                   }
                               });
    }

    // Returns [MASK] with 80 %, a random token with 10 %, the token itself with 10 %.
    std::int64_t replacement(std::int64_t token, RandomState& random) const {
        if (random.uniform() < 0.8) return ids_.mask;
        return random.uniform() >= 0.5 ? random.below(continues_.size()) : token;
    }

    Flags continues_;
    Sentences sentences_;
    Integers documents_;
    std::int64_t seq_length_;
    std::uint32_t seed_;
    BertIds ids_;
    SentenceTask task_;
    MaskingRules rules_;
};

struct T5Ids {
    std::int64_t cls, sep, end;
    Ids sentinels;
};

// Builds rows of s + s_d ids: the encoder's tokens, with sentinels in place of spans, and the
// decoder's labels, with the tokens of the spans.
class T5Sampler {
  public:
    // mean_length: if above 0, T5's random spans are used instead of words.
    T5Sampler(const py::array& tokens, const py::array& pointers, const py::array& rows,
              Flags continues, std::int64_t seq_length, std::int64_t decoder_seq_length,
              std::uint32_t seed, T5Ids ids, MaskingRules rules, double mean_length)
        : continues_(megacore::checked(std::move(continues))),
          sentences_(tokens, pointers, rows, continues_.size()),
          seq_length_(seq_length),
          decoder_seq_length_(decoder_seq_length),
          seed_(seed),
          ids_(std::move(ids)),
          rules_(std::move(rules)),
          mean_length_(mean_length) {
        if (seq_length < 4 || decoder_seq_length < 1)
            throw std::invalid_argument("the sequences are too short");
    }

    std::int64_t gather(const Array<std::int64_t>& indices, Array<std::int64_t>& out,
                        const std::optional<Array<std::int64_t>>& rows) const {
        Scratch scratch{{}, {}, {}, WordChooser(rules_, continues_.data(), ids_.cls, ids_.sep),
                        SpanChooser(rules_.share, mean_length_)};
        return megacore::fill(
            indices, out, rows, sentences_.samples(), seq_length_ + decoder_seq_length_,
            [&](std::int64_t index, std::int64_t* row) { return make(index, row, scratch); });
    }

  private:
    struct Scratch {
        Ids ids;
        std::vector<Span> spans;   // ranges of `places`, ascending by their first place
        Ids places;
        WordChooser words;
        SpanChooser random_spans;
    };

    bool make(std::int64_t index, std::int64_t* out, Scratch& scratch) const {
        RandomState random = megacore::random_of(seed_, index);
        const Row row = sentences_.row(index);
        if (row.target < 2 || row.target > seq_length_ - 2) return false;
        if (!sentences_.read(row.first, row.end, scratch.ids, row.target)) return false;
        const auto count = static_cast<std::int64_t>(scratch.ids.size());
        choose(count, row.target, random, scratch);
        write(count, scratch, out);
        return true;
    }

    void choose(std::int64_t count, std::int64_t target, RandomState& random,
                Scratch& scratch) const {
        scratch.places.clear();
        if (mean_length_ > 0) {
            scratch.random_spans.choose(count, random, scratch.spans);
            for (Span& span : scratch.spans) {
                const auto at = static_cast<std::int64_t>(scratch.places.size());
                for (std::int64_t k = 0; k < span.count; ++k)
                    scratch.places.push_back(span.first + k);
                span.first = at;
            }
            return;
        }
        scratch.spans.clear();
        scratch.words.choose(scratch.ids.data(), count, target, random,
                             [&](const std::int64_t* places, std::int64_t size) {
                                 const auto at = static_cast<std::int64_t>(scratch.places.size());
                                 scratch.spans.push_back({at, size});
                                 scratch.places.insert(scratch.places.end(), places, places + size);
                             });
        std::sort(scratch.spans.begin(), scratch.spans.end(),
                  [&](const Span& one, const Span& other) {
                      return scratch.places[one.first] < scratch.places[other.first];
                  });
    }

    // Writes both sequences. A span without a remaining sentinel or room is not replaced.
    void write(std::int64_t count, const Scratch& scratch, std::int64_t* out) const {
        std::fill(out, out + seq_length_ + decoder_seq_length_, kPadding);
        std::int64_t* encoder = out;
        std::int64_t* decoder = out + seq_length_;
        std::int64_t* const last = decoder + decoder_seq_length_ - 1;
        std::int64_t next = 0;  // next token to write
        std::size_t used = 0;
        for (const Span& span : scratch.spans) {
            if (used == ids_.sentinels.size() || last - decoder < span.count + 1) break;
            const std::int64_t sentinel = ids_.sentinels[used++];
            const std::int64_t* places = scratch.places.data() + span.first;
            encoder = std::copy(scratch.ids.data() + next, scratch.ids.data() + places[0], encoder);
            *encoder++ = sentinel;
            *decoder++ = sentinel;
            for (std::int64_t k = 0; k < span.count; ++k) *decoder++ = scratch.ids[places[k]];
            next = places[span.count - 1] + 1;
        }
        std::copy(scratch.ids.data() + next, scratch.ids.data() + count, encoder);
        *decoder = ids_.end;
    }

    Flags continues_;
    Sentences sentences_;
    std::int64_t seq_length_;
    std::int64_t decoder_seq_length_;
    std::uint32_t seed_;
    T5Ids ids_;
    MaskingRules rules_;
    double mean_length_;
};

MaskingRules rules_of(double share, bool whole_words, std::vector<double> lengths,
                      double length_probability) {
    if (lengths.empty()) throw std::invalid_argument("there must be a length in words");
    return {share, whole_words, std::move(lengths), length_probability};
}

}  // namespace

void add_sentence_samples(py::module_& module) {
    py::class_<MaskingRules>(module, "MaskingRules")
        .def(py::init(&rules_of), py::kw_only(), py::arg("share"), py::arg("whole_words"),
             py::arg("length_cumulative"), py::arg("length_probability") = 0.0);
    py::class_<BertSampler>(module, "BertSampler")
        .def(py::init([](const py::array& tokens, const py::array& pointers,
                         const py::array& documents, const py::array& rows, Flags continues,
                         std::int64_t seq_length, std::uint32_t seed, std::int64_t cls,
                         std::int64_t sep, std::int64_t mask, const std::string& task,
                         MaskingRules rules) {
                 return BertSampler(tokens, pointers, documents, rows, std::move(continues),
                                    seq_length, seed, {cls, sep, mask}, task, std::move(rules));
             }),
             py::kw_only(), py::arg("tokens"), py::arg("pointers"), py::arg("documents"),
             py::arg("rows"), py::arg("continues").noconvert(), py::arg("seq_length"),
             py::arg("seed"), py::arg("cls"), py::arg("sep"), py::arg("mask"), py::arg("task"),
             py::arg("rules"))
        .def("gather", &BertSampler::gather, py::arg("indices").noconvert(),
             py::arg("out").noconvert(), py::arg("rows").noconvert() = py::none());
    py::class_<T5Sampler>(module, "T5Sampler")
        .def(py::init([](const py::array& tokens, const py::array& pointers, const py::array& rows,
                         Flags continues, std::int64_t seq_length, std::int64_t decoder_seq_length,
                         std::uint32_t seed, std::int64_t cls, std::int64_t sep, std::int64_t end,
                         Ids sentinels, MaskingRules rules, double mean_length) {
                 return T5Sampler(tokens, pointers, rows, std::move(continues), seq_length,
                                  decoder_seq_length, seed, {cls, sep, end, std::move(sentinels)},
                                  std::move(rules), mean_length);
             }),
             py::kw_only(), py::arg("tokens"), py::arg("pointers"), py::arg("rows"),
             py::arg("continues").noconvert(), py::arg("seq_length"), py::arg("decoder_seq_length"),
             py::arg("seed"), py::arg("cls"), py::arg("sep"), py::arg("end"), py::arg("sentinels"),
             py::arg("rules"), py::arg("mean_length") = 0.0)
        .def("gather", &T5Sampler::gather, py::arg("indices").noconvert(),
             py::arg("out").noconvert(), py::arg("rows").noconvert() = py::none());
}
