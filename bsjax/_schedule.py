"""Schedules: the order in which the fastest CUDA kernels walk a pattern, made once for each layout in native code.

Each is an int32 array whose form cuda/spmm_schedule.h and cuda/sddmm_schedule.h describe. Its length follows from the
shape and the number of blocks (of wgrad's, in steps), so that layouts alike in these can be stacked and need no new
compilation. An array of length 1 means that there is none; other kernels then serve the product.
"""

import numpy as np

from bsjax import _ffi


def none():
    """The array that says that there is no schedule."""
    return np.zeros(1, np.int32)


def fprop(indptr_t, indices_t, perm_t, shape, block_size):
    """The schedule of `x @ w`."""
    return _spmm(indptr_t, indices_t, perm_t, *shape, block_size)


def dgrad(indptr, indices, shape, block_size):
    """The schedule of `dy @ w.T`."""
    return _spmm(indptr, indices, None, *reversed(shape), block_size)


def wgrad(rows, indices, shape, block_size):
    """The schedule of `x.T @ dy` at the blocks."""
    if not _ffi.native or not len(rows):
        return none()
    return np.frombuffer(_ffi.native.sddmm_schedule(rows, indices, *shape, block_size), np.int32)


def _spmm(indptr, indices, block_ids, k, n, block_size):
    if not _ffi.native or not len(indices):
        return none()
    schedule = _ffi.native.spmm_schedule(indptr, indices, block_ids, k, n, block_size)
    return np.frombuffer(schedule, np.int32) if schedule else none()
