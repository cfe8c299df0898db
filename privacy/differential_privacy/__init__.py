"""Differential privacy: what a site adds to its contribution, how far that protects, and what has been spent."""
