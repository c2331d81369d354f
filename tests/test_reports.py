"""What users of other libraries reported, tried on this one: each case, and its neighbours of the same kind."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import networkx
import numpy as np
import optax
import pytest
import scipy.sparse
from flax import linen, nnx
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bsjax
from bsjax import Layout
from bsjax.nn import BlockSparseLinear, Pattern
from bsjax.testing import integers, oracle

B = 8
MASK = np.array([[1, 0, 1, 0], [0, 0, 1, 0], [1, 0, 1, 0]], bool)
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]


@pytest.fixture
def layout():
    return Layout.from_mask(MASK, B)


def operands(layout, rows=5):
    k, n = layout.shape
    b = layout.block_size
    return integers(0, (rows, k)), integers(1, (layout.num_blocks, b, b)), integers(2, (rows, n))


def same(actual, expected):
    np.testing.assert_array_equal(np.asarray(actual), np.asarray(expected))


def calls(text, op):
    return text.count(f'custom_call_target="bsjax_{op}"') + text.count(f"@bsjax_{op}(")


def all_passes(x, blocks, dy, layout):
    y, pull = jax.vjp(lambda x, blocks: bsjax.spmm(x, blocks, layout), x, blocks)
    return y, *pull(dy), bsjax.sddmm(x, dy, layout)


def check_all_passes(x, blocks, dy, layout):
    y, dx, dblocks, again = all_passes(x, blocks, dy, layout)
    same(y, oracle.spmm(x, blocks, layout))
    same(dx, oracle.spmm(dy, blocks, layout, transpose=True))
    same(dblocks, oracle.sddmm(x, dy, layout))
    same(again, dblocks)


# ----------------------------------------------------------------------------------------------------- without jit


def test_all_passes_run_without_jit(layout):
    x, blocks, dy = operands(layout)
    with jax.disable_jit():
        check_all_passes(x, blocks, dy, layout)
        y = jax.vmap(lambda w: bsjax.spmm(x, w, layout))(jnp.stack([blocks, 2 * blocks]))
        same(y[1], 2 * y[0])
        layer = BlockSparseLinear(layout, rngs=nnx.Rngs(0))
        assert nnx.grad(lambda layer: layer(x).sum())(layer).kernel.shape == blocks.shape


@pytest.mark.parametrize(("debug", "value"), [(jax.debug_infs, 3e38), (jax.debug_nans, np.nan)])
def test_what_is_not_finite_is_found(layout, debug, value):
    x, blocks, dy = operands(layout)
    with debug(True):
        jax.block_until_ready(jax.jit(lambda x: bsjax.spmm(x, blocks, layout))(x))
        for product in (lambda x: bsjax.spmm(x, blocks, layout), lambda x: bsjax.sddmm(x, dy, layout)):
            with pytest.raises(FloatingPointError):
                jax.block_until_ready(jax.jit(product)(jnp.full_like(x, value)))


# -------------------------------------------------------------------------------------------------- places by type


@pytest.mark.parametrize("traced", [False, True], ids=["host", "traced"])
@pytest.mark.parametrize("dtype", INTEGERS)
def test_places_of_every_integer_type(dtype, traced):
    """Also past what the type of a place could count, and numbers that would wrap around into the matrix."""
    with jax.enable_x64(dtype.endswith("64")):
        limit = np.iinfo(dtype)
        rows = np.array([100, 0, limit.max, limit.min, 3], dtype)
        cols = np.array([0, 0, 0, limit.max, limit.max], dtype)
        shape = (2400, B)

        def make(rows, cols):
            return Layout.from_indices(rows, cols, shape, B)

        layout = (jax.jit(make) if traced else make)(rows, cols)
        last = (limit.max, 0) if limit.max < 300 else (-1, -1)
        expected = [(100, 0), (0, 0), last, (-1, -1), (-1, -1)]
        same(np.stack([layout.rows, layout.cols], 1), expected)
        assert layout.rows.dtype == layout.perm.dtype == np.int32
        wide = Layout.from_indices([0, 0], np.array([2, 100], dtype), (B, 2400), B)
        same(wide.cols, [2, 100])


@pytest.mark.parametrize("dtype", [bool, np.float32, np.complex64])
def test_places_of_other_types_are_refused(dtype):
    for make in (Layout.from_indices, jax.jit(Layout.from_indices, static_argnums=(2, 3))):
        with pytest.raises(TypeError, match="`rows` must be integers; got"):
            make(np.zeros(2, dtype), np.zeros(2, np.int32), (16, 16), B)


# -------------------------------------------------------------------------------------------- any module, any transform


class Holder(linen.Module):
    """A module of somebody else that holds layouts in a container."""

    held: object

    @linen.compact
    def __call__(self, x):
        layouts = jax.tree.leaves(self.held, is_leaf=lambda leaf: isinstance(leaf, Layout))
        return sum(bsjax.linen.BlockSparseLinear(layout)(x) for layout in layouts)


@pytest.mark.parametrize("held", [lambda a: a, lambda a: (a, a), lambda a: [a], lambda a: {"in": {"a": a, "b": (a,)}}])
@pytest.mark.parametrize("transform", [linen.jit, linen.remat], ids=lambda f: f.__name__)
def test_lifted_transforms_of_linen(layout, transform, held):
    x, _, _ = operands(layout)
    plain, lifted = Holder(held(layout)), transform(Holder)(held(layout))
    params = lifted.init(jax.random.key(0), x)
    same(params["params"]["BlockSparseLinear_0"]["kernel"].shape, (5, B, B))
    loss = lambda module: jax.grad(lambda params: module.apply(params, x).sum())(params)  # noqa: E731
    jax.tree.map(same, loss(lifted), loss(plain))
    transform(bsjax.linen.BlockSparseLinear)(layout).init(jax.random.key(0), x)


# ----------------------------------------------------------------------------------------------------- no members


@pytest.mark.parametrize("members", [0, 1, 3])
def test_vmap_over_any_number_of_members(layout, members):
    """As a dense product gives it, also for none at all."""
    x, blocks, dy = operands(layout)
    many = jnp.broadcast_to(blocks, (members, *blocks.shape))
    xs, dys = jnp.broadcast_to(x, (members, *x.shape)), jnp.broadcast_to(dy, (members, *dy.shape))
    ours, total = (lambda w, x: bsjax.spmm(x, w, layout)), (lambda w, x: bsjax.spmm(x, w, layout).sum())
    for axes in [(0, None), (None, 0), (0, 0)]:
        args = many if axes[0] == 0 else blocks, xs if axes[1] == 0 else x
        assert jax.vmap(ours, axes)(*args).shape == (members, 5, 32)
        dw, dx = jax.vmap(jax.grad(total, (0, 1)), axes)(*args)
        assert dw.shape == many.shape
        assert dx.shape == xs.shape
        summed = jax.grad(lambda w, x, axes=axes: jax.vmap(total, axes)(w, x).sum())(*args)
        assert summed.shape == args[0].shape
        assert jax.jit(jax.vmap(jax.vmap(ours, axes)))(*(arg[None] for arg in args)).shape == (1, members, 5, 32)
    dw = jax.vmap(lambda x, dy: bsjax.sddmm(x, dy, layout))(xs, dys)
    assert dw.shape == many.shape
    assert (np.asarray(dw) == oracle.sddmm(x, dy, layout)).all()


def test_a_symbolic_number_of_members_is_exported(layout):
    x, blocks, dy = operands(layout)
    (members,) = export.symbolic_shape("members")
    shape = jax.ShapeDtypeStruct((members, *blocks.shape), blocks.dtype)

    def f(w):
        return jax.vmap(lambda w: bsjax.spmm(x, w, layout))(w), jax.vmap(
            lambda w: bsjax.sddmm(x, dy * w[0, 0, 0], layout)
        )(w)

    checks = [export.DisabledSafetyCheck.custom_call(f"bsjax_{op}") for op in ("spmm", "sddmm")]
    exported = export.deserialize(export.export(jax.jit(f), disabled_checks=checks)(shape).serialize())
    for number in (1, 4):
        y, dw = exported.call(jnp.broadcast_to(blocks, (number, *blocks.shape)))
        assert y.shape == (number, 5, 32)
        same(y[-1], oracle.spmm(x, blocks, layout))
        assert dw.shape == (number, *blocks.shape)


# ------------------------------------------------------------------------------------------------------- donation


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_a_donated_layer_leaves_the_layout(layout):
    x, blocks, _ = operands(layout)
    layer = BlockSparseLinear(layout, rngs=nnx.Rngs(0))
    nnx.jit(lambda layer, x: layer(x), donate_argnums=0)(layer, x)
    graph, state = nnx.split(BlockSparseLinear(layout, rngs=nnx.Rngs(0)))
    jax.jit(lambda state, x: nnx.merge(graph, state)(x), donate_argnums=0)(state, x)
    same(bsjax.spmm(x, blocks, layout), oracle.spmm(x, blocks, layout))
    assert layout == Layout.from_mask(MASK, B)


def test_two_layers_of_one_layout_train_with_donation():
    layout = Layout.from_mask(np.eye(3), B)
    layers = nnx.List([BlockSparseLinear(layout, rngs=nnx.Rngs(seed)) for seed in range(2)])
    optimizer = nnx.Optimizer(layers, optax.sgd(0.1), wrt=nnx.Param)
    x = integers(0, (4, 24))

    @nnx.jit(donate_argnums=(0, 1))
    def step(layers, optimizer, x):
        loss, grads = nnx.value_and_grad(lambda layers: (layers[1](layers[0](x)) ** 2).mean())(layers)
        optimizer.update(layers, grads)
        return loss

    losses = [float(step(layers, optimizer, x)) for _ in range(3)]
    assert losses[2] < losses[0]
    assert layers[0].layout == layers[1].layout == layout


# -------------------------------------------------------------------------------------------------- explicit meshes


def explicit_mesh():
    return Mesh(np.array(jax.devices()).reshape(8), ("d",), axis_types=(AxisType.Explicit,))


@pytest.mark.mesh
@pytest.mark.parametrize("split", ["x rows", "x features", "blocks", "both", "none"])
def test_cotangents_have_the_sharding_of_their_primals(split):
    layout = Layout.from_mask(np.ones((8, 8), bool), B)
    x, blocks, dy = operands(layout, rows=16)
    specs = {
        "x rows": (P("d"), P(), P("d")),
        "x features": (P(None, "d"), P(), P(None, "d")),
        "blocks": (P(), P("d"), P()),
        "both": (P("d"), P("d"), P("d")),
        "none": (P(), P(), P()),
    }[split]
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in zip((x, blocks, dy), specs, strict=True)]

        def loss(x, blocks):
            return (bsjax.spmm(x, blocks, layout) ** 2).sum()

        def sampled(x, dy):
            return (bsjax.sddmm(x, dy, layout) ** 2).sum()

        grads = jax.jit(jax.grad(loss, (0, 1)))(*placed[:2])
        more = jax.jit(jax.grad(sampled, (0, 1)))(placed[0], placed[2])
        for g, primal in zip((*grads, *more), (placed[0], placed[1], placed[0], placed[2]), strict=True):
            assert jax.typeof(g).sharding == jax.typeof(primal).sharding
    for g, expected in zip(grads, jax.grad(loss, (0, 1))(x, blocks), strict=True):
        same(g, expected)
    for g, expected in zip(more, jax.grad(sampled, (0, 1))(x, dy), strict=True):
        same(g, expected)


@pytest.mark.mesh
@pytest.mark.parametrize("b", [8, 64, 128])
def test_a_pattern_is_made_on_an_explicit_mesh(b):
    layout = Layout.from_mask(MASK, b)
    x, blocks, dy = operands(layout, rows=16)
    mesh = explicit_mesh()
    with jax.set_mesh(mesh):
        x, dy = (jax.device_put(a, NamedSharding(mesh, P("d"))) for a in (x, dy))

        @jax.jit
        def run(x, dy, rows, cols):
            own = Layout.from_indices(rows, cols, (3 * b, 4 * b), b)
            return bsjax.spmm(x, blocks, own), bsjax.sddmm(x, dy, own)

        y, dblocks = run(x, dy, layout.rows, layout.cols)
        assert jax.typeof(y).sharding.spec[0] == "d"
    same(y, oracle.spmm(x, blocks, layout))
    same(dblocks, oracle.sddmm(x, dy, layout))


# ------------------------------------------------------------------------------------------------ places named twice


def test_a_place_named_twice_is_refused_on_the_host():
    with pytest.raises(
        ValueError, match=r"name each place once; got \[1, 0\] as blocks 0 and 3. Add the two .* padding"
    ):
        Layout.from_indices([1, 0, -1, 1, -1], [0, 0, 5, 0, 5], (16, 8), B)  # padding may repeat


def test_a_traced_place_named_twice_is_its_first_block():
    rows, cols = np.array([2, 0, 2, 0, 1, 2]), np.array([1, 0, 1, 0, 1, 1])
    layout = jax.jit(lambda rows, cols: Layout.from_indices(rows, cols, (24, 16), B))(rows, cols)
    same(layout.rows, [2, 0, -1, -1, 1, -1])
    assert layout == Layout.from_indices(layout.rows, layout.cols, (24, 16), B)
    assert layout.density == 0.5
    x, blocks, dy = operands(layout)
    check_all_passes(x, blocks, dy, layout)
    identity = jax.jit(lambda: Layout.from_indices(jnp.zeros(2, int), jnp.zeros(2, int), (8, 8), 8))()
    init = bsjax.nn.initializers
    same(bsjax.spmm(jnp.eye(8), init.identity(identity)(None, (2, 8, 8)), identity), np.eye(8))
    w = bsjax.spmm(jnp.eye(8), init.orthogonal(identity)(jax.random.key(0), (2, 8, 8)), identity)
    np.testing.assert_allclose(w @ w.T, np.eye(8), atol=1e-5)


# ------------------------------------------------------------------------------------------------------- checkpoint


def three_layers(layout):
    def f(x, weights):
        for w in weights:
            x = jnp.tanh(bsjax.spmm(x, w, layout))
        return x.sum()

    return f


def spmm_calls(policy, f, *args):
    checkpointed = jax.checkpoint(f, policy=policy) if policy else f
    return calls(jax.jit(jax.value_and_grad(checkpointed, (0, 1))).lower(*args).as_text(), "spmm")


def test_a_policy_keeps_the_products():
    layout = Layout.from_mask(np.ones((3, 3), bool), B)
    x, blocks, _ = operands(layout)
    args = three_layers(layout), x, [0.1 * blocks] * 3
    policies = jax.checkpoint_policies
    plain = spmm_calls(None, *args)
    assert plain == 6  # three forward, three back
    # The last one's result is needed for nothing else than tanh's slope, and is kept too.
    assert spmm_calls(bsjax.save_products, *args) == plain
    both = policies.save_from_both_policies(policies.dots_saveable, bsjax.save_products)
    assert spmm_calls(both, *args) == plain
    assert spmm_calls(policies.everything_saveable, *args) == plain
    for policy in (policies.nothing_saveable, policies.dots_saveable):  # as the docstring says
        assert spmm_calls(policy, *args) == plain + 3
    f = jax.checkpoint(args[0], policy=bsjax.save_products)
    for ours, expected in zip(jax.grad(f, (0, 1))(*args[1:]), jax.grad(args[0], (0, 1))(*args[1:]), strict=True):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), ours, expected)


# ------------------------------------------------------------------------------------------------ compilation cache


CACHED = """
import os
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax, jax.numpy as jnp, numpy as np, bsjax
from jax.sharding import Mesh, PartitionSpec as P
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
layout = bsjax.Layout.from_mask(np.eye(2), 8)
mesh = Mesh(np.array(jax.devices()), ("d",))
f = lambda x, w: bsjax.spmm(x, w, layout)
jax.jit(f)(jnp.ones((4, 16)), jnp.ones((2, 8, 8)))
jax.jit(jax.shard_map(f, mesh=mesh, in_specs=(P("d"), P()), out_specs=P("d")))(jnp.ones((4, 16)), jnp.ones((2, 8, 8)))
"""


def test_the_persistent_cache_is_hit_by_another_process(tmp_path):
    """On one device and under shard_map. (Under jit over a mesh the key holds an id of JAX's custom_partitioning.)"""

    def run():
        environ = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path), "JAX_PLATFORMS": "cpu"}
        subprocess.run([sys.executable, "-c", CACHED], env=environ, check=True)
        return {path.name for path in tmp_path.iterdir() if path.name.endswith("-cache")}

    first = run()
    assert len(first) >= 2
    assert run() == first


# --------------------------------------------------------------------------------------------- one form of layouts


def many_layouts(number, tmp_path):
    """Layouts of one shape, block size and number of blocks, each made another way, and the mask of each."""
    rng = np.random.default_rng(0)
    for i in range(number):
        places = rng.permutation(8 * 6)[:15]
        if i % 5 == 1:
            places = np.arange(15)  # all in a corner
        rows, cols = places // 6, places % 6
        mask = np.zeros((8, 6), bool)
        mask[rows, cols] = True
        shape = (8 * 16, 6 * 16)
        way = i % 5
        if way == 0:
            layout = Layout.from_mask(mask, 16)
        elif way in (1, 2):
            layout = Layout.from_indices(rows, cols, shape, 16)
        elif way == 3:
            layout = jax.jit(lambda rows, cols: Layout.from_indices(rows, cols, (128, 96), 16))(rows, cols)
        else:
            Layout.from_mask(mask, 16).save(tmp_path / "layout.npz")
            layout = Layout.load(tmp_path / "layout.npz")
        yield layout


def test_twenty_patterns_compile_once(tmp_path):
    compiled = []

    @jax.jit
    def step(x, blocks, dy, layout):
        compiled.append(layout)
        return all_passes(x, blocks, dy, layout)

    layouts = list(many_layouts(20, tmp_path))
    assert len({(jax.tree.structure(a), *(leaf.shape for leaf in jax.tree.leaves(a))) for a in layouts}) == 1
    for layout in layouts:
        x, blocks, dy = operands(layout)
        y, dx, dblocks, _ = step(x, blocks, dy, layout)
        same(y, oracle.spmm(x, blocks, layout))
        same(dx, oracle.spmm(dy, blocks, layout, transpose=True))
        same(dblocks, oracle.sddmm(x, dy, layout))
    assert len(compiled) == 1


def test_layouts_of_all_makers_stack_and_pass_through_control_flow(tmp_path):
    layouts = list(many_layouts(5, tmp_path))
    x, blocks, _ = operands(layouts[0])
    products = [bsjax.spmm(x, blocks, layout) for layout in layouts]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layouts)
    same(jax.vmap(lambda layout: bsjax.spmm(x, blocks, layout))(stacked), products)
    same(jax.lax.scan(lambda carry, layout: (carry, bsjax.spmm(x, blocks, layout)), 0, stacked)[1], products)

    @jax.jit
    def chosen(first, rows, cols):
        made = Layout.from_indices(rows, cols, (128, 96), 16)
        layout = jax.lax.cond(first, lambda: layouts[0], lambda: made)
        return bsjax.spmm(x, blocks, layout)

    for first in (True, False):
        same(chosen(first, layouts[1].rows, layouts[1].cols), products[not first])

    def move(layout, _):
        new = Layout.from_indices((layout.rows + 1) % 8, layout.cols, (128, 96), 16)
        return new, bsjax.spmm(x, blocks, layout)

    last, scanned = jax.lax.scan(move, layouts[0], length=9)
    same(scanned[0], scanned[8])
    same(last.rows, (np.asarray(layouts[0].rows) + 1) % 8)


@pytest.mark.parametrize("traced", [False, True], ids=["host", "traced"])
@pytest.mark.parametrize("b", [8, 16, 32, 64, 128])
def test_blocks_are_in_the_order_of_their_places(b, traced):
    rng = np.random.default_rng(b)
    places = rng.permutation(5 * 7)[:17]
    rows, cols = places // 7, places % 7
    make = lambda rows, cols: Layout.from_indices(rows, cols, (5 * b, 7 * b), b)  # noqa: E731
    layout = (jax.jit(make) if traced else make)(rows, cols)
    same(layout.rows, rows)
    same(layout.cols, cols)
    x, blocks, dy = operands(layout)
    w = np.zeros((5, 7, b, b))
    w[rows, cols] = blocks
    same(bsjax.spmm(x, blocks, layout), np.asarray(x) @ w.transpose(0, 2, 1, 3).reshape(layout.shape))
    check_all_passes(x, blocks, dy, layout)
    assert layout == make(rows, cols)
    if not (np.diff(places) > 0).all():
        assert layout != Layout.from_mask(layout.to_mask(), b)


# ----------------------------------------------------------------------------- maps over a whole training state


def test_a_pattern_of_another_dtype_is_named():
    layer = BlockSparseLinear(Layout.from_mask(np.eye(3), B), rngs=nnx.Rngs(0))
    x, blocks, _ = operands(layer.layout)
    graph, state = nnx.split(layer)
    maps = [
        lambda leaf: leaf.astype(jnp.bfloat16),
        lambda leaf: 0.9 * leaf.astype(jnp.float32),
        lambda leaf: leaf.astype(jnp.int16),
    ]
    for change in maps:
        harmed = jax.tree.map(change, layer.layout)
        for call in (
            lambda: nnx.merge(graph, jax.tree.map(change, state))(x.astype(jnp.bfloat16)),  # noqa: B023
            lambda: jax.jit(bsjax.spmm)(x, blocks, harmed),  # noqa: B023
            lambda: bsjax.sddmm(x, x, harmed),  # noqa: B023
            lambda: bsjax.linen.BlockSparseLinear(harmed),  # noqa: B023
            lambda: BlockSparseLinear(harmed, rngs=nnx.Rngs(0)),  # noqa: B023
        ):
            with pytest.raises(TypeError, match="`layout` must hold int32 arrays.*its `rows` came as .*nnx.Param"):
                call()


INTEGER_MAPS = {
    "doubled": lambda leaf: leaf * 2,
    "halved": lambda leaf: leaf // 2,
    "counted on": lambda leaf: leaf + 1,
    "zeros": jnp.zeros_like,
    "ones": jnp.ones_like,
    "negated": lambda leaf: -leaf,
    "absolute": jnp.abs,
    "clipped": lambda leaf: jnp.clip(leaf, -100, 100),
    "signs": jnp.sign,
    "averaged": lambda leaf: (0.9 * leaf.astype(jnp.float32) + 0.1 * leaf.astype(jnp.float32)).astype(leaf.dtype),
    "halves of float": lambda leaf: leaf.astype(jnp.bfloat16).astype(leaf.dtype),
    "reversed": lambda leaf: leaf[::-1],
    "rolled": lambda leaf: jnp.roll(leaf, 1),
    "squared": lambda leaf: leaf * leaf,
    "modulo": lambda leaf: leaf % 7,
}


def refused(call):
    """On a CPU a sentence, on a GPU, where no handler reads the arrays, nothing but NaN."""
    if jax.default_backend() == "gpu":
        return all(np.isnan(np.asarray(y, np.float32)).all() for y in jax.tree.leaves(call()))
    with pytest.raises(Exception, match="the layout's arrays were changed"):
        jax.block_until_ready(call())
    return True


@pytest.mark.parametrize("change", INTEGER_MAPS)
@pytest.mark.parametrize("b", [8, 32, 64, 128])
def test_integer_arithmetic_on_a_pattern_is_noticed(b, change):
    """In all three passes, for a layout and for the state of a layer."""
    layout = Layout.from_mask(MASK, b)
    x, blocks, dy = (a.astype(jnp.bfloat16) for a in operands(layout, rows=64))
    harmed = jax.tree.map(INTEGER_MAPS[change], layout)
    assert refused(lambda: bsjax.spmm(x, blocks, harmed))
    assert refused(lambda: bsjax.spmm(dy, blocks, harmed, transpose=True))
    assert refused(lambda: bsjax.sddmm(x, dy, harmed))
    graph, state = nnx.split(BlockSparseLinear(layout, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)))
    assert refused(lambda: nnx.merge(graph, jax.tree.map(INTEGER_MAPS[change], state))(x))


def test_a_pattern_cannot_be_trained():
    layer = BlockSparseLinear(Layout.from_mask(np.eye(3), B), rngs=nnx.Rngs(0))
    x, _, _ = operands(layer.layout)
    graph, state = nnx.split(layer)
    with pytest.raises(TypeError, match="requires real- or complex-valued inputs"):
        jax.grad(lambda state: nnx.merge(graph, state)(x).sum())(state)
    grads = jax.grad(lambda state: nnx.merge(graph, state)(x).sum(), allow_int=True)(state)
    assert {leaf.dtype for leaf in jax.tree.leaves(nnx.state(nnx.merge(graph, grads), Pattern))} == {jax.dtypes.float0}


# ------------------------------------------------------------------------------------------------------------ export


def test_layouts_are_exported_as_arguments(layout):
    x, blocks, _ = operands(layout)
    other = Layout.from_mask(MASK[::-1], B)

    def f(x, held):
        return bsjax.spmm(x, held["blocks"], held["layouts"][0]), held["layouts"]

    checks = [export.DisabledSafetyCheck.custom_call("bsjax_spmm")]
    held = {"blocks": blocks, "layouts": (layout,)}
    exported = export.deserialize(export.export(jax.jit(f), disabled_checks=checks)(x, held).serialize())
    y, (given,) = exported.call(x, {"blocks": blocks, "layouts": (other,)})
    same(y, oracle.spmm(x, blocks, other))
    assert given == other


# --------------------------------------------------------------------------------------------------------- ensembles


def test_an_ensemble_of_one_pattern_is_one_product(layout):
    """The axes that the docstring names: the parameters are stacked, the pattern is not."""
    axes = nnx.StateAxes({Pattern: None, ...: 0})
    x, _, _ = operands(layout)

    @nnx.vmap(in_axes=0, out_axes=axes)
    def make(key):
        return BlockSparseLinear(layout, rngs=nnx.Rngs(key))

    members = make(jax.random.split(jax.random.key(0), 6))
    assert members.kernel.shape == (6, 5, B, B)
    assert members.layout == layout
    run = nnx.jit(nnx.vmap(lambda layer, x: layer(x), in_axes=(axes, None)))
    text = run.lower(members, x).as_text()
    assert calls(text, "spmm") == 1
    assert "while" not in text
    y = run(members, x)
    stacked = nnx.vmap(lambda key: BlockSparseLinear(layout, rngs=nnx.Rngs(key)))(
        jax.random.split(jax.random.key(0), 6)
    )
    np.testing.assert_allclose(y, nnx.vmap(lambda layer, x: layer(x), in_axes=(0, None))(stacked, x), rtol=1e-5)


# -------------------------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("kind", ["csr_array", "csc_matrix", "coo_array", "lil_array", "bsr_array", "dia_array"])
def test_sparse_masks_of_scipy(kind):
    assert Layout.from_mask(getattr(scipy.sparse, kind)(MASK.astype(float)), B) == Layout.from_mask(MASK, B)
    with pytest.raises(ValueError, match="`mask` must hold 0 and 1 only; got 2"):
        Layout.from_mask(getattr(scipy.sparse, kind)(2.0 * MASK), B)


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        (networkx.path_graph(3), "got a networkx Graph. Give its adjacency matrix.*to_numpy_array"),
        (networkx.DiGraph([(0, 1)]), "got a networkx DiGraph"),
        (Layout.from_mask(MASK, B), r"got a bsjax.Layout.*Layout.from_mask\(layout.to_mask\(\), block_size\)"),
    ],
    ids=["graph", "digraph", "layout"],
)
def test_masks_of_no_one_meaning_are_named(mask, sentence):
    with pytest.raises(TypeError, match=sentence):
        Layout.from_mask(mask, B)


@pytest.mark.parametrize("shape", [16, None, (16,), (16, 16, 16), (16, 12), (-8, 8), (16.0, 16), "16", (True, 8)])
def test_shapes_that_are_none(shape):
    with pytest.raises(ValueError, match=r"`shape` must be \(k, n\) of `w`, two multiples of `block_size`, 8; got"):
        Layout.from_indices([0], [0], shape, B)
