"""The sentences that generators and measures share."""

import numpy as np


def integer(name, value, low=None, high=None):
    """Returns an argument as an int, or raises ValueError."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ValueError(f"`{name}` must be an integer; got {value!r}.")
    if (low is not None and value < low) or (high is not None and value > high):
        limits = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ValueError(f"`{name}` must be {limits}; got {value}.")
    return int(value)


def share(name, value):
    """Returns an argument that is a number from 0 to 1, or raises ValueError."""
    if not 0 <= value <= 1:
        raise ValueError(f"`{name}` must be from 0 to 1; got {value}.")
    return value
