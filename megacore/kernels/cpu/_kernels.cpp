// What the C++ kernels need of the machine.
#include <pybind11/pybind11.h>

#include "_vector.h"

PYBIND11_MODULE(_support, module) {
    module.doc() = "Which of the kernels run on this machine.";
    module.def("runs_fp32", &megacore::runs_fp32);
    module.def("runs_bf16", &megacore::runs_bf16);
}
