"""A Flower App, as its own tools want it: `flwr run` packs this folder."""
