"""Private training at one site: per-record gradients, clipped sums and noise on a grid (DP-SGD, Abadi et al. 2016).

Importing this package imports torch; opacus is imported only where a model needs it.
"""

from client.training.private.losses import Loss, Precision, per_record
from client.training.private.mechanism import Mechanism, Terms
from client.training.private.plan import MEMORY, EngineName, Plan, choose
from client.training.private.probe import Example
from client.training.private.repair import Problem, problems, repaired, require_private
from client.training.private.step import PrivateSteps

__all__ = [
    "MEMORY",
    "EngineName",
    "Example",
    "Loss",
    "Mechanism",
    "Plan",
    "Precision",
    "PrivateSteps",
    "Problem",
    "Terms",
    "choose",
    "per_record",
    "problems",
    "repaired",
    "require_private",
]
