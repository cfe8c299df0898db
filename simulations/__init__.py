"""Simulations and side-by-side benchmarks."""
