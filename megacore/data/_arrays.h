// Access to arrays of files: integers of several types, possibly unaligned, and tokens widened to
// 64 bits.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <utility>

namespace megacore {

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

constexpr std::int64_t kPadding = -1;

inline void prefetch(const void* address) {
#if defined(__GNUC__)
    __builtin_prefetch(address);
#else
    (void)address;
#endif
}

// An array of integers of a file. It has one of several types, and is not aligned in .idx files.
class Integers {
  public:
    explicit Integers(py::array values) : values_(std::move(values)), size_(values_.size()) {
        const auto kind = values_.dtype().kind();
        const auto width = values_.itemsize();
        const bool known = (kind == 'i' || kind == 'u') && (width == 4 || width == 8);
        if (!known || !(values_.flags() & py::array::c_style)) {
            throw std::invalid_argument(
                "the maps must be C-contiguous arrays of i32, u32, i64 or u64");
        }
        type_ = width == 8 ? Type::i64 : kind == 'u' ? Type::u32 : Type::i32;
        width_ = width;
        data_ = static_cast<const char*>(values_.data());
    }

    std::int64_t size() const { return size_; }

    // A u64 of more than 63 bits becomes negative and is refused like other invalid positions.
    std::int64_t operator[](std::int64_t index) const {
        switch (type_) {
            case Type::i32: return load<std::int32_t>(index);
            case Type::u32: return load<std::uint32_t>(index);
            default: return load<std::int64_t>(index);
        }
    }

    void prefetch_at(std::int64_t index) const { prefetch(data_ + index * width_); }

  private:
    enum class Type { i32, u32, i64 };

    template <typename T>
    std::int64_t load(std::int64_t index) const {
        T value;
        std::memcpy(&value, data_ + index * static_cast<std::int64_t>(sizeof(T)), sizeof(T));
        return static_cast<std::int64_t>(value);
    }

    py::array values_;  // keeps the data alive
    std::int64_t size_;
    Type type_;
    std::int64_t width_;
    const char* data_;
};

using Widen = void (*)(const char*, std::int64_t, std::int64_t*);

template <typename T>
void widen(const char* source, std::int64_t count, std::int64_t* target) {
    const T* tokens = reinterpret_cast<const T*>(source);
    for (std::int64_t i = 0; i < count; ++i) target[i] = static_cast<std::int64_t>(tokens[i]);
}

inline Widen widen_of(const py::array& tokens) {
    const auto width = tokens.itemsize();
    switch (tokens.dtype().kind()) {
        case 'u':
            if (width == 1) return widen<std::uint8_t>;
            if (width == 2) return widen<std::uint16_t>;
            break;
        case 'i':
            if (width == 1) return widen<std::int8_t>;
            if (width == 2) return widen<std::int16_t>;
            if (width == 4) return widen<std::int32_t>;
            if (width == 8) return widen<std::int64_t>;
            break;
        default: break;
    }
    throw std::invalid_argument("tokens are of no type that a token file has");
}

}  // namespace megacore
