"""Mutation testing of the CUDA sources: see tests/mutants.py."""
