"""Registers the fuzz tests' profile before pytest's `--hypothesis-profile` asks for it; it changes no other test."""

from tests.fuzz import profiles

__all__ = ["profiles"]
