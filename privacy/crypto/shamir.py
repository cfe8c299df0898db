"""Shamir's sharing of 32 secret bytes over a prime field, and reconstruction in spite of wrong shares."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

from federation.errors import LocalProtocolError, RemoteProtocolError

__all__ = ["PRIME", "SECRET", "SHARE", "number", "reconstruct", "split"]

PRIME = 2**256 + 297
"""The least prime above 2^256: every 32 bytes are a secret."""

SECRET = 32
"""Bytes of a secret."""

SHARE = 33
"""Bytes of a share, big endian."""

_LARGEST = 1 << 8 * SECRET
_Polynomial = list[int]
"""Coefficients, the constant first, the last not zero; the zero polynomial is empty."""


def split(secret: bytes, threshold: int, indices: Sequence[int], randbelow: Callable[[int], int]) -> dict[int, bytes]:
    """Shares of `secret` by index: any `threshold` of them give it, fewer say nothing of it (Shamir 1979).

    The share of index i is f(i + 1), f a polynomial of degree `threshold` - 1 over GF(`PRIME`) with f(0) the secret and
    its other coefficients uniform, drawn by `randbelow` (`secrets.randbelow`, but for tests), the lowest power's first.

    Raises:
        LocalProtocolError: The secret has not 32 bytes, the threshold is not 1..number of indices, or an index is
            negative or there twice.
    """
    if len(secret) != SECRET:
        raise LocalProtocolError(f"{SECRET} bytes are shared, not {len(secret)}")
    if len(set(indices)) != len(indices) or any(index < 0 for index in indices):
        raise LocalProtocolError("each index that gets a share must be there once, and not be negative")
    if not 1 <= threshold <= len(indices):
        raise LocalProtocolError(f"{len(indices)} shares cannot have the threshold {threshold}")
    polynomial = [int.from_bytes(secret, "big"), *(randbelow(PRIME) for _ in range(threshold - 1))]
    return {index: _value(polynomial, index + 1).to_bytes(SHARE, "big") for index in indices}


def number(share: bytes) -> int:
    """The element of the field that a share is.

    Raises:
        RemoteProtocolError: It has not 33 bytes, or is not below `PRIME`.
    """
    value = int.from_bytes(share, "big")
    if len(share) != SHARE or value >= PRIME:
        raise RemoteProtocolError(
            f"{len(share)} bytes are no share of a secret", fix=f"send {SHARE} bytes, big endian, below 2^256 + 297"
        )
    return value


def reconstruct(
    shares: Mapping[int, bytes], threshold: int, accept: Callable[[bytes], bool]
) -> tuple[bytes, frozenset[int]]:
    """The secret of which these are shares by index, and the indices whose shares are wrong.

    Succeeds whenever at most floor((m - `threshold`) / 2) of the m shares are wrong, whichever they are, and then names
    exactly those; takes O(m^2) multiplications in the field. The decoder is Gao's (A new algorithm for decoding
    Reed-Solomon codes, 2003): extended Euclid of the polynomial through all shares and the one that is zero at all of
    them, halted halfway. `accept` says whether a secret is the committed one.

    Raises:
        RemoteProtocolError: A share is not an element of the field, there are fewer than `threshold`, more are wrong
            than can be corrected, or the secret is not the committed one.
        LocalProtocolError: The threshold is below 1, or an index negative.
    """
    if threshold < 1 or any(index < 0 for index in shares):
        raise LocalProtocolError("a secret is reconstructed with a threshold of at least 1 and no negative index")
    if len(shares) < threshold:
        raise RemoteProtocolError(
            f"{len(shares)} shares are fewer than the {threshold} that give the secret", fix="ask more holders"
        )
    points = {index + 1: number(share) for index, share in shares.items()}
    polynomial = _decoded(points, threshold)
    secret = polynomial[0] if polynomial else 0
    if polynomial is None or secret >= _LARGEST or not accept(secret.to_bytes(SECRET, "big")):
        raise RemoteProtocolError(
            f"{len(shares)} shares with threshold {threshold} do not give the committed secret: too many are wrong, "
            "or their dealer shared another",
            fix="ask more holders, or burn the round",
        )
    wrong = frozenset(x - 1 for x, y in points.items() if _value(polynomial, x) != y)
    return secret.to_bytes(SECRET, "big"), wrong


def _decoded(points: Mapping[int, int], threshold: int) -> _Polynomial | None:
    """The polynomial of degree below `threshold` near enough to the points, if there is one.

    Without the last check a polynomial of another degree may have the secret at 0, and call right shares wrong.
    """
    vanishing, through = _newton(points)
    bound = (len(points) + threshold + 1) // 2
    previous, remainder = vanishing, through
    before, factor = _Polynomial(), [1]
    while len(remainder) > bound:
        quotient, rest = _divided(previous, remainder)
        previous, remainder = remainder, rest
        before, factor = factor, _plus(before, _times(quotient, factor), -1)
    polynomial, rest = _divided(remainder, factor)
    return polynomial if not rest and len(polynomial) <= threshold else None


def _newton(points: Mapping[int, int]) -> tuple[_Polynomial, _Polynomial]:
    """The monic polynomial that is zero at all x, and the polynomial of least degree through all points."""
    vanishing, through = [1], _Polynomial()
    for x, y in points.items():
        step = (y - _value(through, x)) * pow(_value(vanishing, x), -1, PRIME) % PRIME
        through = _plus(through, vanishing, step)
        vanishing = _plus([0, *vanishing], vanishing, -x)
    return vanishing, through


def _value(polynomial: Sequence[int], x: int) -> int:
    """The polynomial's value at x, by Horner's rule; x is so small that one division at the end is the least work."""
    value = 0
    for coefficient in reversed(polynomial):
        value = value * x + coefficient
    return value % PRIME


def _plus(left: _Polynomial, right: _Polynomial, factor: int) -> _Polynomial:
    """Left + factor * right."""
    return _trimmed((a + factor * b) % PRIME for a, b in zip_longest(left, right, fillvalue=0))


def _times(left: _Polynomial, right: _Polynomial) -> _Polynomial:
    """Left * right."""
    product = [0] * max(0, len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            product[i + j] += a * b
    return _trimmed(coefficient % PRIME for coefficient in product)


def _divided(dividend: _Polynomial, divisor: _Polynomial) -> tuple[_Polynomial, _Polynomial]:
    """Quotient and remainder; the divisor is not zero."""
    rest = list(dividend)
    inverse = pow(divisor[-1], -1, PRIME)
    quotient = [0] * max(0, len(dividend) - len(divisor) + 1)
    for shift in reversed(range(len(quotient))):
        factor = rest[shift + len(divisor) - 1] * inverse % PRIME
        quotient[shift] = factor
        for position, coefficient in enumerate(divisor, shift):
            rest[position] = (rest[position] - factor * coefficient) % PRIME
    return _trimmed(quotient), _trimmed(rest)


def _trimmed(coefficients: Iterable[int]) -> _Polynomial:
    polynomial = list(coefficients)
    while polynomial and not polynomial[-1]:
        polynomial.pop()
    return polynomial
