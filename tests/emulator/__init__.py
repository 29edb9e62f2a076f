"""The CUDA sources on a CPU: see README.md."""
