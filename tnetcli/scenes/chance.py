"""Chance by number: what is drawn for a place can be asked for again, and nothing is kept."""

import numpy as np
from numpy.typing import NDArray

ROUNDS = 6  # of the cipher that shuffles


def scramble(key: int, numbers: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 64 random bits for each number; the same for the same key (SplitMix64)."""
    mixed = numbers * np.uint64(0x9E3779B97F4A7C15) + np.uint64(key % 2**64)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


def below(bits: NDArray[np.uint64], shift: int, limit: int) -> NDArray[np.int64]:
    """Turn 16 of the random bits, from `shift` on, into numbers of 0 to `limit` - 1."""
    some = (bits >> np.uint64(shift)) & np.uint64(0xFFFF)
    return ((some * np.uint64(limit)) >> np.uint64(16)).astype(np.int64)


class Shuffle:
    """An order of the numbers below `count`, of which no list is kept (a Feistel network)."""

    def __init__(self, count: int, key: int) -> None:
        self.count, self.key = count, key
        self._bits = max((max(count - 1, 1).bit_length() + 1) // 2, 1)

    def place(self, number: NDArray[np.uint64]) -> NDArray[np.uint64]:
        """Return at which place each number stands."""
        return self._walk(number, range(ROUNDS))

    def at(self, place: int) -> int:
        """Return the number that stands at one place."""
        return int(self._walk(np.array([place], np.uint64), range(ROUNDS - 1, -1, -1))[0])

    def _walk(self, number: NDArray[np.uint64], rounds: range) -> NDArray[np.uint64]:
        # The network shuffles a power of four: whoever lands above `count` walks on.
        found = self._once(number, rounds)
        while (far := found >= self.count).any():
            found[far] = self._once(found[far], rounds)
        return found

    def _once(self, number: NDArray[np.uint64], rounds: range) -> NDArray[np.uint64]:
        half, mask = np.uint64(self._bits), np.uint64(2**self._bits - 1)
        left, right = number >> half, number & mask
        if rounds.step < 0:
            left, right = right, left
        for each in rounds:
            left, right = right, left ^ (scramble(self.key + 7919 * each, right) & mask)
        if rounds.step < 0:
            left, right = right, left
        return (left << half) | right
