import numpy as np

from strategies.moments import adaptive


def test_the_moments_start_as_the_paper_says() -> None:
    """M starts at 0 and v at tau^2, the least that Algorithm 2 allows."""
    strategy = adaptive(eta=0.1, beta1=0.9, tau=0.5, second_moment=lambda v, _: v)
    start = strategy.initial(3)
    assert {name: vector.tolist() for name, vector in start.items()} == {
        "first_moment": [0.0] * 3,
        "second_moment": [0.25] * 3,
    }


def test_the_second_moment_is_the_strategys_own() -> None:
    """The line that is handed in gets v and the squared update, and its answer divides the step."""
    seen = []

    def second_moment(v: np.ndarray, squared: np.ndarray) -> np.ndarray:
        seen.append((v.tolist(), squared.tolist()))
        return np.full(2, 9.0)

    strategy = adaptive(eta=2.0, beta1=0.0, tau=1.0, second_moment=second_moment)
    moved, state = strategy.step(np.zeros(2, np.float32), np.array([2.0, -3.0]), strategy.initial(2))
    assert seen == [([1.0, 1.0], [4.0, 9.0])]
    assert moved.tolist() == [1.0, -1.5]
    assert state["second_moment"].tolist() == [9.0, 9.0]
