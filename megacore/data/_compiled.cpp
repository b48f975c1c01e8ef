// Python module with the compiled parts of index maps and samples.
#include <pybind11/pybind11.h>

namespace py = pybind11;

// Each function is defined in the file of its name.
void add_gather(py::module_& module);
void add_index_helpers(py::module_& module);
void add_sentence_samples(py::module_& module);

PYBIND11_MODULE(_compiled, module) {
    module.doc() =
        "Compiled parts of the index maps, of reading samples, and of samples of whole sentences.";
    add_gather(module);
    add_index_helpers(module);
    add_sentence_samples(module);
}
