"""Attention by pieces: some queries and some keys at a time, as one call of the back ends each."""
