"""The tiled kernels for the CPU, twins of those in `kernels_cu/`, and what launches them."""
