"""The npz file of a layout: without pickles, written whole or not at all."""

import io
import os
import secrets

import numpy as np

_FORMAT = 2  # rises when fields change their meaning; 1 held `indices` for `cols`, and lists that follow from them
# indptr and indptr_t follow from the places too: they bound what a wrong shape in a damaged file can make.
_FIELDS = ("rows", "cols", "indptr", "indptr_t", "shape", "block_size")


def write(path, **fields):
    """Writes the fields of a layout to `path`, through a symbolic link if it is one."""
    path = path.resolve()
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "xb") as file:
            np.savez(file, format=np.int64(_FORMAT), **fields)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def read(path):
    """Reads the fields of a layout: a dict of arrays, of which dtypes and lengths are checked.

    Raises:
      ValueError: if the file is no npz file with these fields, or of a newer format.
    """
    contents = path.read_bytes()  # an error of the disk is none of the file's form
    try:
        archive = np.load(io.BytesIO(contents), allow_pickle=False)
        fields = {name: np.asarray(archive[name]) for name in archive.files}  # of junk it gives bytes
        format_ = fields.pop("format").tolist()
    # NumPy, zipfile, zlib and ast raise a dozen kinds of errors on damaged files, MemoryError and SyntaxError among
    # them; nothing but this file's contents is read here.
    except Exception as error:
        raise ValueError(f"`path` must be a file that Layout.save wrote; {path} is another or damaged.") from error
    if format_ == 1 and "indices" in fields:
        fields["cols"] = fields["indices"]
    elif format_ != _FORMAT:
        raise ValueError(f"`path` must hold layout format {_FORMAT} or 1; {path} holds {format_}. Update bsjax.")
    missing = set(_FIELDS) - fields.keys()
    if missing:
        raise ValueError(f"`path` must be a file that Layout.save wrote; {path} lacks {sorted(missing)}.")
    fields = {name: fields[name] for name in _FIELDS}
    fault = _find_fault(**fields)
    if fault:
        raise ValueError(f"`path` must be a file that Layout.save wrote, undamaged; in {path} {fault}.")
    return fields


def _find_fault(rows, cols, indptr, indptr_t, shape, block_size):
    for name, leaf in {"rows": rows, "cols": cols, "indptr": indptr, "indptr_t": indptr_t}.items():
        if leaf.dtype != np.int32 or leaf.ndim != 1:
            return f"{name} is {leaf.dtype} of shape {leaf.shape}, not int32 with one dimension"
    for name, number, size in (("shape", shape, 2), ("block_size", block_size, 1)):
        if number.dtype != np.int64 or number.size != size or (number < 0).any():
            return f"{name} is {number.tolist()}"
    if not block_size.item():
        return "block_size is 0"
    lengths = [len(indptr) - 1, len(indptr_t) - 1]
    if len(rows) != len(cols) or (shape // block_size).tolist() != lengths:
        return (
            f"{len(rows)} rows, {len(cols)} cols and shape {shape.tolist()} do not fit {lengths} block rows and columns"
        )
    inside = (rows >= 0) & (cols >= 0) & (rows < lengths[0]) & (cols < lengths[1])
    if not (inside | ((rows == -1) & (cols == -1))).all():
        return "rows and cols are neither inside the matrix nor -1"
    return None
