"""tau from an engine's load: what one more token to verify costs, as a share of a request's part of a step.

Costs are told, or estimated from how long steps take. Drafting itself knows nothing of this.
"""

from __future__ import annotations

from draftd.drafter.errors import InvalidArgument

LEAST_TAU = 0.01
"""Where verifying seems to cost nothing: drafts that are never right still take room."""
_FORGET = 0.98
"""Weight of all earlier steps against the next one: about 50 steps count."""
_LEAST_STEPS = 8


class Load:
    """The cost of a step and of each token that it verifies.

    A step of r requests with d drafted tokens verifies r + d, and is taken to cost `step + slot x (r + d)`; both are told, or fitted
    by least squares to the last steps.
    """

    def __init__(self) -> None:
        self._costs: tuple[float, float] | None = None
        self._sums = [0.0] * 5
        self._steps = 0

    def tell(self, slot: float, step: float) -> None:
        """Sets the cost of a verified token and that of a step beside them, in any one unit.

        Raises:
            InvalidArgument: A cost is negative, or both are 0.
        """
        if not (slot >= 0 and step >= 0 and slot + step > 0):
            raise InvalidArgument(f"slot is {slot} and step is {step}; costs must be at least 0, and one of them above", "slot")
        self._costs = (slot, step)

    def observe(self, requests: int, drafted: int, seconds: float) -> None:
        """Notes how long a step took that verified `drafted` tokens of `requests` requests."""
        slots = float(requests + drafted)
        self._steps += 1
        for i, value in enumerate((1.0, slots, slots * slots, seconds, slots * seconds)):
            self._sums[i] = _FORGET * self._sums[i] + value

    def tau(self, requests: int) -> float | None:
        """The tau for a step of so many requests, in [LEAST_TAU, 1]; None while the costs are not known. 1 drafts nothing."""
        costs = self._costs or self._fitted()
        if costs is None:
            return None
        slot, step = costs
        return min(1.0, max(LEAST_TAU, slot * requests / (step + slot * requests)))

    def _fitted(self) -> tuple[float, float] | None:
        n, x, xx, y, xy = self._sums
        spread = n * xx - x * x
        # Steps that all verified alike tell nothing of what one more token costs.
        if self._steps < _LEAST_STEPS or spread <= 1e-6 * n * xx:
            return None
        slot = max(0.0, (n * xy - x * y) / spread)
        step = (y - slot * x) / n
        return (slot, step) if step > 0 else (y / x, 0.0)
