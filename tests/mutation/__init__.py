"""Mutation testing of the CUDA sources: see tests/tools/mutants.py."""
