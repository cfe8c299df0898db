"""The commands of `parley`, one file for each noun."""
