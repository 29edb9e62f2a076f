"""The papers' family: every algorithm on the way from safe softmax to FlashAttention-3.

One module per algorithm, in plain NumPy, to be read beside its paper; README.md in this folder is
the table. Each works on one head (queries (Lq, D), keys (Lk, D), values (Lk, Dv)), and reaches its
arrays through `hbm.Memory`, which counts what is read from and written to HBM and what is on chip.
"""
