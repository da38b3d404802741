"""Rate limits: token buckets for requests and for corpus tokens a second."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from draftd.drafter.errors import ResourceExhausted

RATE_LIMIT = "rate limit: "
"""Begins every message of a call that came too fast: clients wait and try again."""

_BURST_S = 1.0
_ROUNDING = 1e-6


class RateExceeded(ResourceExhausted):
    """The caller is over its rate."""


class Bucket:
    """A token bucket that holds one second of its rate.

    A call that needs more than the bucket can hold is let through when it is full, and leaves a debt: it is not refused for ever, but
    what follows waits for it.

    Args:
        rate: What flows in a second; above 0.
    """

    def __init__(self, rate: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.rate = rate
        self._clock = clock
        self._capacity = max(1.0, rate * _BURST_S)
        self._level = self._capacity
        self._at = clock()

    def wait_s(self, amount: float) -> float:
        """Seconds until a call that needs so much is let through; 0 if it is now."""
        now = self._clock()
        self._level = min(self._capacity, self._level + (now - self._at) * self.rate)
        self._at = now
        # Sums of what flowed in are a rounding error away from whole numbers.
        return max(0.0, min(amount, self._capacity) - self._level - _ROUNDING) / self.rate

    def take(self, amount: float) -> None:
        """Takes from the bucket, below empty if need be."""
        self._level -= amount


@dataclass(frozen=True, slots=True)
class Rates:
    """The limits of one principal; None where there is none."""

    requests: Bucket | None = None
    tokens: Bucket | None = None

    @staticmethod
    def of(requests_per_s: float, tokens_per_s: float) -> "Rates":
        """Limits; 0 is none."""
        return Rates(Bucket(requests_per_s) if requests_per_s else None, Bucket(tokens_per_s) if tokens_per_s else None)

    def same_as(self, other: "Rates") -> bool:
        """The limits are equal, however much of them is used."""
        return _rate(self.requests) == _rate(other.requests) and _rate(self.tokens) == _rate(other.tokens)

    def charge(self, tokens: int) -> None:
        """Lets one call with so many corpus tokens through.

        Raises:
            RateExceeded: It comes too early; nothing is taken.
        """
        for bucket, unit, amount in ((self.requests, "requests", 1), (self.tokens, "tokens", tokens)):
            if bucket is not None and (wait_s := bucket.wait_s(amount)):
                raise RateExceeded(f"{RATE_LIMIT}{bucket.rate:g} {unit} a second; try again in {1000 * wait_s:.0f} ms")
        if self.requests is not None:
            self.requests.take(1)
        if self.tokens is not None:
            self.tokens.take(tokens)


def _rate(bucket: Bucket | None) -> float:
    return bucket.rate if bucket else 0.0
