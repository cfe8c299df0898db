"""Trained models at work: prediction from a model package."""
