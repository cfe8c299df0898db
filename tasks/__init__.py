"""What is learned: data contract, statistics, model inputs, loss and metrics. Installed code, never sent."""
