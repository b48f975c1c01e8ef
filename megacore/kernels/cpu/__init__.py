"""C++ kernels for CPUs with AVX-512, which is detected at run time.

Other CPUs compute with plain torch.
"""
