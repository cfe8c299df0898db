"""Protocols by which only a cohort's sum is seen; one folder each."""
