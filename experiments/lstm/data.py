"""Text as bytes: the standard library of the running Python, or any file or folder; split, and cut into streams."""

import gzip
import hashlib
import lzma
import pathlib
import platform
import sysconfig
import zlib

import numpy as np

from experiments.common import CommandError

# Tests are absent from some distributions, and site-packages are not the library's own.
_NOT_LIBRARY = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
_OPEN = {".xz": lzma.open, ".gz": gzip.open}


def load(path=""):
    """Reads a text.

    Args:
      path: a file, or a folder whose files are joined in the order of their relative paths, hidden ones left out;
        .xz and .gz are unpacked. Empty: every .py file of the running Python's standard library, over 10 MB.

    Returns:
      The bytes, a `uint8` array, and a sentence that says what they are: number of files and bytes, SHA-256.

    Raises:
      CommandError: if there is nothing to read.
    """
    files = _files_of(pathlib.Path(path).expanduser()) if path else _library_files()
    text = b"".join(_read(file) for file in files)
    if not text:
        raise CommandError(f"`data` must hold text; {path or 'the standard library'} is empty.")
    digest = hashlib.sha256(text).hexdigest()
    source = path or f"standard library of Python {platform.python_version()}"
    about = f"{source}: {len(files)} files, {len(text):,} bytes, sha256 {digest}"
    return np.frombuffer(text, np.uint8), about


def _library_files():
    root = pathlib.Path(sysconfig.get_path("stdlib"))
    return [f for f in _walk(root) if f.suffix == ".py" and not _NOT_LIBRARY & set(f.relative_to(root).parts)]


def _files_of(path):
    if not path.exists():
        raise CommandError(f"`data` must be a file or a folder; {path} does not exist.")
    return _walk(path) if path.is_dir() else [path]


def _walk(root):
    files = (f for f in root.rglob("*") if f.is_file())
    visible = (f for f in files if not any(part.startswith(".") for part in f.relative_to(root).parts))
    return sorted(visible, key=lambda f: f.relative_to(root).as_posix())


def _read(file):
    try:
        with _OPEN.get(file.suffix, open)(file, "rb") as stream:
            return stream.read()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise CommandError(f"`data` must be readable; {file}: {error}") from error


def split(text, heldout, batch, length):
    """Cuts a text into streams to train on and, from its end, to evaluate on.

    Args:
      text: `[size]` uint8.
      heldout: the share at the end that is never trained on.
      batch: number of streams read side by side, each a contiguous part of the text.
      length: bytes of a window; a stream holds at least one window and the byte after it.

    Returns:
      Two arrays `[batch, bytes]`: the streams of the first part and those of the held-out part.

    Raises:
      CommandError: if either part is too short for that.
    """
    size = int(len(text) * (1 - heldout))
    parts = []
    for name, part in (("training", text[:size]), ("held-out", text[size:])):
        if len(part) < batch * (length + 1):
            raise CommandError(
                f"The {name} part of `data` must have `batch` x (`length` + 1) bytes or more, "
                f"{batch * (length + 1):,}; it has {len(part):,} of {len(text):,}. Give a longer text, or a smaller "
                "`batch` or `length`."
            )
        streams = len(part) // batch
        parts.append(part[: batch * streams].reshape(batch, streams))
    return parts


def num_windows(streams, length):
    """How many whole windows the streams hold, each with a byte after it."""
    return (streams.shape[1] - 1) // length


def window(streams, position, length):
    """The window at a position: what is read and, one byte on, what is to be predicted: two `[length, batch]` int32."""
    cut = streams[:, position * length : (position + 1) * length + 1].T.astype(np.int32)
    return cut[:-1], cut[1:]
