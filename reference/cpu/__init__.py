"""The tiled kernels for the CPU, twins of those in `kernels_cu/`, and the code to launch them."""
