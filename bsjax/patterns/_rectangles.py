"""Masks of any height and width."""

import math

import numpy as np

from bsjax.patterns import _check

# Each tries a swap for every block. A 2048 x 2048 mask is as clustered as one drawn block by block after 2 rounds at
# density 0.03, and after 8 at 0.25.
_ROUNDS = 16


def dense(num_rows, num_cols):
    """Makes the mask of a matrix that stores every block: bool `[num_rows, num_cols]`.

    Example:
      >>> from bsjax import patterns
      >>> bool(patterns.dense(3, 5).all())
      True
    """
    return np.ones(_check_sides(num_rows, num_cols), bool)


def random(num_rows, num_cols, density, *, seed, diagonal=True):
    """Makes a mask of blocks drawn one by one, each place as likely as any other.

    Args:
      num_rows: number of block rows.
      num_cols: number of block columns.
      density: share of the blocks to store, from 0 to 1, rounded to a whole number of them: masks of one density fit
        one compiled program.
      seed: an integer, 0 or more.
      diagonal: whether the diagonal of a square mask is among the blocks. A rectangular one has none.

    Returns:
      Bool `[num_rows, num_cols]`.

    Raises:
      ValueError: if an argument is out of range, or `density` too low for the diagonal.

    References:
      Gray, Radford and Kingma, "GPU Kernels for Block-Sparse Weights", 2017.

    Example:
      >>> from bsjax import patterns
      >>> int(patterns.random(20, 30, 0.1, seed=0).sum())
      60
    """
    sides, count, fixed, rng = _check_random(num_rows, num_cols, density, seed, diagonal)
    mask = np.zeros(sides, bool)
    np.fill_diagonal(mask, fixed > 0)
    free = np.flatnonzero(~mask)
    mask.ravel()[rng.choice(free, count - fixed, replace=False)] = True
    return mask


def balanced_random(num_rows, num_cols, density, *, seed, diagonal=True):
    """Makes a random mask with the same number of blocks in every row, and in every column; or as even as can be.

    Row lengths differ by one at most, and so do column lengths.

    Args:
      num_rows: number of block rows.
      num_cols: number of block columns.
      density: share of the blocks to store, from 0 to 1, rounded to a whole number of them.
      seed: an integer, 0 or more.
      diagonal: whether the diagonal of a square mask is among the blocks. A rectangular one has none.

    Returns:
      Bool `[num_rows, num_cols]`.

    Raises:
      ValueError: if an argument is out of range, or `density` too low for the diagonal.

    References:
      Gray, Radford and Kingma, "GPU Kernels for Block-Sparse Weights", 2017.

    Example:
      >>> from bsjax import patterns
      >>> mask = patterns.balanced_random(8, 8, 3 / 8, seed=0)
      >>> patterns.row_lengths(mask).tolist(), patterns.column_lengths(mask).tolist()
      ([3, 3, 3, 3, 3, 3, 3, 3], [3, 3, 3, 3, 3, 3, 3, 3])
    """
    (num_rows, num_cols), count, fixed, rng = _check_random(num_rows, num_cols, density, seed, diagonal)
    mask = np.zeros((num_rows, num_cols), bool)
    if not mask.size:
        return mask
    # Down the diagonal again and again, round the edges: an even mask. A walk returns to where it began after
    # lcm(num_rows, num_cols) steps, and the next one starts a column further.
    step = np.arange(count)
    rows, cols = step % num_rows, (step + step // math.lcm(num_rows, num_cols)) % num_cols
    # Which lines get the blocks that do not divide evenly is random too; one order for both keeps the diagonal.
    row_order = rng.permutation(num_rows)
    col_order = row_order if fixed else rng.permutation(num_cols)
    rows, cols = row_order[rows], col_order[cols]
    mask[rows, cols] = True
    held = np.eye(num_rows, num_cols, dtype=bool) & bool(fixed)
    if 2 * count <= mask.size:
        return _shuffle(mask & ~held, held, rng) | held
    return ~_shuffle(~mask, held, rng)  # where most places are taken, it is the holes that have room to move


def banded(num_rows, num_cols, width):
    """Makes a mask of the blocks at most `width` off the diagonal, which runs from corner to corner.

    Args:
      num_rows: number of block rows.
      num_cols: number of block columns. Where it is not `num_rows`, the band is stretched: no row or column is empty.
      width: how many blocks on either side of the diagonal, 0 or more.

    Returns:
      Bool `[num_rows, num_cols]`.

    Raises:
      ValueError: if an argument is no integer or out of range.

    Example:
      >>> from bsjax import patterns
      >>> patterns.banded(4, 4, 1).astype(int).tolist()
      [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
      >>> patterns.banded(2, 4, 0).astype(int).tolist()
      [[1, 1, 0, 0], [0, 0, 1, 1]]
    """
    num_rows, num_cols = _check_sides(num_rows, num_cols)
    width = _check.integer("width", width, 0)
    # Centres of the blocks as shares of either side, in whole numbers: 2 * num_rows * num_cols is one side.
    across = (2 * np.arange(num_rows)[:, None] + 1) * num_cols - (2 * np.arange(num_cols)[None] + 1) * num_rows
    return np.abs(across) <= (2 * width + 1) * max(num_rows, num_cols)


def block_diagonal(num_rows, num_cols, num_groups, *, seed=None):
    """Makes the mask of a grouped layer: each group of outputs meets its own group of inputs and no other.

    Args:
      num_rows: number of block rows, inputs.
      num_cols: number of block columns, outputs.
      num_groups: number of groups, from 1 to the shorter side. Where it does not divide a side, sizes differ by one.
      seed: an integer, 0 or more, shuffles the block rows, so that what one layer keeps apart mixes in the next: the
        shuffle of channels between layers, at no cost. None leaves the groups on the diagonal.

    Returns:
      Bool `[num_rows, num_cols]`.

    Raises:
      ValueError: if an argument is no integer or out of range.

    References:
      Gray, Radford and Kingma, "GPU Kernels for Block-Sparse Weights", 2017.

    Example:
      >>> from bsjax import patterns
      >>> patterns.block_diagonal(4, 4, 2).astype(int).tolist()
      [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
      >>> patterns.row_lengths(patterns.block_diagonal(4, 4, 2, seed=0)).tolist()
      [2, 2, 2, 2]
    """
    num_rows, num_cols = _check_sides(num_rows, num_cols)
    num_groups = _check.integer("num_groups", num_groups, 1, min(num_rows, num_cols))
    row_group, col_group = (np.arange(side) * num_groups // side for side in (num_rows, num_cols))
    if seed is not None:
        row_group = np.random.default_rng(_check.integer("seed", seed, 0)).permutation(row_group)
    return row_group[:, None] == col_group[None]


def _check_sides(num_rows, num_cols):
    return _check.integer("num_rows", num_rows, 0), _check.integer("num_cols", num_cols, 0)


def _check_random(num_rows, num_cols, density, seed, diagonal):
    """Returns the sides, how many blocks to store, how many of them are the diagonal, and the generator."""
    num_rows, num_cols = _check_sides(num_rows, num_cols)
    count = round(_check.share("density", density) * num_rows * num_cols)
    fixed = num_rows if diagonal and num_rows == num_cols else 0
    if count < fixed:
        raise ValueError(
            f"`density` must be at least {1 / num_rows:.4g}, so that the {fixed} blocks of the diagonal fit in; "
            f"got {density}. Pass diagonal=False for fewer."
        )
    return (num_rows, num_cols), count, fixed, np.random.default_rng(_check.integer("seed", seed, 0))


def _shuffle(mask, held, rng):
    """Moves the blocks of `mask` about, but not onto `held`: two exchange their columns, so no line changes length."""
    rows, cols = np.nonzero(mask)
    taken = mask | held
    half = len(rows) // 2
    for _ in range(_ROUNDS):
        first, second = rng.permutation(len(rows))[: 2 * half].reshape(2, half)
        # Where the two would go: places that are free, and that no other pair of this round wants.
        to = np.stack([rows[first] * mask.shape[1] + cols[second], rows[second] * mask.shape[1] + cols[first]])
        _, wanted, times = np.unique(to, return_inverse=True, return_counts=True)
        good = ((times[wanted].reshape(to.shape) == 1) & ~taken.ravel()[to]).all(0)
        first, second = first[good], second[good]
        taken[rows[first], cols[first]] = taken[rows[second], cols[second]] = False
        cols[first], cols[second] = cols[second], cols[first]
        taken.ravel()[to[:, good]] = True
    return taken & ~held
