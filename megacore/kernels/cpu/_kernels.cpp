// The compiled module: the functions of every operation, and checks of the CPU.
#include "_kernels.h"

#include <cstring>

#include "_vector.h"

#ifdef MEGACORE_HAS_AVX512
#include <cpuid.h>
#endif

namespace {

// Return the family of AMD's CPU (25: Zen 3 and 4, 26: Zen 5), 0 on other makers' CPUs. Fields of
// CPUID are those of AMD's manual (AMD64 Architecture Programmer's Manual, volume 3, appendix E).
int amd_family() {
#ifdef MEGACORE_HAS_AVX512
    unsigned int eax, ebx, ecx, edx;
    if (!__get_cpuid(0, &eax, &ebx, &ecx, &edx)) return 0;
    const unsigned int vendor[] = {ebx, edx, ecx};
    if (std::memcmp(vendor, "AuthenticAMD", sizeof(vendor)) != 0) return 0;
    if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return 0;
    const unsigned int base = eax >> 8 & 0xF, extended = eax >> 20 & 0xFF;
    return static_cast<int>(base == 0xF ? base + extended : base);
#else
    return 0;
#endif
}

}  // namespace

PYBIND11_MODULE(_kernels, module) {
    module.doc() =
        "Kernels for CPUs with AVX-512; arguments are addresses, sizes and strides in elements.";
    module.def("runs_fp32", &megacore::runs_fp32);
    module.def("runs_bf16", &megacore::runs_bf16);
    module.def("amd_family", &amd_family);
    add_activation(module);
    add_adam(module);
    add_attention(module);
    add_cross_entropy(module);
    add_draw(module);
    add_few_rows(module);
    add_norm(module);
    add_residual(module);
    add_rope(module);
    add_softmax(module);
    add_weight_grad(module);
}
