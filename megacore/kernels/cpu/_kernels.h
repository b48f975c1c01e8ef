// Shared declarations of the compiled module's files. Each file adds the functions of one
// operation; names are unique in the module.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <stdexcept>

namespace py = pybind11;

// Address of a tensor's first element; 0 means no tensor.
using Address = std::uintptr_t;

// Releases Python's global interpreter lock while a kernel computes.
using Unlocked = py::call_guard<py::gil_scoped_release>;

[[noreturn]] inline void no_kernels() { throw std::runtime_error("this machine has no kernels"); }

void add_activation(py::module_& module);
void add_adam(py::module_& module);
void add_attention(py::module_& module);
void add_cross_entropy(py::module_& module);
void add_draw(py::module_& module);
void add_few_rows(py::module_& module);
void add_norm(py::module_& module);
void add_residual(py::module_& module);
void add_rope(py::module_& module);
void add_softmax(py::module_& module);
void add_weight_grad(py::module_& module);
