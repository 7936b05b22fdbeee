"""How many tokens to sample between two looks of the host at what was sampled."""

import math

_FEWEST = 8
_COST = 2.0  # of a look, in steps, as long as none was measured
_MOST_COST = 16.0  # beyond that something was compiled or captured
_COST_MEMORY, _LENGTH_MEMORY = 16, 256


class Pace:
    """A look costs the time of some steps, and a sequence that ends idles for half of those between two looks.

    With n steps between looks, sequences of L tokens and looks that cost c steps, the part lost is c ÷ n + n ÷ 2L: the
    least where n = √(2 · L · c). Both L and c are what was seen lately.
    """

    def __init__(self, length: float, measures: bool) -> None:
        """`length` is what sequences are taken for until some have ended; without `measures`, c is taken for known."""
        self._length, self._measures = length, measures
        self._num_ended, self._cost = 0, _COST

    def ended(self, length: int) -> None:
        """A sequence of so many sampled tokens has come to its end."""
        self._num_ended += 1
        self._length += (length - self._length) / min(self._num_ended, _LENGTH_MEMORY)

    def looked(self, wall_s: float, device_s: float, num_steps: int) -> None:
        """What the decoding of so many steps took, and how much of it the device needed; what rows that come and go
        cost besides is the same however often one looks."""
        if self._measures and device_s > 0:
            cost = max(0.0, wall_s - device_s) / device_s * num_steps
            self._cost += (min(cost, _MOST_COST) - self._cost) / _COST_MEMORY

    def num_steps(self, most: int) -> int:
        return min(most, max(_FEWEST, round(math.sqrt(2 * self._length * self._cost))))
