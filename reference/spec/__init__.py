"""The specification: attention by its formulas, which every kernel is compared with."""
