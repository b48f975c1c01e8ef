// The compiled module: the functions of every operation, and checks of the CPU.
#include "_kernels.h"

#include "_vector.h"

PYBIND11_MODULE(_kernels, module) {
    module.doc() =
        "Kernels for CPUs with AVX-512; arguments are addresses, sizes and strides in elements.";
    module.def("runs_fp32", &megacore::runs_fp32);
    module.def("runs_bf16", &megacore::runs_bf16);
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
