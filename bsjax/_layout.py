"""Layout: where the blocks of a block-sparse matrix are."""

import dataclasses
import io
import os
import pathlib
import secrets
import zipfile
import zlib
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

from bsjax import _schedule

_BLOCK_SIZES = (8, 16, 32, 64, 128)
_MAX_BLOCKS = 2**31 - 1  # what an int32 index counts
_FORMAT = 1  # of the npz file; rises when its fields change meaning


# The constructor takes any leaves: JAX rebuilds a layout from tracers, stacks and placeholders too.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Layout:
    """Where the blocks of a block-sparse matrix `w`, `[k, n]`, are: in BSR form, with its transpose.

    A pytree: the index arrays are int32 leaves, the shape and the block size are static. So a new pattern with the same
    number of blocks does not recompile, and layouts can be stacked and scanned over (patterns of one kind: the length
    of `wgrad_schedule` comes in steps, and depends on how the blocks lie). An entry with a negative index is
    padding and contributes nothing. Layouts compare and hash by content; one whose arrays are traced cannot.

    Attributes:
      indptr: `[k/b + 1]`, where the entries of each block row begin and end.
      indices: `[num_blocks]`, the block column of each stored block: row after row, rising within a row.
      rows: `[num_blocks]`, the block row of each stored block.
      indptr_t: `[n/b + 1]`, where the entries of each block column begin and end in `indices_t` and `perm_t`.
      indices_t: `[num_blocks]`, block rows: column after column, rising within a column.
      perm_t: `[num_blocks]`, which stored block each entry of the transpose is.
      fprop_schedule, dgrad_schedule, wgrad_schedule: the order in which the CUDA kernels of the three passes walk the
        pattern; `[1]` where there is none, and other kernels serve. `from_mask` and `load` make them. Who changes the
        lists must leave them out, as the constructor does by default: those of another pattern give wrong results.
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

    indptr: jax.Array
    indices: jax.Array
    rows: jax.Array
    indptr_t: jax.Array
    indices_t: jax.Array
    perm_t: jax.Array
    fprop_schedule: jax.Array = dataclasses.field(default_factory=_schedule.none, metadata={"derived": True})
    dgrad_schedule: jax.Array = dataclasses.field(default_factory=_schedule.none, metadata={"derived": True})
    wgrad_schedule: jax.Array = dataclasses.field(default_factory=_schedule.none, metadata={"derived": True})
    shape: tuple[int, int] = dataclasses.field(kw_only=True, metadata={"static": True})
    block_size: int = dataclasses.field(kw_only=True, metadata={"static": True})

    @classmethod
    def from_mask(cls, mask, block_size):
        """Makes the layout of a block mask.

        Args:
          mask: `[k/b, n/b]`, any 2-D array-like of bool or 0/1; true where a block is stored. May be empty.
          block_size: b; 8, 16, 32, 64 or 128.

        Returns:
          A `Layout` whose leaves are concrete, also where something else is being traced.

        Raises:
          TypeError: if `mask` is traced: the number of blocks is a shape, so it must be known.
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
        perm_t = np.argsort(cols, kind="stable")
        leaves = _starts(rows, len(mask)), cols, rows, _starts(cols, mask.shape[1]), rows[perm_t], perm_t
        leaves = dict(zip(_LEAVES, [leaf.astype(np.int32) for leaf in leaves], strict=True))
        return cls._from_host(leaves, (mask.shape[0] * b, mask.shape[1] * b), b)

    @classmethod
    def from_indices(cls, rows, cols, shape, block_size):
        """Makes the layout of blocks given by their places, also of traced ones: a pattern that a program computes.

        Traced, the layout costs a few sorts of `num_blocks` numbers on the device, and its `wgrad_schedule` is missing:
        that pass then takes the kernels that need none.

        Args:
          rows, cols: `[num_blocks]` integers, block row and block column of each block, in any order. A pair with a
            number outside the matrix is padding, so that patterns with fewer blocks fit the same arrays.
          shape: `(k, n)` of `w` in elements, multiples of `block_size`.
          block_size: b; 8, 16, 32, 64 or 128.

        Returns:
          A `Layout` of `num_blocks` stored blocks, row after row, columns rising, padding last. Places that are named
          twice are two blocks, whose products add.

        Raises:
          ValueError: if `rows` and `cols` are not of one length and dimension, or `shape` or `block_size` do not fit.
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
        b, shape = int(block_size), tuple(shape)
        if len(shape) != 2 or any(not isinstance(side, int | np.integer) or side < 0 or side % b for side in shape):
            raise ValueError(f"`shape` must be two multiples of `block_size`, {b}; got {shape}.")
        num_rows, num_cols = (int(side) // b for side in shape)
        rows, cols = (_check_places(name, value) for name, value in (("rows", rows), ("cols", cols)))
        if rows.shape != cols.shape:
            raise ValueError(f"`rows` and `cols` must have one length; got {len(rows)} and {len(cols)}.")
        traced = isinstance(rows, jax.core.Tracer) or isinstance(cols, jax.core.Tracer)
        xp = jnp if traced else np
        inside = (rows >= 0) & (rows < num_rows) & (cols >= 0) & (cols < num_cols)
        rows, cols = xp.where(inside, rows, num_rows), xp.where(inside, cols, num_cols)  # padding sorts last
        order = xp.lexsort((cols, rows))
        rows, cols = rows[order], cols[order]
        perm_t = xp.lexsort((rows, cols))
        leaves = {
            "indptr": xp.searchsorted(rows, xp.arange(num_rows + 1)),
            "indices": xp.where(cols < num_cols, cols, -1),
            "rows": xp.where(rows < num_rows, rows, -1),
            "indptr_t": xp.searchsorted(cols[perm_t], xp.arange(num_cols + 1)),
            "indices_t": xp.where(rows < num_rows, rows, -1)[perm_t],
            "perm_t": perm_t,
        }
        leaves = {name: leaf.astype(np.int32) for name, leaf in leaves.items()}
        shape = num_rows * b, num_cols * b
        if not traced:
            return cls._from_host(leaves, shape, b)
        (k, n), ids = shape, jnp.arange(len(rows), dtype=np.int32)
        wgrad = _schedule.traced_wgrad(leaves["rows"], leaves["indices"], shape, b)
        schedules = {
            "fprop_schedule": _schedule.traced_spmm(leaves["rows"], leaves["indices"], ids, k, n, b),
            "dgrad_schedule": _schedule.traced_spmm(leaves["indices"], leaves["rows"], ids, n, k, b),
            "wgrad_schedule": wgrad,
        }
        return cls(**leaves, **schedules, shape=shape, block_size=b)

    @classmethod
    def _from_host(cls, leaves, shape, b):
        """Makes the layout of these NumPy arrays, with its schedules."""
        schedules = {
            "fprop_schedule": _schedule.fprop(leaves["indptr_t"], leaves["indices_t"], leaves["perm_t"], shape, b),
            "dgrad_schedule": _schedule.dgrad(
                leaves["indptr"], leaves["indices"], np.arange(len(leaves["rows"]), dtype=np.int32), shape, b
            ),
            "wgrad_schedule": _schedule.wgrad(leaves["rows"], leaves["indices"], shape, b),
        }
        with jax.ensure_compile_time_eval():
            arrays = {name: jnp.asarray(leaf) for name, leaf in (leaves | schedules).items()}
            return cls(**arrays, shape=shape, block_size=b)

    def lists(self, transpose=False):
        """Gives the lists of `x @ w`, or of `x @ w.T` if `transpose`, as the native op takes them.

        Returns:
          indptr, indices, block ids and schedule; with `transpose` entry e is block e, and the ids are not read.
        """
        if transpose:
            ids = jnp.arange(self.num_blocks, dtype=jnp.int32)
            return self.indptr, self.indices, ids, self.dgrad_schedule
        return self.indptr_t, self.indices_t, self.perm_t, self.fprop_schedule

    def to_mask(self):
        """Gives back the block mask: bool `[k/b, n/b]` in host memory. Padding is left out.

        Raises:
          TypeError: if the layout is traced.
          ValueError: if it is a stack of layouts.
        """
        leaves = self._host_leaves()
        stored = (leaves["rows"] >= 0) & (leaves["indices"] >= 0)
        mask = np.zeros(self.block_shape, bool)
        mask[leaves["rows"][stored], leaves["indices"][stored]] = True
        return mask

    @property
    def num_blocks(self):
        """Number of stored blocks, padding included: the first dimension of `blocks`."""
        return self.indices.shape[-1]

    @property
    def block_shape(self):
        """`(k/b, n/b)`: how many block rows and block columns."""
        return self.shape[0] // self.block_size, self.shape[1] // self.block_size

    @property
    def density(self):
        """Stored blocks over all blocks, from 0 to 1; 0 for a matrix without elements."""
        rows, cols = self.block_shape
        return self.num_blocks / (rows * cols) if rows * cols else 0.0

    def save(self, path):
        """Writes the layout to `path`, an npz file without pickles.

        Whole or not at all: a run that is killed here leaves an older file as it was.

        Raises:
          TypeError: if the layout is traced.
          ValueError: if it is a stack of layouts, or its lists do not belong together.

        Example:
          >>> import bsjax, os, tempfile
          >>> layout = bsjax.Layout.from_mask([[1, 0], [1, 1]], block_size=16)
          >>> with tempfile.TemporaryDirectory() as folder:
          ...     layout.save(os.path.join(folder, "layout.npz"))
          ...     bsjax.Layout.load(os.path.join(folder, "layout.npz")) == layout
          True
        """
        path, leaves = pathlib.Path(path), self._host_leaves()
        fault = _find_fault(leaves, self.shape, self.block_size)
        if fault:
            raise ValueError(f"A layout to save must be whole; in this one {fault}.")
        fields: dict[str, Any] = {"format": _FORMAT, "shape": self.shape, "block_size": self.block_size, **leaves}
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with open(temporary, "xb") as file:
                np.savez(file, **fields)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    @classmethod
    def load(cls, path):
        """Reads a layout that `save` wrote, and checks all of it.

        Raises:
          FileNotFoundError: if there is no such file.
          ValueError: if the file is not one that `save` wrote, is damaged, or comes from a newer bsjax.
        """
        fields = _read(path)
        if not np.array_equal(fields["format"], _FORMAT):
            found = fields["format"]
            raise ValueError(f"`path` must hold layout format {_FORMAT}; {path} holds {found}. Update bsjax.")
        shape, b = (fields[name].tolist() for name in ("shape", "block_size"))
        leaves = {name: fields[name] for name in _LEAVES}
        fault = _find_fault(leaves, shape, b)
        if fault:
            raise ValueError(f"`path` must be a file that Layout.save wrote, undamaged; in {path} {fault}.")
        return cls._from_host(leaves, tuple(shape), b)

    def _host_leaves(self):
        leaves = {name: getattr(self, name) for name in _LEAVES}
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves.values()):
            raise TypeError("A traced layout has no contents to read, compare or hash. Do that outside of jit.")
        leaves = {name: np.asarray(leaf) for name, leaf in leaves.items()}
        if leaves["indices"].ndim > 1:
            raise ValueError(
                f"One layout is needed; got a stack of shape {leaves['indices'].shape[:-1]}. "
                "Take one by jax.tree.map(lambda leaf: leaf[i], layouts)."
            )
        return leaves

    def _contents(self):
        leaves = self._host_leaves().values()
        return self.shape, self.block_size, *((leaf.shape, leaf.dtype.str, leaf.tobytes()) for leaf in leaves)

    def __eq__(self, other):
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or self._contents() == other._contents()

    def __hash__(self):
        return hash(self._contents())

    def __repr__(self):
        shown = f"shape={self.shape}, block_size={self.block_size}"
        if getattr(self.indices, "shape", ()):  # a leaf can be anything while JAX maps over it
            shown += f", num_blocks={self.num_blocks}, density={self.density:.4g}"
        return f"Layout({shown})"


_LEAVES = tuple(field.name for field in dataclasses.fields(Layout) if not field.metadata)


def _check_block_size(block_size):
    if not isinstance(block_size, int | np.integer) or block_size not in _BLOCK_SIZES:
        raise ValueError(f"`block_size` must be one of {_BLOCK_SIZES}; got {block_size!r}.")


def _check_places(name, value):
    value = value if isinstance(value, jax.core.Tracer) else np.asarray(value)
    if value.ndim != 1 or len(value) > _MAX_BLOCKS:
        raise ValueError(f"`{name}` must have 1 dimension, one number a block; got shape {value.shape}.")
    if not len(value):
        return value.astype(np.int32)  # an empty list is of floats
    if not np.issubdtype(value.dtype, np.integer):
        raise TypeError(f"`{name}` must be integers; got {value.dtype}.")
    return value


def _check_mask(mask):
    if isinstance(mask, jax.core.Tracer):
        raise TypeError("`mask` must be concrete, since it decides the number of blocks; got a traced array.")
    mask = np.asarray(mask)
    if mask.ndim != 2:
        raise ValueError(f"`mask` must have 2 dimensions, block rows and block columns; got shape {mask.shape}.")
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


def _starts(lines, num_lines):
    """Where the entries of each line begin and end, for entries sorted by line: `[num_lines + 1]`."""
    return np.concatenate([[0], np.cumsum(np.bincount(lines, minlength=num_lines))])


def _read(path):
    """Reads all fields of a layout's file."""
    contents = pathlib.Path(path).read_bytes()  # an error of the disk is none of the file's form
    try:
        archive = np.load(io.BytesIO(contents), allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("it holds a single array")
        fields = {name: archive[name] for name in archive.files}
    # What NumPy and zipfile raise on other files and on damaged ones.
    except (ValueError, EOFError, KeyError, RuntimeError, zipfile.BadZipFile, zlib.error, MemoryError) as error:
        raise ValueError(f"`path` must be a file that Layout.save wrote; {path} is another or damaged.") from error
    missing = {"format", "shape", "block_size", *_LEAVES} - fields.keys()
    if missing:
        raise ValueError(f"`path` must be a file that Layout.save wrote; {path} lacks {sorted(missing)}.")
    return fields


def _find_fault(leaves, shape, b):
    """Says what in these arrays makes no layout, or None. Its memory is of their size, whatever the shape claims."""
    if type(b) is not int or b not in _BLOCK_SIZES:
        return f"block_size is {b}, none of {_BLOCK_SIZES}"
    if np.shape(shape) != (2,) or any(type(side) is not int or side < 0 or side % b for side in shape):
        return f"shape is {shape}, not two multiples of the block size {b}"
    for name, leaf in leaves.items():
        if leaf.dtype != np.int32 or leaf.ndim != 1:
            return f"{name} is {leaf.dtype} of shape {leaf.shape}, not int32 with one dimension"
    (num_rows, num_cols), num_blocks = (shape[0] // b, shape[1] // b), len(leaves["indices"])
    for name, num_lines in (("indptr", num_rows), ("indptr_t", num_cols)):
        starts = leaves[name]
        if len(starts) != num_lines + 1 or starts[0] != 0 or starts[-1] > num_blocks or (np.diff(starts) < 0).any():
            return f"{name} does not rise from 0 to at most {num_blocks} in {num_lines} steps"
    limits = {"indices": num_cols, "rows": num_rows, "indices_t": num_rows, "perm_t": num_blocks}
    for name, limit in limits.items():
        if len(leaves[name]) != num_blocks or (leaves[name] >= limit).any():
            return f"{name} does not hold {num_blocks} numbers below {limit}"
    return _find_disagreement(*leaves.values())


def _find_disagreement(indptr, indices, rows, indptr_t, indices_t, perm_t):
    """Says which of the three lists of the same blocks is out of order or differs from another, or None."""
    ids = np.arange(len(indices))
    by_row = _walk(indptr, indices, ids)
    by_col = _walk(indptr_t, indices_t, perm_t)
    for name, (line, across, _) in (("indices", by_row), ("indices_t", by_col)):
        if (np.diff(line * (across.max(initial=0) + 1) + across) <= 0).any():
            return f"{name} does not rise within each line"
    stored = (rows >= 0) & (indices >= 0)
    if not np.array_equal(by_row, np.stack([rows, indices, ids])[:, stored]):
        return "rows is not what indptr says"
    line, across, block = by_col
    if not np.array_equal(by_row, np.stack([across, line, block])[:, np.argsort(block, kind="stable")]):
        return "the lists of the transpose hold other blocks than indices"
    return None


def _walk(indptr, across, blocks):
    """Lists (line, position across, block) of every entry, line after line, padding left out: int64 `[3, entries]`."""
    lines = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    entries = np.stack([lines, across[: len(lines)], blocks[: len(lines)]])
    return entries[:, (entries >= 0).all(0)]
