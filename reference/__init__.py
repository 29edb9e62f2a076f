"""The specification and the CPU twins of the kernels.

`naive` materialises every score in float64 and is what all other code is compared with. The other
modules are the tiled algorithm in Numba, one module per CUDA kernel, with the same names and the
same numbered steps. This package imports NumPy and Numba, and never `cupyflash`.
"""
