"""A small model zoo; each file declares `Settings` and `build`, and imports torch only when it builds."""
