"""Identity, secure aggregation and differential privacy: pure, no socket, clock, thread or file."""
