"""Arrays of NumPy, CuPy and others: how they come in, where they live, what is made of them."""
