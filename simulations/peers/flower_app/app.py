"""FedAvg over prepared vectors: Flower's own strategy and messages, and no training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid

__all__ = ["client", "server"]


def serve(grid: Grid, context: Context) -> None:
    """Runs the rounds; each end is told by the strategy's own hook, which otherwise would evaluate."""
    settings = context.run_config
    sites, ends = int(settings["sites"]), Path(str(settings["ends"]))

    def tell(server_round: int, _: ArrayRecord) -> None:
        with ends.open("a") as file:
            file.write(f"{server_round}\n")

    strategy = FedAvg(fraction_evaluate=0.0, min_train_nodes=sites, min_available_nodes=sites)
    initial = ArrayRecord([np.load(str(settings["model"]))])
    strategy.start(grid, initial, num_rounds=int(settings["rounds"]), evaluate_fn=tell)


def train(message: Message, context: Context) -> Message:
    """The node's prepared vector; its first value is the round, so that no two rounds send the same content."""
    values = np.load(str(context.node_config["vector"]))
    values[0] = message.content["config"]["server-round"]
    content = RecordDict({"arrays": ArrayRecord([values]), "metrics": MetricRecord({"num-examples": 100})})
    return Message(content, reply_to=message)


server = ServerApp()
server.main()(serve)  # called, not put in front with @: where flwr is not installed, that would leave `serve` untyped
client = ClientApp()
client.train()(train)
