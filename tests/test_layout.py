"""Layout against scipy.sparse, as a pytree under JAX's transformations, and as a file."""

import copy
import dataclasses
import io
import os
import pickle
import zipfile

import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.sparse
from hypothesis import given
from hypothesis import strategies as st

from bsjax import Layout, _layout_file

LEAVES = ("rows", "cols", "indptr", "indices", "perm", "indptr_t", "indices_t", "perm_t")
SCHEDULES = ("fprop_schedule", "dgrad_schedule", "wgrad_schedule")
MASK = np.array([[1, 0, 1, 0], [0, 0, 0, 0], [1, 0, 1, 1]], bool)  # an empty row and an empty column
masks = hypothesis.extra.numpy.arrays(bool, st.tuples(st.integers(0, 7), st.integers(0, 7)))
block_sizes = st.sampled_from([8, 16, 32, 64, 128])


def host(layout):
    return {name: np.asarray(getattr(layout, name)) for name in LEAVES}


def padded(layout):
    """The same blocks and one entry of padding."""
    rows, cols = (np.append(np.asarray(getattr(layout, name)), -1) for name in ("rows", "cols"))
    return Layout.from_indices(rows, cols, layout.shape, layout.block_size)


def stack(layouts):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layouts)


# ---------------------------------------------------------------------------------------------------------- contents


@given(masks, block_sizes)
def test_agrees_with_scipy(mask, b):
    """Against a scipy matrix with one element a block, which holds 1 + the number of the block."""
    layout = Layout.from_mask(mask, b)
    ids = np.zeros(mask.shape, np.int64)
    ids[mask] = 1 + np.arange(mask.sum())
    csr = scipy.sparse.csr_array(ids)
    for lists, matrix in (("", csr), ("_t", scipy.sparse.csr_array(ids.T))):
        matrix.sort_indices()
        np.testing.assert_array_equal(getattr(layout, "indptr" + lists), matrix.indptr)
        np.testing.assert_array_equal(getattr(layout, "indices" + lists), matrix.indices)
    np.testing.assert_array_equal(layout.perm_t, scipy.sparse.csr_array(ids.T).data - 1)
    np.testing.assert_array_equal(layout.perm, np.arange(layout.num_blocks))
    np.testing.assert_array_equal((layout.rows, layout.cols), csr.tocoo().coords)
    assert layout.num_blocks == mask.sum()
    assert layout.shape == (mask.shape[0] * b, mask.shape[1] * b)
    assert layout.block_shape == mask.shape
    assert layout.density == (mask.mean() if mask.size else 0)
    assert all(leaf.dtype == np.int32 and leaf.ndim == 1 for leaf in host(layout).values())
    np.testing.assert_array_equal(layout.to_mask(), mask)


@pytest.mark.parametrize("b", [8, 32])
def test_blocks_are_in_the_order_of_scipys_block_format(b):
    layout = Layout.from_mask(MASK, b)
    blocks = np.random.default_rng(0).normal(size=(layout.num_blocks, b, b))
    w = np.zeros((*MASK.shape, b, b))
    w[np.asarray(layout.rows), np.asarray(layout.cols)] = blocks
    w = w.transpose(0, 2, 1, 3).reshape(layout.shape)
    bsr = scipy.sparse.bsr_array((blocks, layout.indices, layout.indptr), shape=layout.shape)
    np.testing.assert_array_equal(bsr.toarray(), w)
    found = scipy.sparse.bsr_array(w, blocksize=(b, b))
    np.testing.assert_array_equal(found.data, blocks)
    blocks_t = blocks[np.asarray(layout.perm_t)].transpose(0, 2, 1)
    bsr_t = scipy.sparse.bsr_array((blocks_t, layout.indices_t, layout.indptr_t), shape=layout.shape[::-1])
    np.testing.assert_array_equal(bsr_t.toarray(), w.T)


@pytest.mark.parametrize("shape", [(0, 0), (0, 3), (3, 0)])
def test_masks_without_places(shape):
    layout = Layout.from_mask(np.zeros(shape), 16)
    assert layout.shape == (16 * shape[0], 16 * shape[1])
    assert layout.num_blocks == layout.density == 0
    assert layout.to_mask().shape == shape


@pytest.mark.parametrize(
    "mask",
    [
        MASK.tolist(),
        MASK.astype(np.int8),
        MASK.astype(np.uint64),
        MASK.astype(np.float16),
        np.asfortranarray(MASK),
        np.repeat(MASK, 2, axis=1)[:, ::2],
        jnp.asarray(MASK),
        jnp.asarray(MASK, jnp.bfloat16),
    ],
    ids=["list", "int8", "uint64", "float16", "by_columns", "strided", "jax", "bfloat16"],
)
def test_any_array_of_bool_or_0_and_1_is_a_mask(mask):
    assert Layout.from_mask(mask, np.int64(16)) == Layout.from_mask(MASK, 16)


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        ([1, 0], r"`mask` must have 2 dimensions.*got shape \(2,\)"),
        (np.ones((2, 2, 2)), r"`mask` must have 2 dimensions.*got shape \(2, 2, 2\)"),
        (1, r"`mask` must have 2 dimensions.*got shape \(\)"),
        ([[0, 1], [2, 1]], r"`mask` must hold 0 and 1 only; got 2 at \[1, 0\].*mask != 0"),
        ([[0, -1]], r"`mask` must hold 0 and 1 only; got -1 at \[0, 1\]"),
        ([[0.5]], r"`mask` must hold 0 and 1 only; got 0.5 at \[0, 0\]"),
        ([[1, np.nan]], r"`mask` must hold 0 and 1 only; got nan at \[0, 1\]"),
        ([["yes", "no"]], r"`mask` must hold 0 and 1 only; got yes at \[0, 0\]"),
        (np.broadcast_to(True, (2**16, 2**15)), r"`mask` must have at most 2147483647 blocks.*got 2147483648"),
    ],
    ids=["1-D", "3-D", "0-D", "2", "-1", "half", "nan", "text", "too_many"],
)
def test_no_mask(mask, sentence):
    with pytest.raises(ValueError, match=sentence):
        Layout.from_mask(mask, 8)


@pytest.mark.parametrize("b", [0, 1, 4, 24, 256, -8, 8.0, True, "8", None])
def test_no_block_size(b):
    with pytest.raises(ValueError, match=r"`block_size` must be one of \(8, 16, 32, 64, 128\); got"):
        Layout.from_mask(MASK, b)


def test_padding_stores_nothing():
    layout = Layout.from_mask(MASK, 8)
    more = padded(layout)
    assert more.num_blocks == layout.num_blocks + 1
    np.testing.assert_array_equal(more.to_mask(), MASK)
    assert more.density == layout.density
    assert Layout.from_indices([0, -1, -1], [0, 0, 7], (8, 8), 8).density == 1.0


# ------------------------------------------------------------------------------------------------- equality and form


@given(masks, masks, block_sizes, block_sizes)
def test_equality_is_of_contents(first, second, b, c):
    one, other = Layout.from_mask(first, b), Layout.from_mask(second, c)
    same = b == c and first.shape == second.shape and bool((first == second).all())
    assert (one == other) == same
    assert (hash(one) == hash(other)) == same
    assert one == Layout.from_mask(first.copy(), b)
    assert one != "a layout"


def test_layouts_are_keys():
    one, other = Layout.from_mask(MASK, 8), Layout.from_mask(MASK, 8)
    assert {one: "found"}[other] == "found"
    assert len({one, other, Layout.from_mask(~MASK, 8), Layout.from_mask(MASK, 16)}) == 3
    jax.jit(lambda x, layout: x * layout.num_blocks, static_argnums=1)(1, one)


def test_is_frozen_and_copies():
    layout = Layout.from_mask(MASK, 8)
    with pytest.raises(AttributeError, match="A Layout cannot be changed, so its `block_size` cannot be set"):
        layout.block_size = 16
    with pytest.raises(AttributeError, match="cannot be deleted"):
        del layout.rows
    with pytest.raises(TypeError, match="made by Layout.from_mask, Layout.from_indices or Layout.load"):
        Layout(layout.rows, layout.cols, shape=layout.shape, block_size=8)
    with pytest.raises(TypeError):  # with other lists it would have the schedules of the old ones
        dataclasses.replace(layout, rows=layout.cols)  # pyright: ignore
    assert pickle.loads(pickle.dumps(layout)) == copy.deepcopy(layout) == layout


def test_repr():
    assert repr(Layout.from_mask(MASK, 8)) == "Layout(shape=(24, 32), block_size=8, num_blocks=5, density=0.4167)"
    placeholder = jax.tree.map(lambda leaf: None, Layout.from_mask(MASK, 8))
    assert repr(placeholder) == "Layout(shape=(24, 32), block_size=8)"


# ------------------------------------------------------------------------------------------------------------ pytree


def test_leaves_have_names():
    paths, structure = jax.tree_util.tree_flatten_with_path(Layout.from_mask(MASK, 8))
    assert [jax.tree_util.keystr(path) for path, _ in paths] == ["." + name for name in LEAVES + SCHEDULES]
    rebuilt = jax.tree.unflatten(structure, [object()] * len(paths))  # whatever JAX puts there meanwhile
    assert rebuilt.shape == (24, 32)
    assert rebuilt.block_size == 8


def test_as_many_blocks_need_no_new_compilation():
    traces = []

    @jax.jit
    def f(layout):
        traces.append(layout.num_blocks)
        return layout.cols + layout.rows

    for mask in (MASK, MASK[::-1], MASK[:, ::-1]):
        np.testing.assert_array_equal(f(Layout.from_mask(mask, 8)), np.add(*np.nonzero(mask)))
    assert traces == [5]
    f(Layout.from_mask(MASK, 16))
    f(Layout.from_mask(np.ones((1, 5)), 8))
    assert traces == [5, 5, 5]


def test_stacks_are_mapped_and_scanned():
    layouts = [Layout.from_mask(mask, 8) for mask in (MASK, MASK[::-1], MASK[:, ::-1])]
    stacked = stack(layouts)
    assert stacked.num_blocks == 5
    assert stacked.density == layouts[0].density
    expected = [np.asarray(layout.perm_t) for layout in layouts]
    np.testing.assert_array_equal(jax.vmap(lambda layout: layout.perm_t)(stacked), expected)
    _, scanned = jax.lax.scan(lambda carry, layout: (carry, layout.perm_t), 0, stacked)
    np.testing.assert_array_equal(scanned, expected)
    assert jax.tree.map(lambda leaf: leaf[1], stacked) == layouts[1]


def test_a_stack_has_no_mask_and_no_file(tmp_path):
    stacked = stack([Layout.from_mask(MASK, 8)] * 3)
    for read in (stacked.to_mask, lambda: stacked.save(tmp_path / "layout.npz")):
        with pytest.raises(ValueError, match=r"`layout` must be one layout; got a stack of shape \(3,\).*jax.tree.map"):
            read()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad, jax.checkpoint], ids=lambda f: f.__name__)
def test_is_made_while_something_else_is_traced(transform):
    made = []

    def f(x):
        made.append(Layout.from_mask(MASK, 8))
        return x * made[-1].num_blocks

    transform(f)(jnp.ones((2,)) if transform is jax.vmap else 1.0)
    assert made[0] == Layout.from_mask(MASK, 8)  # so its arrays outlive the trace


def test_a_traced_mask_or_layout_is_refused_by_name():
    with pytest.raises(TypeError, match="`mask` must be concrete"):
        jax.jit(lambda mask: Layout.from_mask(mask, 8).indices)(MASK)
    layout = Layout.from_mask(MASK, 8)
    for use in (hash, lambda traced: traced == layout, Layout.to_mask):
        with pytest.raises(TypeError, match="A traced layout has no contents.*outside of jit"):
            jax.jit(lambda traced, use=use: use(traced))(layout)
    assert jax.jit(lambda traced: traced == traced)(layout)


# ------------------------------------------------------------------------------------------------------------- files


@given(masks, block_sizes)
def test_files_give_the_layout_back(tmp_path_factory, mask, b):
    path = tmp_path_factory.mktemp("layout") / "any name"
    layout = Layout.from_mask(mask, b)
    layout.save(path)
    assert Layout.load(str(path)) == layout
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    with np.load(path, allow_pickle=False) as file:  # readable with NumPy alone
        assert file["rows"].dtype == file["cols"].dtype == np.int32
        np.testing.assert_array_equal((file["rows"], file["cols"]), np.nonzero(mask))


def test_padding_is_kept_in_files(tmp_path):
    layout = padded(Layout.from_mask(MASK, 8))
    layout.save(tmp_path / "layout.npz")
    assert Layout.load(tmp_path / "layout.npz") == layout


def test_a_failed_save_leaves_the_older_file(tmp_path, monkeypatch):
    path = tmp_path / "layout.npz"
    Layout.from_mask(MASK, 8).save(path)

    def fail(file, **fields):
        file.write(b"half a ")
        raise OSError("disk full")

    monkeypatch.setattr(_layout_file.np, "savez", fail)
    with pytest.raises(OSError, match="disk full"):
        Layout.from_mask(~MASK, 8).save(path)
    monkeypatch.undo()
    assert Layout.load(path) == Layout.from_mask(MASK, 8)
    assert os.listdir(tmp_path) == ["layout.npz"]


def written(layout, **changes):
    """The bytes of a layout's file with some fields changed, or left out where None."""
    places = {name: np.asarray(getattr(layout, name)) for name in ("rows", "cols", "indptr", "indptr_t")}
    fields = {"format": 2, "shape": layout.shape, "block_size": layout.block_size, **places, **changes}
    file = io.BytesIO()
    np.savez(file, **{name: value for name, value in fields.items() if value is not None})  # pyright: ignore
    return file.getvalue()


SOUND = Layout.from_mask(MASK, 8)


def int32(*values):
    return np.array(values, np.int32)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"format": 3}, "must hold layout format 2 or 1; .* holds 3. Update bsjax"),
        ({"format": [1, 2]}, r"must hold layout format 2 or 1; .* holds \[1, 2\]"),
        ({"rows": None, "shape": None}, r"lacks \['rows', 'shape'\]"),
        ({"block_size": 12}, r"do not fit \[3, 4\] block rows and columns"),
        ({"block_size": 4}, r"do not fit \[3, 4\] block rows and columns"),
        ({"block_size": 4, "shape": (12, 16)}, "`block_size` must be one of .*; got 4"),
        ({"block_size": 0}, "block_size is 0"),
        ({"block_size": 8.0}, "block_size is 8.0"),
        ({"block_size": [8, 8]}, r"block_size is \[8, 8\]"),
        ({"shape": (24, 33)}, "`shape` must be .* two multiples of `block_size`, 8"),
        ({"shape": (-24, 32)}, r"shape is \[-24, 32\]"),
        ({"shape": (24.0, 32.0)}, r"shape is \[24.0, 32.0\]"),
        ({"shape": 24}, "shape is 24"),
        ({"shape": (2**60, 32)}, r"do not fit \[3, 4\] block rows and columns"),
        ({"cols": np.zeros(5)}, r"cols is float64 of shape \(5,\), not int32"),
        ({"rows": np.zeros((5, 1), np.int32)}, r"rows is int32 of shape \(5, 1\), not int32 with one dimension"),
        ({"rows": int32(0, 0, 2, 2)}, "4 rows, 5 cols"),
        ({"indptr": int32(0, 3, 2, 5)}, "indptr is not what rows and cols say"),
        ({"indptr_t": int32(0, 2, 2, 4, 6)}, "indptr_t is not what rows and cols say"),
        ({"cols": int32(0, 2, 0, 2, 4)}, "neither inside the matrix nor -1"),
        ({"rows": int32(0, 0, 2, 2, 3)}, "neither inside the matrix nor -1"),
        ({"rows": int32(0, 0, 2, 2, -1)}, "neither inside the matrix nor -1"),
        ({"cols": int32(0, 0, 0, 2, 3)}, r"must name each place once; got \[0, 0\] as blocks 0 and 1"),
        ({"rows": int32(0, 2, 2, 2, 2)}, "must name each place once"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_wrong_contents_are_refused(tmp_path, changes, sentence):
    path = tmp_path / "layout.npz"
    path.write_bytes(written(SOUND))
    assert Layout.load(path) == SOUND
    path.write_bytes(written(SOUND, **changes))
    with pytest.raises(ValueError, match=sentence):
        Layout.load(path)


def test_files_of_the_first_format_are_read(tmp_path):
    lists = {name: np.asarray(getattr(SOUND, name)) for name in ("indices", "indices_t", "perm_t")}
    (tmp_path / "layout.npz").write_bytes(written(SOUND, format=1, cols=None, **lists))
    assert Layout.load(tmp_path / "layout.npz") == SOUND


def test_save_through_a_symbolic_link_keeps_it(tmp_path):
    (tmp_path / "link.npz").symlink_to("layout.npz")
    for mask in (MASK, ~MASK):  # the file is new, then not
        layout = Layout.from_mask(mask, 8)
        layout.save(tmp_path / "link.npz")
        assert (tmp_path / "link.npz").is_symlink()
        assert Layout.load(tmp_path / "layout.npz") == layout
    assert sorted(os.listdir(tmp_path)) == ["layout.npz", "link.npz"]


def foreign_files():
    array, pickled, other = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(array, np.ones(3))
    np.save(pickled, np.array([{}], object), allow_pickle=True)
    with zipfile.ZipFile(other, "w") as archive:
        archive.writestr("readme.txt", "hello")
    yield from {"nothing": b"", "text": b"block,sparse\n", "npy": array.getvalue()}.items()
    yield from {"pickle": pickled.getvalue(), "zip": other.getvalue(), "half": written(SOUND)[:900]}.items()
    yield "objects", written(SOUND, rows=np.array([None] * 5))
    # Members that are junk under a right checksum: what ast, struct and NumPy's header parser raise differs.
    rng = np.random.default_rng(0)
    sound = zipfile.ZipFile(io.BytesIO(written(SOUND)))
    for i in range(40):
        junk = io.BytesIO()
        with zipfile.ZipFile(junk, "w") as archive:
            for name in sound.namelist():
                member = bytearray(sound.read(name))
                if name == sound.namelist()[i % len(sound.namelist())]:
                    start = int(rng.integers(0, 128))
                    member[start : start + 12] = rng.bytes(12) if i % 2 else b"{'descr': (("
                archive.writestr(name, bytes(member))
        yield f"junk{i}", junk.getvalue()


@pytest.mark.parametrize("contents", [pytest.param(value, id=name) for name, value in foreign_files()])
def test_other_files_are_refused(tmp_path, contents):
    path = tmp_path / "layout.npz"
    path.write_bytes(contents)
    with pytest.raises(
        ValueError, match="`path` must (be a file that Layout.save wrote|hold layout format 2 or 1).*layout.npz"
    ):
        Layout.load(path)


def test_no_file(tmp_path):
    with pytest.raises(FileNotFoundError):
        Layout.load(tmp_path / "layout.npz")


@given(st.data())
@hypothesis.settings(max_examples=200)  # each takes a millisecond
def test_damage_is_noticed(tmp_path_factory, data):
    """Any byte of a file can change: the layout comes back as it was, or an error says that the file is damaged."""
    contents = bytearray(written(SOUND))
    place = data.draw(st.integers(0, len(contents) - 1))
    contents[place] ^= data.draw(st.integers(1, 255))
    path = tmp_path_factory.mktemp("damage") / "layout.npz"
    path.write_bytes(contents)
    try:
        assert Layout.load(path) == SOUND
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017 - either way is right, only another exception is not
