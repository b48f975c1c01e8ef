"""Kernels in C++ for CPUs with AVX-512, chosen when the program runs; other CPUs compute with plain torch."""
