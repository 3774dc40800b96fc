"""Divisors, for the legal values that messages propose."""


def divisors(number: int) -> list[int]:
    """All divisors of a positive number, ascending; none of another."""
    if number < 1:
        return []
    small = [d for d in range(1, int(number**0.5) + 1) if number % d == 0]
    return small + [number // d for d in reversed(small) if d * d != number]


def largest_divisor(number: int, at_most: int) -> int:
    """The largest divisor of a positive number that is at most `at_most`; 1 if that is below 1."""
    return max((d for d in divisors(number) if d <= at_most), default=1)
