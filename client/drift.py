"""How far a model has moved since an earlier one: what a site may limit, for a model can be made to ask a question."""

from pathlib import Path

import numpy as np

from federation.errors import RemoteProtocolError, StorageError, WhoActs
from federation.vector import from_safetensors

__all__ = ["farthest"]


def farthest(model: Path, earlier: Path) -> float:
    """The largest difference of a weight between two models.

    Raises:
        RemoteProtocolError: One is no model of finite weights, or they are not of one layout.
        StorageError: One of them cannot be read.
    """
    try:
        (layout, now), (before_layout, before) = (from_safetensors(each.read_bytes()) for each in (model, earlier))
    except OSError as refused:
        raise StorageError(
            f"cannot compare a model with an earlier one: {refused.strerror}",
            fix="leave the site's work folder as it is while a job runs",
            who=WhoActs.SITE,
        ) from refused
    if layout != before_layout:
        raise RemoteProtocolError("two models of one job have other tensors", fix="submit the job anew")
    return float(np.max(np.abs(now.astype(np.float64) - before), initial=0.0))
