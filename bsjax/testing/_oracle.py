"""Both products in dense NumPy float64: the answer that no code under test has touched."""

import math

import numpy as np


def to_dense(blocks, layout):
    """Scatters blocks `[num_blocks, b, b]` into `w`, float64 `[k, n]`."""
    b = layout.block_size
    w = np.zeros((*layout.block_shape, b, b))
    rows, cols = np.asarray(layout.rows), np.asarray(layout.cols)
    stored = rows >= 0
    w[rows[stored], cols[stored]] = np.asarray(blocks, np.float64)[stored]
    return w.transpose(0, 2, 1, 3).reshape(layout.shape)


def spmm(x, blocks, layout, *, transpose=False):
    """`x @ w`, or `x @ w.T`, float64, for x of any leading shape."""
    w = to_dense(blocks, layout)
    x = np.asarray(x, np.float64)
    # Columns that meet no block are cleared: in the sparse product a NaN there is never read.
    used = (w.T if transpose else w).any(axis=1)
    return np.where(used, x, 0) @ (w.T if transpose else w)


def sddmm(x, dy, layout):
    """`x.T @ dy` at the stored blocks, zero for padding, float64 `[num_blocks, b, b]`, for any leading shape."""
    b = layout.block_size
    m = math.prod(x.shape[:-1])
    x = np.asarray(x, np.float64).reshape(m, layout.block_shape[0], b)
    dy = np.asarray(dy, np.float64).reshape(m, layout.block_shape[1], b)
    rows, cols = np.asarray(layout.rows), np.asarray(layout.cols)
    dblocks = np.einsum("mei,mej->eij", x[:, rows], dy[:, cols], optimize=True)
    return np.where((rows >= 0)[:, None, None], dblocks, 0)
