"""Arrays of NumPy, CuPy and others: how they are read, where they are, how new ones are made."""
