"""What calls cost: the papers' counts, what a call would run, and pictures of masks' tiles.

Users import ``cupyflash.analysis``, ``cupyflash.figures``, `explain` and `explain_cached`.
"""
