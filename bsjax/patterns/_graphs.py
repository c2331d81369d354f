"""Masks of small-world graphs: square and symmetric, one node a block row, few steps between any two nodes."""

import numpy as np

from bsjax.patterns import _check


def barabasi_albert(n, m, *, seed, diagonal=True):
    """Makes the mask of a scale-free graph: each new node is linked to m others, rather to those with many links.

    A few hubs hold long rows and columns. The first m x m corner is filled.

    Args:
      n: number of blocks a side.
      m: links of each new node, from 1 to n - 1. The mask holds 2m(n - m) + (m - 1)(m - 2) blocks and the diagonal.
      seed: an integer.
      diagonal: whether each node is also linked to itself.

    Returns:
      Bool `[n, n]`, symmetric.

    Raises:
      ValueError: if `n`, `m` or `seed` is no integer or out of range.

    References:
      Barabasi and Albert, "Emergence of scaling in random networks", 1999.
      Gray, Radford and Kingma, "GPU Kernels for Block-Sparse Weights", 2017.

    Example:
      >>> from bsjax import patterns
      >>> mask = patterns.barabasi_albert(64, 4, seed=0)
      >>> int(mask.sum()) == 2 * 4 * (64 - 4) + 3 * 2 + 64
      True
    """
    import networkx  # 0.4 s, too long for every `import bsjax`

    n = _check.integer("n", n, 2)
    m = _check.integer("m", m, 1, n - 1)
    mask = _adjacency(networkx.barabasi_albert_graph(n, m, seed=_check.integer("seed", seed)))
    mask[:m, :m] = True
    return _with_diagonal(mask, diagonal)


def watts_strogatz(n, k, p=0.2, *, seed, diagonal=True):
    """Makes the mask of a small-world graph: a ring of near neighbours, of whose links a share p leads anywhere else.

    Rows and columns are of nearly equal lengths. p = 1 gives a random graph, p = 0 a band that closes to a ring.

    Args:
      n: number of blocks a side.
      k: neighbours of each node, even and below n; twice the m of a Barabasi-Albert graph of that density. The mask
        holds k * n blocks and the diagonal.
      p: share of the links that are rewired, from 0 to 1.
      seed: an integer.
      diagonal: whether each node is also linked to itself.

    Returns:
      Bool `[n, n]`, symmetric.

    Raises:
      ValueError: if an argument is out of range, or `k` is odd.

    References:
      Watts and Strogatz, "Collective dynamics of 'small-world' networks", 1998.
      Gray, Radford and Kingma, "GPU Kernels for Block-Sparse Weights", 2017.

    Example:
      >>> from bsjax import patterns
      >>> mask = patterns.watts_strogatz(64, 8, seed=0)
      >>> int(mask.sum()) == 64 * (8 + 1)
      True
    """
    import networkx

    n = _check.integer("n", n, 1)
    k = _check_neighbours(k, n - 1)
    p = _check.share("p", p)
    graph = networkx.watts_strogatz_graph(n, k, p, seed=_check.integer("seed", seed))
    return _with_diagonal(_adjacency(graph), diagonal)


def watts_strogatz_2d(shape, k, p=0.2, *, seed, diagonal=True):
    """Makes the mask of a small-world graph as `watts_strogatz` does, on a grid that closes at its edges: a torus.

    Args:
      shape: `(rows, cols)` of the grid; the mask has n = rows * cols blocks a side, the nodes row after row.
      k: neighbours of each node, even: the nearest ones on the grid, in pairs on opposite sides.
      p: share of the links that are rewired, from 0 to 1.
      seed: an integer.
      diagonal: whether each node is also linked to itself.

    Returns:
      Bool `[n, n]`, symmetric.

    Raises:
      ValueError: if an argument is out of range, or `k` is odd.

    References:
      Watts and Strogatz, "Collective dynamics of 'small-world' networks", 1998.
      Gray, Radford and Kingma, "GPU Kernels for Block-Sparse Weights", 2017.

    Example:
      >>> from bsjax import patterns
      >>> mask = patterns.watts_strogatz_2d((8, 8), 4, 0, seed=0)
      >>> mask[0].nonzero()[0].tolist()  # itself, its neighbours in the row, and those in the column
      [0, 1, 7, 8, 56]
    """
    if np.shape(shape) != (2,):
        raise ValueError(f"`shape` must be a pair, (rows, cols); got {shape!r}.")
    rows, cols = (_check.integer("shape", side, 1) for side in shape)
    offsets = _nearest_offsets(rows, cols)
    k = _check_neighbours(k, 2 * len(offsets))
    p, rng = _check.share("p", p), np.random.default_rng(_check.integer("seed", seed, 0))
    nodes = np.arange(rows * cols)
    dy, dx = offsets[: k // 2].T[..., None]
    ends = (nodes // cols + dy) % rows * cols + (nodes % cols + dx) % cols
    links = np.stack([np.broadcast_to(nodes, ends.shape), ends], axis=-1).reshape(-1, 2)
    mask = np.eye(rows * cols, dtype=bool)
    mask[links[:, 0], links[:, 1]] = mask[links[:, 1], links[:, 0]] = True
    _rewire(mask, links[rng.random(len(links)) < p], rng)
    return _with_diagonal(mask, diagonal)


def _check_neighbours(k, most):
    if _check.integer("k", k, 0, most) % 2:
        raise ValueError(f"`k` must be even, half of the neighbours on either side; got {k}.")
    return int(k)


def _adjacency(graph):
    mask = np.zeros((len(graph), len(graph)), bool)
    links = np.array(graph.edges, int).reshape(-1, 2)
    mask[links[:, 0], links[:, 1]] = mask[links[:, 1], links[:, 0]] = True
    return mask


def _with_diagonal(mask, diagonal):
    np.fill_diagonal(mask, diagonal)
    return mask


def _nearest_offsets(rows, cols):
    """The (dy, dx) on a torus, nearest first, one of each pair of opposite ones; none that is its own opposite."""
    dy, dx = (line.ravel() for line in np.indices((rows, cols)))
    opposite = -dy % rows * cols + -dx % cols
    first = dy * cols + dx < opposite
    distance = np.minimum(dy, rows - dy) ** 2 + np.minimum(dx, cols - dx) ** 2
    order = np.argsort(distance[first], kind="stable")
    return np.stack([dy, dx], axis=-1)[first][order]


def _rewire(mask, links, rng):
    """Moves the far end of each link to a random node that is not yet linked. The diagonal of `mask` is set."""
    for node, end in links:
        free = np.flatnonzero(~mask[node])
        if free.size:
            other = free[rng.integers(free.size)]
            mask[node, end] = mask[end, node] = False
            mask[node, other] = mask[other, node] = True
