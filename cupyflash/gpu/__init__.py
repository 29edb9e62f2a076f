"""Calls on CuPy arrays: which kernels, with which parameters, and how they are launched."""
