"""Layout: where the blocks of a block-sparse matrix are."""

import json
import pathlib

import jax
import jax.core
import jax.export
import jax.numpy as jnp
import numpy as np

from bsjax import _layout_file, _schedule

_BLOCK_SIZES = (8, 16, 32, 64, 128)
_MAX_BLOCKS = 2**31 - 1  # what an int32 index counts


class Layout:
    """Where the blocks of a block-sparse matrix `w`, `[k, n]`, are.

    A pytree of int32 arrays; the shape and the block size are static. **All layouts of one shape, block size and number
    of blocks have the same leaves of the same shapes**, whoever made them: so a new pattern does not recompile,
    and layouts are stacked, scanned over and passed through `cond` like any arrays. A layout cannot be changed, and is
    made by `from_mask`, `from_indices` or `load` alone, so that its lists always belong together. A block with negative
    `rows` and `cols` is padding and contributes nothing.

    Layouts compare and hash by shape, block size and places; one whose arrays are traced cannot.

    A `jax.tree.map` over a training state that holds a layout should leave it alone, as by
    `nnx.state(model, nnx.Param)`. If one does not, `spmm` and `sddmm` notice: another dtype is a TypeError when they
    are called; changed numbers break the seal that each schedule begins with, which is an error on a CPU, and results
    of NaN on a GPU.

    Attributes:
      rows, cols: `[num_blocks]`, block row and block column of each block, in the order of `blocks`.
      indptr: `[k/b + 1]`, where the entries of each block row begin and end in `indices` and `perm`.
      indices: `[num_blocks]`, block columns: row after row, rising within a row; padding last.
      perm: `[num_blocks]`, which block each of these entries is.
      indptr_t: `[n/b + 1]`, where the entries of each block column begin and end in `indices_t` and `perm_t`.
      indices_t: `[num_blocks]`, block rows: column after column, rising within a column; padding last.
      perm_t: `[num_blocks]`, which block each of these entries is.
      fprop_schedule, dgrad_schedule, wgrad_schedule: the order in which the CUDA kernels of the three passes walk the
        pattern.
      shape: `(k, n)`, in elements.
      block_size: b, the side of a block in elements.

    Example:
      >>> import bsjax
      >>> layout = bsjax.Layout.from_mask([[1, 0, 1], [0, 0, 1]], block_size=8)
      >>> layout
      Layout(shape=(16, 24), block_size=8, num_blocks=3, density=0.5)
      >>> layout.to_mask().astype(int).tolist()
      [[1, 0, 1], [0, 0, 1]]
    """

    rows: jax.Array
    cols: jax.Array
    indptr: jax.Array
    indices: jax.Array
    perm: jax.Array
    indptr_t: jax.Array
    indices_t: jax.Array
    perm_t: jax.Array
    fprop_schedule: jax.Array
    dgrad_schedule: jax.Array
    wgrad_schedule: jax.Array
    shape: tuple[int, int]
    block_size: int

    def __init__(self, *args, **kwargs):
        del args, kwargs
        raise TypeError("A Layout is made by Layout.from_mask, Layout.from_indices or Layout.load.")

    @classmethod
    def from_mask(cls, mask, block_size):
        """Makes the layout of a block mask; its blocks are in the order of SciPy's BSR: row after row, columns rising.

        Args:
          mask: `[k/b, n/b]`, any 2-D array-like of bool or 0/1, or a scipy.sparse array of these; true where a block is
            stored. May be empty.
          block_size: b; 8, 16, 32, 64 or 128.

        Returns:
          A `Layout` whose leaves are concrete, also where something else is being traced.

        Raises:
          TypeError: if `mask` is traced: the number of blocks is a shape, so it must be known. If it is a graph or a
            layout, whose meaning as a mask the sentence names.
          ValueError: if `mask` is not 2-D, holds anything but 0 and 1, or has 2**31 blocks or more; if `block_size` is
            none of the five.

        Example:
          >>> import bsjax
          >>> bsjax.Layout.from_mask([[True, False]], block_size=32).shape
          (32, 64)
        """
        _check_block_size(block_size)
        mask, b = _check_mask(mask), int(block_size)
        rows, cols = np.nonzero(mask)
        return cls._from_host(rows, cols, (mask.shape[0] * b, mask.shape[1] * b), b)

    @classmethod
    def from_indices(cls, rows, cols, shape, block_size):
        """Makes the layout of blocks given by their places, also of traced ones: a pattern that a program computes.

        The blocks stay in the order in which their places are named: block i is at `rows[i], cols[i]`. So where a
        pattern changes in training, the weights and moments of blocks that stay need not move.

        Traced, the layout costs some sorts of `num_blocks` numbers on the device; it takes the same kernels.

        Args:
          rows, cols: `[num_blocks]` integers of any type, block row and block column of each block, in any order. A
            pair with a number outside the matrix is padding, so that patterns with fewer blocks fit the same arrays.
          shape: `(k, n)` of `w` in elements, multiples of `block_size`.
          block_size: b; 8, 16, 32, 64 or 128.

        Returns:
          A `Layout` of `num_blocks` blocks. Of traced places that are named twice the first is taken, and the others
          become padding.

        Raises:
          ValueError: if `rows` and `cols` are not of one length and dimension, name a place twice (where they are
            concrete), or `shape` or `block_size` do not fit.
          TypeError: if they are not integers.

        Example:
          >>> import bsjax, jax, jax.numpy as jnp
          >>> @jax.jit
          ... def shifted(x, blocks, shift):
          ...     rows = jnp.arange(4)
          ...     layout = bsjax.Layout.from_indices(rows, (rows + shift) % 4, (32, 32), 8)
          ...     return bsjax.spmm(x, blocks, layout)
          >>> blocks = jnp.broadcast_to(jnp.arange(4.0)[:, None, None], (4, 8, 8))
          >>> y = shifted(jnp.ones((1, 32)), blocks, 1)
          >>> [float(v) for v in y[0, ::8]]
          [24.0, 0.0, 8.0, 16.0]
        """
        _check_block_size(block_size)
        b = int(block_size)
        shape = _check_shape(shape, b)
        rows, cols = (_check_places(name, value) for name, value in (("rows", rows), ("cols", cols)))
        if rows.shape != cols.shape:
            raise ValueError(f"`rows` and `cols` must have one length; got {len(rows)} and {len(cols)}.")
        if isinstance(rows, np.ndarray) and isinstance(cols, np.ndarray):
            return cls._from_host(rows, cols, shape, b)
        rows, cols = (jnp.asarray(value).astype(jnp.int32) for value in (rows, cols))
        rows, cols = _drop_repeated(*_mark_padding(jnp, rows, cols, shape, b))
        lists = _lists(jnp, rows, cols, shape, b)
        (k, n), ids = shape, jnp.arange(len(rows), dtype=jnp.int32)
        schedules = {
            "fprop_schedule": _schedule.traced_spmm(rows, cols, ids, k, n, b),
            "dgrad_schedule": _schedule.traced_spmm(cols, rows, ids, n, k, b),
            "wgrad_schedule": _schedule.traced_wgrad(rows, cols, shape, b),
        }
        return _make(lists | schedules, shape, b)

    @classmethod
    def _from_host(cls, rows, cols, shape, b):
        """Makes the layout of NumPy arrays of places."""
        rows, cols = _mark_padding(np, rows, cols, shape, b)
        _check_unique(rows, cols)
        lists = _lists(np, rows, cols, shape, b)
        schedules = {
            "fprop_schedule": _schedule.fprop(lists["indptr_t"], lists["indices_t"], lists["perm_t"], shape, b),
            "dgrad_schedule": _schedule.dgrad(lists["indptr"], lists["indices"], lists["perm"], shape, b),
            "wgrad_schedule": _schedule.wgrad(lists["rows"], lists["cols"], shape, b),
        }
        with jax.ensure_compile_time_eval():
            return _make({name: jnp.asarray(leaf) for name, leaf in (lists | schedules).items()}, shape, b)

    def lists(self, transpose=False):
        """Gives indptr, indices, block ids and schedule of `x @ w`, or of `x @ w.T`, as the native op takes them."""
        if transpose:
            return self.indptr, self.indices, self.perm, self.dgrad_schedule
        return self.indptr_t, self.indices_t, self.perm_t, self.fprop_schedule

    def to_mask(self):
        """Gives back the block mask: bool `[k/b, n/b]` in host memory. Padding is left out.

        Raises:
          TypeError: if the layout is traced.
          ValueError: if it is a stack of layouts.
        """
        rows, cols = self._host_places()
        mask = np.zeros(self.block_shape, bool)
        mask[rows[rows >= 0], cols[rows >= 0]] = True
        return mask

    @property
    def num_blocks(self):
        """Number of stored blocks, padding included: the first dimension of `blocks`."""
        return self.rows.shape[-1]

    @property
    def block_shape(self):
        """`(k/b, n/b)`: how many block rows and block columns."""
        return self.shape[0] // self.block_size, self.shape[1] // self.block_size

    @property
    def density(self):
        """Stored blocks over all blocks, from 0 to 1; 0 for a matrix without elements.

        Padding does not count, unless the layout is traced or a stack, where it is not known: then `num_blocks` over
        all blocks, at most 1.
        """
        rows, cols = self.block_shape
        stored = self.num_blocks
        known = isinstance(self.rows, jax.Array | np.ndarray) and not isinstance(self.rows, jax.core.Tracer)
        if known and self.rows.ndim == 1:
            stored = int((np.asarray(self.rows) >= 0).sum())
        return min(stored / (rows * cols), 1.0) if rows * cols else 0.0

    def save(self, path):
        """Writes the layout to `path`, an npz file without pickles: places, shape and block size.

        Whole or not at all: a run that is killed here leaves an older file as it was. A symbolic link stays one.

        Raises:
          TypeError: if the layout is traced.
          ValueError: if it is a stack of layouts.

        Example:
          >>> import bsjax, os, tempfile
          >>> layout = bsjax.Layout.from_mask([[1, 0], [1, 1]], block_size=16)
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     layout.save(os.path.join(folder, "layout.npz"))
          ...     bsjax.Layout.load(os.path.join(folder, "layout.npz")) == layout
          True
        """
        rows, cols = self._host_places()
        starts = {"indptr": np.asarray(self.indptr), "indptr_t": np.asarray(self.indptr_t)}
        numbers = {"shape": np.array(self.shape, np.int64), "block_size": np.int64(self.block_size)}
        _layout_file.write(pathlib.Path(path), rows=rows, cols=cols, **starts, **numbers)

    @classmethod
    def load(cls, path):
        """Reads a layout that `save` wrote, and checks all of it.

        Raises:
          FileNotFoundError: if there is no such file.
          ValueError: if the file is not one that `save` wrote, is damaged, or comes from a newer bsjax.
        """
        fields = _layout_file.read(pathlib.Path(path))
        places = fields["rows"], fields["cols"]
        try:
            layout = cls.from_indices(*places, fields["shape"].tolist(), fields["block_size"].item())
            for name in ("indptr", "indptr_t"):
                if not np.array_equal(getattr(layout, name), fields[name]):
                    raise ValueError(f"{name} is not what rows and cols say.")
        except ValueError as error:
            raise ValueError(f"`path` must be a file that Layout.save wrote, undamaged; in {path}: {error}") from None
        return layout

    def check(self):
        """Raises an error if these are not the leaves of one layout, by dtype and shape.

        Raises:
          TypeError: if a leaf is not int32: something was mapped over the layout.
          ValueError: if it is a stack of layouts, or a leaf has another shape than it was made with.
        """
        for name in _LEAVES:
            leaf = getattr(self, name)
            if leaf.dtype != np.int32:
                raise TypeError(
                    f"`layout` must hold int32 arrays, as it was made; its `{name}` came as {leaf.dtype}. A cast, an "
                    "average or a decay of a whole training state does that: map over the floating-point leaves alone, "
                    "as by nnx.state(model, nnx.Param)."
                )
        if self.rows.ndim != 1:
            raise ValueError(
                f"`layout` must be one layout; got a stack of shape {self.rows.shape[:-1]}. Take one by "
                "jax.tree.map(lambda leaf: leaf[i], layouts), or map over them by jax.vmap or jax.lax.scan."
            )
        num_rows, num_cols = self.block_shape
        lengths = dict.fromkeys(_LISTS, self.num_blocks) | {"indptr": num_rows + 1, "indptr_t": num_cols + 1}
        for name, length in lengths.items():
            if getattr(self, name).shape != (length,):
                raise ValueError(
                    f"`layout` must hold arrays of the shapes that it was made with; its `{name}` came as "
                    f"{getattr(self, name).shape}, not {(length,)}."
                )

    def _host_places(self):
        if isinstance(self.rows, jax.core.Tracer) or isinstance(self.cols, jax.core.Tracer):
            raise TypeError("A traced layout has no contents to read, compare or hash. Do that outside of jit.")
        self.check()
        return np.asarray(self.rows), np.asarray(self.cols)

    def _contents(self):
        return self.shape, self.block_size, *(places.tobytes() for places in self._host_places())

    def __eq__(self, other):
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or self._contents() == other._contents()

    def __hash__(self):
        return hash(self._contents())

    def __setattr__(self, name, value):
        raise AttributeError(
            f"A Layout cannot be changed, so its `{name}` cannot be set. Make another by from_indices."
        )

    def __delattr__(self, name):
        raise AttributeError(f"A Layout cannot be changed, so its `{name}` cannot be deleted.")

    def __repr__(self):
        shown = f"shape={self.shape}, block_size={self.block_size}"
        if getattr(self.rows, "shape", ()):  # a leaf can be anything while JAX maps over it
            shown += f", num_blocks={self.num_blocks}, density={self.density:.4g}"
        return f"Layout({shown})"


_LISTS = ("rows", "cols", "indptr", "indices", "perm", "indptr_t", "indices_t", "perm_t")
_LEAVES = (*_LISTS, "fprop_schedule", "dgrad_schedule", "wgrad_schedule")


def _make(leaves, shape, block_size):
    """Makes a layout of any leaves: JAX rebuilds one from tracers, stacks and placeholders too."""
    layout = object.__new__(Layout)
    layout.__dict__.update(leaves, shape=shape, block_size=block_size)
    return layout


def to_leaves(layout):
    """The arrays of a layout by name."""
    return {name: getattr(layout, name) for name in _LEAVES}


def of_leaves(leaves, shape, block_size):
    """The layout of arrays that `to_leaves` gave."""
    return _make({name: leaves[name] for name in _LEAVES}, shape, block_size)


jax.tree_util.register_pytree_with_keys(
    Layout,
    lambda layout: (
        [(jax.tree_util.GetAttrKey(name), leaf) for name, leaf in to_leaves(layout).items()],
        (layout.shape, layout.block_size),
    ),
    lambda form, leaves: _make(zip(_LEAVES, leaves, strict=True), *form),
    lambda layout: (tuple(to_leaves(layout).values()), (layout.shape, layout.block_size)),
)
jax.export.register_pytree_node_serialization(
    Layout,
    serialized_name="bsjax.Layout",
    serialize_auxdata=lambda form: json.dumps(form).encode(),
    deserialize_auxdata=lambda form: (lambda shape, b: (tuple(shape), b))(*json.loads(form)),
)


# ------------------------------------------------------------------------------------------------------------- lists


def _mark_padding(xp, rows, cols, shape, b):
    """Sets both numbers of a place outside the matrix to -1."""
    inside = (rows >= 0) & (rows < shape[0] // b) & (cols >= 0) & (cols < shape[1] // b)
    return xp.where(inside, rows, -1), xp.where(inside, cols, -1)


def _last(xp, lines):
    """The numbers of lines, with that of padding behind all others."""
    return xp.where(lines < 0, np.iinfo(np.int32).max, lines)


def _order(xp, first, second):
    """The order by `first`, then `second`, then position; padding last."""
    return xp.lexsort((second, _last(xp, first)))


def _lists(xp, rows, cols, shape, b):
    """All lists of a layout, of marked places that are unique."""
    lists = {"rows": rows, "cols": cols}
    for end, lines, across, size in (("", rows, cols, shape[0]), ("_t", cols, rows, shape[1])):
        perm = _order(xp, lines, across)
        lists[f"indptr{end}"] = xp.searchsorted(_last(xp, lines)[perm], xp.arange(size // b + 1, dtype=np.int32))
        lists[f"indices{end}"], lists[f"perm{end}"] = across[perm], perm
    return {name: leaf.astype(np.int32) for name, leaf in lists.items()}


def _drop_repeated(rows, cols):
    """Makes padding of traced places that were named before."""
    if not len(rows):
        return rows, cols
    order = _order(jnp, rows, cols)
    r, c = rows[order], cols[order]
    again = jnp.concatenate([jnp.zeros(1, bool), (r[1:] == r[:-1]) & (c[1:] == c[:-1])])
    again = jnp.zeros(len(rows), bool).at[order].set(again)
    return jnp.where(again, -1, rows), jnp.where(again, -1, cols)


# ------------------------------------------------------------------------------------------------------------ checks


def _check_block_size(block_size):
    integer = isinstance(block_size, int | np.integer) and not isinstance(block_size, bool)
    if not integer or block_size not in _BLOCK_SIZES:
        raise ValueError(f"`block_size` must be one of {_BLOCK_SIZES}; got {block_size!r}.")


def _check_shape(shape, b):
    try:
        sides = tuple(shape)
    except TypeError:
        sides = ()
    integers = all(isinstance(side, int | np.integer) and not isinstance(side, bool) for side in sides)
    if len(sides) != 2 or not integers or any(side < 0 or side % b for side in sides):
        raise ValueError(f"`shape` must be (k, n) of `w`, two multiples of `block_size`, {b}; got {shape!r}.")
    return int(sides[0]), int(sides[1])


def _check_places(name, value):
    """One list of places as int32, on the host if it is concrete; numbers that int32 cannot hold become padding."""
    traced = isinstance(value, jax.core.Tracer)
    xp, value = (jnp, value) if traced else (np, np.asarray(value))
    if value.ndim != 1 or value.shape[0] > _MAX_BLOCKS:
        raise ValueError(f"`{name}` must have 1 dimension, one number a block; got shape {value.shape}.")
    if not value.shape[0]:
        return value.astype(np.int32)  # an empty list is of floats
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"`{name}` must be integers; got {value.dtype}.")
    limits = jnp.iinfo(value.dtype)  # a cast alone would wrap around, perhaps into the matrix
    return xp.clip(value, max(limits.min, -1), min(limits.max, _MAX_BLOCKS)).astype(np.int32)


def _check_unique(rows, cols):
    order = np.lexsort((cols, rows))
    r, c = rows[order], cols[order]
    again = np.flatnonzero((r[1:] == r[:-1]) & (c[1:] == c[:-1]) & (r[1:] >= 0))
    if len(again):
        first, second = order[again[0]], order[again[0] + 1]
        raise ValueError(
            f"`rows` and `cols` must name each place once; got [{rows[first]}, {cols[first]}] as blocks {first} and "
            f"{second}. Add the two blocks up, or make the second padding: -1."
        )


def _check_mask(mask):
    if isinstance(mask, jax.core.Tracer):
        raise TypeError("`mask` must be concrete, since it decides the number of blocks; got a traced array.")
    if isinstance(mask, Layout):
        raise TypeError(
            "`mask` must be an array of block places; got a bsjax.Layout. It is a layout already; of another block "
            "size it is made by Layout.from_mask(layout.to_mask(), block_size)."
        )
    if hasattr(mask, "adj") and hasattr(mask, "nodes"):
        raise TypeError(
            f"`mask` must be an array of block places; got a networkx {type(mask).__name__}. Give its adjacency "
            "matrix, the nodes in an order of your choice: networkx.to_numpy_array(graph, nodelist=...) != 0."
        )
    if hasattr(mask, "toarray"):  # scipy.sparse, which need not be imported for that
        mask = mask.toarray()
    mask, kind = np.asarray(mask), type(mask).__name__
    if mask.ndim != 2:
        raise ValueError(
            f"`mask` must have 2 dimensions, block rows and block columns; got shape {mask.shape}, a {kind}."
        )
    if mask.dtype != bool:
        wrong = np.argwhere((mask != 0) & (mask != 1))
        if len(wrong):
            row, col = wrong[0].tolist()
            found = f"{mask[row, col]} at [{row}, {col}]"
            raise ValueError(f"`mask` must hold 0 and 1 only; got {found}. Compare first, as in mask != 0.")
        mask = mask.astype(bool)
    count = np.count_nonzero(mask)
    if count > _MAX_BLOCKS:
        raise ValueError(f"`mask` must have at most {_MAX_BLOCKS} blocks, so that int32 counts them; got {count}.")
    return mask
