"""What a pattern is like. Each function takes a mask or a layout."""

import numpy as np

from bsjax._layout import Layout
from bsjax.patterns import _check


def density(mask):
    """Gives the stored blocks over all blocks, from 0 to 1; 0 where there are none at all.

    Example:
      >>> from bsjax import patterns
      >>> patterns.density([[1, 0], [0, 1]])
      0.5
    """
    mask = _as_mask(mask)
    return float(mask.mean()) if mask.size else 0.0


def row_lengths(mask):
    """Gives the number of blocks of each row: int64 `[num_rows]`, what one input is multiplied by.

    Example:
      >>> from bsjax import patterns
      >>> patterns.row_lengths([[1, 0, 1], [0, 0, 1]]).tolist()
      [2, 1]
    """
    return _as_mask(mask).sum(1, dtype=np.int64)


def column_lengths(mask):
    """Gives the number of blocks of each column: int64 `[num_cols]`, the terms of one output's sum.

    Example:
      >>> from bsjax import patterns
      >>> patterns.column_lengths([[1, 0, 1], [0, 0, 1]]).tolist()
      [1, 0, 2]
    """
    return _as_mask(mask).sum(0, dtype=np.int64)


def reach(masks, steps=None):
    """Gives the share of all pairs of an input and an output that are connected after 1, 2, ... layers.

    At 1, every output can depend on every input.

    Args:
      masks: a square mask or layout, passed `steps` times; or a list of masks or layouts, passed one after the other.
      steps: how often; only with a single mask.

    Returns:
      A list of float, one a step.

    Raises:
      ValueError: if `steps` is missing or needless, a single mask is not square, or masks do not follow on each other.

    References:
      Gray, Radford and Kingma, "GPU Kernels for Block-Sparse Weights", 2017.

    Example:
      >>> from bsjax import patterns
      >>> patterns.reach(patterns.banded(8, 8, 1), 3)
      [0.34375, 0.53125, 0.6875]
      >>> groups = [patterns.block_diagonal(8, 8, 2), patterns.block_diagonal(8, 8, 2, seed=0)]
      >>> patterns.reach(groups)
      [0.5, 1.0]
    """
    if isinstance(masks, list | tuple) and all(isinstance(mask, Layout) or np.ndim(mask) == 2 for mask in masks):
        if steps is not None:
            raise ValueError(f"`steps` must be left out where `masks` is a list, whose length it is; got {steps}.")
        masks = [_as_mask(mask) for mask in masks]
    elif steps is None:
        raise ValueError("`steps` must be given where `masks` is a single mask.")
    else:
        masks = [_as_square(masks)] * _check.integer("steps", steps, 0)
    shares, reached = [], None
    for mask in masks:
        if reached is not None and reached.shape[1] != len(mask):
            columns = reached.shape[1]
            raise ValueError(f"Each of `masks` needs a row for each column before it, {columns}; got {len(mask)}.")
        # Sums of ones: never rounded to zero, so float32 tells connected from not.
        reached = mask if reached is None else reached.astype(np.float32) @ mask.astype(np.float32) > 0
        shares.append(density(reached))
    return shares


def average_path_length(mask):
    """Gives the mean number of steps from one node to another, over all pairs: infinite if one cannot be reached.

    Args:
      mask: a square mask or layout; a block at [i, j] leads from i to j.

    Example:
      >>> from bsjax import patterns
      >>> patterns.average_path_length(patterns.watts_strogatz(5, 2, 0, seed=0))
      1.5
    """
    import scipy.sparse.csgraph  # 0.25 s, too long for every `import bsjax`

    mask = _as_square(mask)
    pairs = len(mask) * (len(mask) - 1)
    if not pairs:
        return 0.0
    distances = scipy.sparse.csgraph.shortest_path(scipy.sparse.csr_array(mask), method="D", unweighted=True)
    return float(distances.sum() / pairs)


def clustering(mask):
    """Gives how often two neighbours of a node are neighbours too: the mean over the nodes, from 0 to 1.

    Args:
      mask: a square mask or layout; nodes i and j are neighbours if there is a block at [i, j] or [j, i]. A node with
        fewer than two counts as 0.

    References:
      Watts and Strogatz, "Collective dynamics of 'small-world' networks", 1998.

    Example:
      >>> from bsjax import patterns
      >>> patterns.clustering(patterns.watts_strogatz(20, 4, 0, seed=0))
      0.5
    """
    mask = _as_square(mask)
    links = (mask | mask.T) & ~np.eye(len(mask), dtype=bool)
    degrees = links.sum(1)
    # Counts below 2**24 are exact in float32, for which the product is fastest.
    paths = links.astype(np.float32) @ links.astype(np.float32)
    closed = (paths * links).sum(1, dtype=np.float64)
    return float(np.mean(closed / np.maximum(degrees * (degrees - 1), 1))) if len(mask) else 0.0


def summary(mask):
    """Gives the main measures of a mask or layout by name, in a dict.

    `row_lengths` and `column_lengths` are the shortest and the longest. A square mask has those of its graph too, with
    the reach after 1 to 4 steps.

    Example:
      >>> from bsjax import patterns
      >>> for name, value in patterns.summary(patterns.banded(8, 8, 1)).items():
      ...     print(name, value)
      shape (8, 8)
      num_blocks 22
      density 0.34375
      row_lengths (2, 3)
      column_lengths (2, 3)
      average_path_length 3.0
      clustering 0.0
      reach [0.34375, 0.53125, 0.6875, 0.8125]
    """
    mask = _as_mask(mask)
    measures = {"shape": mask.shape, "num_blocks": int(mask.sum()), "density": density(mask)}
    for lengths in (row_lengths, column_lengths):
        measured = lengths(mask)
        measures[lengths.__name__] = (int(measured.min(initial=mask.size)), int(measured.max(initial=0)))
    if mask.shape[0] == mask.shape[1]:
        measures["average_path_length"] = average_path_length(mask)
        measures["clustering"] = clustering(mask)
        measures["reach"] = reach(mask, 4)
    return measures


def _as_mask(mask):
    mask = mask.to_mask() if isinstance(mask, Layout) else np.asarray(mask, bool)
    if mask.ndim != 2:
        raise ValueError(f"`mask` must be a Layout or have 2 dimensions; got shape {mask.shape}.")
    return mask


def _as_square(mask):
    mask = _as_mask(mask)
    if mask.shape[0] != mask.shape[1]:
        raise ValueError(f"`mask` must be square, so that steps can follow on each other; got {mask.shape}.")
    return mask
