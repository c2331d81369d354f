"""A drawing of a pattern."""

from bsjax.patterns import _measures


def plot(layout, ax=None):
    """Draws where the blocks are: a dark square each, block rows downwards, block columns to the right.

    Args:
      layout: a layout or a mask.
      ax: the matplotlib axes to draw on; None makes a figure.

    Returns:
      The axes.

    Raises:
      ImportError: if matplotlib is not installed.

    Example:
      >>> from bsjax import patterns
      >>> ax = patterns.plot(patterns.banded(8, 8, 1))
      >>> ax.get_title()
      '8 x 8 blocks, density 0.3438'
    """
    try:
        from matplotlib import pyplot
    except ImportError as error:
        raise ImportError("plot needs matplotlib, which is not installed: pip install bsjax[plot]") from error
    mask = _measures._as_mask(layout)
    if ax is None:
        ax = pyplot.figure(layout="constrained").add_subplot()
    num_rows, num_cols = mask.shape
    if mask.size:  # an image without pixels has no limits to draw
        ax.imshow(mask, cmap="binary", vmin=0, vmax=1, interpolation="nearest")
    ax.set(xlabel="block column", ylabel="block row")
    ax.set_title(f"{num_rows} x {num_cols} blocks, density {_measures.density(mask):.4g}")
    return ax
