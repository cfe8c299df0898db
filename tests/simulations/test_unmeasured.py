import pytest

from federation.errors import ConfigurationError, ParleyError, UnreachableError, WhoActs
from simulations import scale
from simulations.peers import rounds, secure_aggregation
from simulations.unmeasured import unmeasured


@pytest.mark.parametrize(
    ("ended", "told", "status"),
    [
        (KeyboardInterrupt(), "interrupted\n", 130),
        (ConfigurationError("no size", fix="name one", who=WhoActs.YOU), "refused: no size. To fix (you): name one", 2),
        (UnreachableError("a process ended"), "refused: a process ended", 1),
    ],
)
def test_a_benchmark_without_figures_says_why(
    ended: KeyboardInterrupt | ParleyError, told: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ctrl-C, a wrong command line and a failure have statuses of their own, and nothing stands among the figures."""
    assert unmeasured(ended) == status
    said = capsys.readouterr()
    assert (said.err.rstrip("\n"), said.out) == (told.rstrip("\n"), "")


def test_a_benchmark_of_processes_says_that_they_have_ended(capsys: pytest.CaptureFixture[str]) -> None:
    """Whoever interrupts it need not look for them."""
    assert unmeasured(KeyboardInterrupt(), processes=True) == 130
    assert capsys.readouterr().err == "interrupted; all processes have ended\n"


@pytest.mark.parametrize(
    ("module", "step", "told"),
    [
        (scale, "_benchmarks", "interrupted; all processes have ended\n"),
        (rounds, "_measured", "interrupted; all processes have ended\n"),
        (secure_aggregation, "_sizes", "interrupted\n"),
    ],
)
def test_benchmarks_end_so_at_ctrl_c(
    module: object, step: str, told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever they are at: no traceback, and the shell's own status."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(module, step, interrupted)
    assert module.main([]) == 130  # type: ignore[attr-defined] # each has one
    assert capsys.readouterr().err == told
