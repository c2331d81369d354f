"""The text of the LSTM experiment: where it is read from, and how it is cut into streams."""

import gzip
import lzma
import os
import pathlib

import numpy as np

from experiments.lstm import data


def test_the_standard_library_is_read_in_one_order():
    text, about = data.load()
    again, about_again = data.load()
    assert about == about_again
    np.testing.assert_array_equal(text, again)
    assert text.dtype == np.uint8
    assert len(text) > 10_000_000
    assert f"{len(text):,} bytes, sha256 " in about
    assert text.tobytes().startswith(pathlib.Path(os.__file__).with_name("__future__.py").read_bytes())
    assert pathlib.Path(os.__file__).read_bytes() in text.tobytes()


def test_files_folders_and_packed_files_are_read(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "a.txt").write_bytes(b"first ")
    (tmp_path / "sub.b").write_bytes(b"last")
    (tmp_path / ".hidden").write_bytes(b"never")
    (tmp_path / "sub" / "b.xz").write_bytes(lzma.compress(b"second "))
    (tmp_path / "sub" / "c.gz").write_bytes(gzip.compress(b"third "))
    text, about = data.load(str(tmp_path))
    assert text.tobytes() == b"lastfirst second third "  # "." comes before "/"
    assert "4 files, 23 bytes" in about
    assert data.load(str(tmp_path / "sub" / "b.xz"))[0].tobytes() == b"second "


def test_streams_hold_the_text_and_nothing_of_the_rest():
    text = np.arange(250, dtype=np.uint8)
    streams, heldout = data.split(text, 0.2, batch=2, length=3)
    np.testing.assert_array_equal(streams, np.arange(200).reshape(2, 100))
    np.testing.assert_array_equal(heldout, np.arange(200, 250).reshape(2, 25))
    assert data.num_windows(streams, 3) == 33
    inputs, targets = data.window(streams, 32, 3)
    np.testing.assert_array_equal(inputs, [[96, 196], [97, 197], [98, 198]])
    np.testing.assert_array_equal(targets, inputs + 1)
    assert inputs.dtype == np.int32
