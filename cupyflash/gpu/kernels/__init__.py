"""Which kernel serves a call on a GPU, and with which tiles."""
