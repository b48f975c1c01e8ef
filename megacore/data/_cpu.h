// Vector instructions: compiled for all x86-64 processors and selected at run time.
#pragma once

#define MEGACORE_INLINE inline __attribute__((always_inline))

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define MEGACORE_HAS_AVX512
#define MEGACORE_AVX512 __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl")))
#endif

namespace megacore {

// Returns true if this processor can run functions marked MEGACORE_AVX512.
inline bool runs_avx512() {
#ifdef MEGACORE_HAS_AVX512
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
#else
    return false;
#endif
}

}  // namespace megacore
