"""What computes calls: an object for NumPy arrays and one for CuPy arrays, with equal methods."""
