"""The back ends, which compute calls: one object for NumPy arrays and one for CuPy arrays."""
