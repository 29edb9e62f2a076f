"""The papers' algorithms, from safe softmax to FlashAttention-3.

Each algorithm has its own module, in plain NumPy, to read together with its paper; README.md in
this folder lists them. Each works on one head (queries (Lq, D), keys (Lk, D), values (Lk, Dv)), and
reaches its arrays through `hbm.Memory`, which counts what is read from and written to HBM and what
is on chip.
"""
