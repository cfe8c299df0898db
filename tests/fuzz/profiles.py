"""How far the fuzz tests look: a little in every test run, a lot under the profile `fuzz`, which `make fuzz` loads."""

from datetime import timedelta
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase, ReadOnlyDatabase

__all__ = ["CORPUS", "FOUND", "PROFILE", "budget", "fuzzing"]

PROFILE = "fuzz"
CORPUS = Path(__file__).parent / "corpus"
"""What the repository keeps of earlier runs: inputs by what they led to, and hypothesis' own database."""

FOUND = "hypothesis"
"""The folder of hypothesis' database in it: what failed."""

_LONGER = 5
"""Examples of a test in one pass of `make fuzz`, for each one in every test run."""
_STUCK = timedelta(minutes=1)
"""No input, however hostile, keeps a test busy for so long; checked under `make fuzz` alone, where nothing else is."""

_FOUND = DirectoryBasedExampleDatabase(CORPUS / FOUND)
_QUICK = settings(
    deadline=None,
    print_blob=True,
    database=ReadOnlyDatabase(_FOUND),
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
)
settings.register_profile(PROFILE, settings(_QUICK, database=_FOUND, deadline=_STUCK))


def fuzzing() -> bool:
    """Whether this run was asked to look far, and to keep what it finds."""
    return settings.get_current_profile_name() == PROFILE


def budget(examples: int, steps: int = 30) -> settings:
    """So many examples (of so many steps, for a state machine) in a test run, and many more under `make fuzz`."""
    if not fuzzing():
        return settings(_QUICK, max_examples=examples, stateful_step_count=steps)
    return settings(settings.get_profile(PROFILE), max_examples=examples * _LONGER, stateful_step_count=steps)
