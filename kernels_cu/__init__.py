"""CUDA C++ sources, shipped as data; the folder's README.md gives the reading order."""
