// Vectors of 16 floats for the kernels. They are compiled on all x86-64 hosts, and used if the CPU
// supports them at run time.
//
// All code that uses them must be between MEGACORE_AVX512_BEGIN and MEGACORE_AVX512_END.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define MEGACORE_HAS_AVX512
#if defined(__clang__)
#define MEGACORE_AVX512_BEGIN                                                                \
    _Pragma("clang attribute push("                                                          \
            "__attribute__((target(\"avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma\"))), " \
            "apply_to=function)")
#define MEGACORE_AVX512_END _Pragma("clang attribute pop")
#else
#define MEGACORE_AVX512_BEGIN    \
    _Pragma("GCC push_options") \
    _Pragma("GCC target(\"avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,fma\")")
#define MEGACORE_AVX512_END _Pragma("GCC pop_options")
#endif
#endif

namespace megacore {

// Return true if fp32 kernels run on this CPU. They must not use instructions of AVX512-BF16.
inline bool runs_fp32() {
#ifdef MEGACORE_HAS_AVX512
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("fma");
#else
    return false;
#endif
}

// Return true if bf16 kernels run on this CPU.
inline bool runs_bf16() {
#ifdef MEGACORE_HAS_AVX512
    return runs_fp32() && __builtin_cpu_supports("avx512bf16");
#else
    return false;
#endif
}

using bf16 = std::uint16_t;

// Return the number of this thread in its team, from 0.
inline int thread_number() {
#ifdef _OPENMP
    return omp_get_thread_num();
#else
    return 0;
#endif
}

}  // namespace megacore

#ifdef MEGACORE_HAS_AVX512
MEGACORE_AVX512_BEGIN
namespace megacore {

inline __mmask16 first_lanes(std::ptrdiff_t count) {
    return count >= 16 ? static_cast<__mmask16>(0xFFFF)
                       : static_cast<__mmask16>((1u << count) - 1u);
}

// Load 16 elements of either type as floats; masked lanes are zero.
inline __m512 load(const float* from) { return _mm512_loadu_ps(from); }
inline __m512 load(const bf16* from) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}
inline __m512 load(const float* from, __mmask16 lanes) {
    return _mm512_maskz_loadu_ps(lanes, from);
}
inline __m512 load(const bf16* from, __mmask16 lanes) {
    const __m256i raw = _mm256_maskz_loadu_epi16(lanes, from);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(raw), 16));
}

// Round to nearest, ties to even, with the instruction of AVX512-BF16 (denormals become zero).
inline __m256i round_bf16(__m512 x) { return reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)); }

inline void store(float* to, __m512 x) { _mm512_storeu_ps(to, x); }
inline void store(bf16* to, __m512 x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), round_bf16(x));
}
inline void store(float* to, __m512 x, __mmask16 lanes) { _mm512_mask_storeu_ps(to, lanes, x); }
inline void store(bf16* to, __m512 x, __mmask16 lanes) {
    _mm256_mask_storeu_epi16(to, lanes, round_bf16(x));
}

// Compute e^x = 2^y with y = x log2(e): the integer part of y becomes the exponent, the fraction
// goes into a polynomial of degree 5 (minimax on [0, 1), 1 at 0). The relative error is below 3e-7
// for |x| < 4, and below |x| 6e-8 beyond. -inf gives 0, inf stays infinite, NaN stays NaN.
inline __m512 exp(__m512 x) {
    const __m512 y = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f));
    const __m512 f = _mm512_reduce_ps(y, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 p = _mm512_set1_ps(0.0018671300495f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0090170307085f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.0557999126613f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.2401644438505f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(0.6931512951851f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, y);
}

inline float sum(__m512 x) { return _mm512_reduce_add_ps(x); }
inline float maximum(__m512 x) { return _mm512_reduce_max_ps(x); }

}  // namespace megacore
MEGACORE_AVX512_END
#endif
