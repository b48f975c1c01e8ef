"""Kernels in C++ for CPUs with AVX-512, chosen when the program runs.

Other CPUs compute with plain torch.
"""
