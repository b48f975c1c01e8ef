// Activations of x + bias and of gated units, forward and backward. The bias's gradient is computed
// in the same pass as that of x.
#include "_kernels.h"

#include <stdexcept>

#include "_rows.h"

#ifdef MEGACORE_HAS_AVX512
MEGACORE_AVX512_BEGIN
namespace megacore {
namespace {

inline __m512 number(float x) { return _mm512_set1_ps(x); }

// c[0] + c[1] x + ...
template <std::size_t kTerms>
inline __m512 polynomial(__m512 x, const float (&c)[kTerms]) {
    __m512 p = number(c[kTerms - 1]);
    for (std::size_t term = kTerms - 1; term-- > 0;) p = _mm512_fmadd_ps(p, x, number(c[term]));
    return p;
}

// Relative accuracy: a few units of 1e-5 for results that are rounded to bf16, 3e-7 for fp32.
template <class T>
constexpr bool kExact = std::is_same_v<T, float>;

// Compute 2^x of finite x: the difference to the nearest integer goes into a polynomial.
template <class T>
inline __m512 power_of_two(__m512 x) {
    constexpr float exact[] = {1.0f,          0.693147004f,   0.240222424f,
                               0.0555073395f, 0.00967151858f, 0.00132647238f};
    constexpr float rough[] = {1.0f, 0.693124175f, 0.240240991f, 0.0559064634f, 0.00958283804f};
    const __m512 n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 r = _mm512_sub_ps(x, n);
    if constexpr (kExact<T>) return _mm512_scalef_ps(polynomial(r, exact), n);
    return _mm512_scalef_ps(polynomial(r, rough), n);
}

// Compute 1 / x of finite x: 14 bits from a table, doubled by one Newton step for fp32.
template <class T>
inline __m512 inverse(__m512 x) {
    const __m512 guess = _mm512_rcp14_ps(x);
    if constexpr (!kExact<T>) return guess;
    return _mm512_mul_ps(guess, _mm512_fnmadd_ps(x, guess, number(2.0f)));
}

// NaN stays NaN: both instructions then return their second argument.
inline __m512 at_least(float low, __m512 x) { return _mm512_max_ps(number(low), x); }
inline __m512 at_most(float high, __m512 x) { return _mm512_min_ps(number(high), x); }

constexpr float kLog2e = 1.4426950408889634f;

// x sigmoid(u(x)). Beyond +-kLimit sigmoid is 0 or 1, and only the factor x may be larger than
// kLimit.
template <class T, class Function>
struct Sigmoidal {
    static __m512 value(__m512 x) {
        const __m512 low = at_least(-Function::kLimit, x);
        const __m512 power = power_of_two<T>(Function::exponent(at_most(Function::kLimit, low)));
        return _mm512_mul_ps(low, inverse<T>(_mm512_add_ps(number(1.0f), power)));
    }
    static void both(__m512 x, __m512& value, __m512& slope) {
        const __m512 low = at_least(-Function::kLimit, x);
        const __m512 near = at_most(Function::kLimit, low);
        const __m512 power = power_of_two<T>(Function::exponent(near));
        const __m512 s = inverse<T>(_mm512_add_ps(number(1.0f), power));
        value = _mm512_mul_ps(low, s);
        // s (1 - s), computed accurately where s is near 1
        const __m512 bell = _mm512_mul_ps(_mm512_mul_ps(power, s), s);
        slope = _mm512_fmadd_ps(bell, Function::steepness(near), s);
    }
};

// u = 2 sqrt(2 / pi) (x + 0.044715 x^3); the same as 0.5 x (1 + tanh(u / 2)).
struct GeluTanhFunction {
    static constexpr float kLimit = 10.0f, kLinear = 1.5957691216057308f, kCubic = 0.07135481282f;
    static __m512 exponent(__m512 x) {  // -u log2(e)
        const __m512 square = _mm512_mul_ps(x, x);
        return _mm512_mul_ps(
            x, _mm512_fmadd_ps(number(-kCubic * kLog2e), square, number(-kLinear * kLog2e)));
    }
    static __m512 steepness(__m512 x) {  // x u'(x)
        const __m512 square = _mm512_mul_ps(x, x);
        return _mm512_mul_ps(x, _mm512_fmadd_ps(number(3.0f * kCubic), square, number(kLinear)));
    }
};
template <class T>
using GeluTanh = Sigmoidal<T, GeluTanhFunction>;

// u = x.
struct SiluFunction {
    static constexpr float kLimit = 87.0f;
    static __m512 exponent(__m512 x) { return _mm512_mul_ps(x, number(-kLog2e)); }
    static __m512 steepness(__m512 x) { return x; }
};
template <class T>
using Silu = Sigmoidal<T, SiluFunction>;

// x Phi(x). Phi(-|x|) = e^(-x^2 / 2) t P(t) with t = 1 / (1 + p |x|); P is fitted for a small
// relative error.
template <class T>
struct Gelu {
    static constexpr float kLimit = 16.0f;  // beyond it Phi is 0 or 1
    static void parts(__m512 x, __m512& cdf, __m512& bell) {
        constexpr float exact[] = {0.12365693f,  0.12406002f,  0.10777311f,  0.11010346f,
                                   -0.01489067f, 0.15505383f, -0.14159627f, 0.03583968f};
        constexpr float rough[] = {0.146968195f, 0.156938637f, 0.0774748218f, 0.208275647f,
                                   -0.0896373384f};
        const __m512 size = at_most(kLimit, _mm512_abs_ps(x));
        bell = power_of_two<T>(_mm512_mul_ps(_mm512_mul_ps(size, size), number(-0.5f * kLog2e)));
        const __m512 t =
            inverse<T>(_mm512_fmadd_ps(size, number(kExact<T> ? 0.31f : 0.37f), number(1.0f)));
        __m512 p;
        if constexpr (kExact<T>) p = polynomial(t, exact);
        else p = polynomial(t, rough);
        const __m512 tail = _mm512_mul_ps(_mm512_mul_ps(p, t), bell);
        const __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GE_OQ);
        cdf = _mm512_mask_sub_ps(tail, positive, number(1.0f), tail);
    }
    static __m512 value(__m512 x) {
        __m512 cdf, bell;
        parts(x, cdf, bell);
        return _mm512_mul_ps(x, cdf);
    }
    static void both(__m512 x, __m512& value, __m512& slope) {
        __m512 cdf, bell;
        parts(x, cdf, bell);
        value = _mm512_mul_ps(x, cdf);
        slope = _mm512_fmadd_ps(_mm512_mul_ps(x, bell), number(0.3989422804f), cdf);
    }
};

template <class T>
struct Relu {
    static __m512 value(__m512 x) { return at_least(0.0f, x); }
    static void both(__m512 x, __m512& value, __m512& slope) {
        value = Relu::value(x);
        const __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
        slope = _mm512_maskz_mov_ps(positive, number(1.0f));
    }
};

template <class T, class Lanes>
inline __m512 biased(const T* x, const T* bias, Index c, Lanes lanes) {
    const __m512 value = load(x + c, lanes);
    return bias ? _mm512_add_ps(value, load(bias + c, lanes)) : value;
}

template <class Lanes>
inline void accumulate(float* sums, __m512 x, Index c, Lanes lanes) {
    store(sums + c, _mm512_add_ps(load(sums + c, lanes), x), lanes);
}

// Forward over rows, backward over blocks of rows. bias and dbias are both null or both not null.
template <class T, class Function>
struct Activation {
    static void forward(std::uintptr_t x, Index x_stride, std::uintptr_t bias, std::uintptr_t y,
                        Index rows, Index cols, int threads) {
        threads = useful(threads, rows * cols);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (Index row = 0; row < rows; ++row) {
            const T* from = at<T>(x) + row * x_stride;
            T* to = at<T>(y) + row * cols;
            columns(cols, [&](Index c, auto lanes) __attribute__((always_inline)) {
                store(to + c, Function::value(biased(from, at<T>(bias), c, lanes)), lanes);
            });
        }
    }

    static void backward(std::uintptr_t dy, Index dy_stride, std::uintptr_t x, Index x_stride,
                         std::uintptr_t bias, std::uintptr_t dx, std::uintptr_t dbias, Index rows,
                         Index cols, int threads) {
        const Blocks blocks(rows);
        Sums sums(blocks, dbias ? cols : 0);
        threads = useful(threads, rows * cols);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (Index block = 0; block < blocks.count; ++block) {
            float* own = dbias ? sums.clear(block) : nullptr;
            for (Index row = blocks.first(block); row < blocks.end(block); ++row) {
                const T* from = at<T>(x) + row * x_stride;
                const T* grads = at<T>(dy) + row * dy_stride;
                T* to = at<T>(dx) + row * cols;
                columns(cols, [&](Index c, auto lanes) __attribute__((always_inline)) {
                    __m512 value, slope;
                    Function::both(biased(from, at<T>(bias), c, lanes), value, slope);
                    const __m512 grad = _mm512_mul_ps(load(grads + c, lanes), slope);
                    store(to + c, grad, lanes);
                    if (own) accumulate(own, grad, c, lanes);
                });
            }
        }
        if (dbias) sums.total(0, cols, at<T>(dbias));
    }
};

// function(gate) * up.
template <class T, class Function>
struct Gated {
    static void forward(std::uintptr_t gate, Index gate_stride, std::uintptr_t up, Index up_stride,
                        std::uintptr_t y, Index rows, Index cols, int threads) {
        threads = useful(threads, rows * cols);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (Index row = 0; row < rows; ++row) {
            const T* gates = at<T>(gate) + row * gate_stride;
            const T* ups = at<T>(up) + row * up_stride;
            T* to = at<T>(y) + row * cols;
            columns(cols, [&](Index c, auto lanes) __attribute__((always_inline)) {
                store(to + c,
                      _mm512_mul_ps(Function::value(load(gates + c, lanes)), load(ups + c, lanes)),
                      lanes);
            });
        }
    }

    static void backward(std::uintptr_t dy, Index dy_stride, std::uintptr_t gate, Index gate_stride,
                         std::uintptr_t up, Index up_stride, std::uintptr_t dgate,
                         std::uintptr_t dup, Index rows, Index cols, int threads) {
        threads = useful(threads, rows * cols);
#pragma omp parallel for num_threads(threads) schedule(static)
        for (Index row = 0; row < rows; ++row) {
            const T* gates = at<T>(gate) + row * gate_stride;
            const T* ups = at<T>(up) + row * up_stride;
            const T* grads = at<T>(dy) + row * dy_stride;
            columns(cols, [&](Index c, auto lanes) __attribute__((always_inline)) {
                __m512 open, slope;
                Function::both(load(gates + c, lanes), open, slope);
                const __m512 grad = load(grads + c, lanes);
                const __m512 through = _mm512_mul_ps(grad, load(ups + c, lanes));
                store(at<T>(dgate) + row * cols + c, _mm512_mul_ps(through, slope), lanes);
                store(at<T>(dup) + row * cols + c, _mm512_mul_ps(grad, open), lanes);
            });
        }
    }
};

}  // namespace
}  // namespace megacore
MEGACORE_AVX512_END
#endif

namespace {

using megacore::Index;

enum Kind { kGeluTanh, kGelu, kRelu, kSilu };

[[noreturn]] void none() {
    throw std::runtime_error("this machine has no kernels, or not of this kind");
}

#ifdef MEGACORE_HAS_AVX512
// Call run(Operation<T, Function>{}) for a type and a kind.
template <template <class, class> class Operation, class T, class Run>
void with_kind(int kind, const Run& run) {
    switch (kind) {
        case kGeluTanh: return run(Operation<T, megacore::GeluTanh<T>>{});
        case kGelu: return run(Operation<T, megacore::Gelu<T>>{});
        case kRelu: return run(Operation<T, megacore::Relu<T>>{});
        case kSilu: return run(Operation<T, megacore::Silu<T>>{});
        default: none();
    }
}

template <template <class, class> class Operation, class Run>
void with(bool half, int kind, const Run& run) {
    half ? with_kind<Operation, megacore::bf16>(kind, run) : with_kind<Operation, float>(kind, run);
}
#endif

void forward(Address x, Index x_stride, Address bias, Address y, Index rows, Index cols, int kind,
             bool half, int threads) {
#ifdef MEGACORE_HAS_AVX512
    with<megacore::Activation>(half, kind, [&](auto operation) {
        operation.forward(x, x_stride, bias, y, rows, cols, threads);
    });
#else
    none();
#endif
}

void backward(Address dy, Index dy_stride, Address x, Index x_stride, Address bias, Address dx,
              Address dbias, Index rows, Index cols, int kind, bool half, int threads) {
#ifdef MEGACORE_HAS_AVX512
    with<megacore::Activation>(half, kind, [&](auto operation) {
        operation.backward(dy, dy_stride, x, x_stride, bias, dx, dbias, rows, cols, threads);
    });
#else
    none();
#endif
}

void gated_forward(Address gate, Index gate_stride, Address up, Index up_stride, Address y,
                   Index rows, Index cols, int kind, bool half, int threads) {
#ifdef MEGACORE_HAS_AVX512
    with<megacore::Gated>(half, kind, [&](auto operation) {
        operation.forward(gate, gate_stride, up, up_stride, y, rows, cols, threads);
    });
#else
    none();
#endif
}

void gated_backward(Address dy, Index dy_stride, Address gate, Index gate_stride, Address up,
                    Index up_stride, Address dgate, Address dup, Index rows, Index cols, int kind,
                    bool half, int threads) {
#ifdef MEGACORE_HAS_AVX512
    with<megacore::Gated>(half, kind, [&](auto operation) {
        operation.backward(dy, dy_stride, gate, gate_stride, up, up_stride, dgate, dup, rows, cols,
                           threads);
    });
#else
    none();
#endif
}

}  // namespace

void add_activation(py::module_& module) {
    module.attr("GELU_TANH") = static_cast<int>(kGeluTanh);
    module.attr("GELU") = static_cast<int>(kGelu);
    module.attr("RELU") = static_cast<int>(kRelu);
    module.attr("SILU") = static_cast<int>(kSilu);
    module.def("activation_forward", &forward, Unlocked());
    module.def("activation_backward", &backward, Unlocked());
    module.def("gated_forward", &gated_forward, Unlocked());
    module.def("gated_backward", &gated_backward, Unlocked());
}
