"""The number of decode steps between two host synchronisations."""

import math

_FEWEST = 8
_COST = 2.0  # of a synchronisation, in steps, until one was measured
_MOST_COST = 16.0  # beyond that something was compiled or captured
_COST_MEMORY, _LENGTH_MEMORY = 16, 256


class StepInterval:
    """Balances the cost of a synchronisation against the steps that finished sequences idle until the next one.

    With n steps in between, sequences of L tokens and synchronisations that cost c steps, the part lost is
    c ÷ n + n ÷ 2L: the least where n = √(2 · L · c). Both L and c are running means.
    """

    def __init__(self, length: float, measures: bool) -> None:
        """`length` is the assumed L until sequences have ended; without `measures`, c stays the assumed one."""
        self._length, self._measures = length, measures
        self._num_ended, self._cost = 0, _COST

    def ended(self, length: int) -> None:
        """Record the length of a sequence that ended, in sampled tokens."""
        self._num_ended += 1
        self._length += (length - self._length) / min(self._num_ended, _LENGTH_MEMORY)

    def decoded(self, wall_s: float, device_s: float, num_steps: int) -> None:
        """Measure the cost of a synchronisation: the part of an interval in which the device was idle."""
        if self._measures and device_s > 0:
            cost = max(0.0, wall_s - device_s) / device_s * num_steps
            self._cost += (min(cost, _MOST_COST) - self._cost) / _COST_MEMORY

    def num_steps(self, most: int) -> int:
        return min(most, max(_FEWEST, round(math.sqrt(2 * self._length * self._cost))))
