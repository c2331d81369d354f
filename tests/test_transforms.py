"""spmm and sddmm under every transformation of JAX, on eight CPU devices; compiled text shows what must be absent."""

import concurrent.futures
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bsjax
from bsjax import _ffi

B = 8
MASK = np.array([[1, 0, 1, 0], [0, 0, 1, 0], [1, 0, 1, 0]], bool)  # an empty column, a full one, an odd number of rows


@pytest.fixture
def layout():
    return bsjax.Layout.from_mask(MASK, B)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))


def dense(blocks, layout):
    """Scatters blocks into w, differentiably: the answer of every test here comes from jnp alone."""
    k, n = layout.shape
    b = layout.block_size
    w = jnp.zeros((k // b, n // b, b, b), blocks.dtype).at[layout.rows, layout.cols].set(blocks)
    return w.transpose(0, 2, 1, 3).reshape(k, n)


def dense_spmm(x, blocks, layout, transpose=False):
    w = dense(blocks, layout)
    return jnp.matmul(x, w.T if transpose else w, precision="highest")


def close(actual, expected):
    """Equal up to the rounding of sums in float32: a small element is a difference of ones as large as the largest."""

    def compare(a, e):
        np.testing.assert_allclose(a, e, rtol=2e-5, atol=2e-5 * np.abs(e).max(initial=1))

    jax.tree.map(compare, actual, expected)


def loss(f):
    return lambda *args: jnp.sum(jnp.sin(f(*args)))


def collectives(text):
    return re.findall(r"\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)(?:-start)?\(", text)


def custom_calls(text, op):
    return len(re.findall(rf'custom_call_target="bsjax_{op}"|@bsjax_{op}\(', text))


def test_jit_and_eager_agree(layout):
    x, blocks = normal(0, 5, 24), normal(1, layout.num_blocks, B, B)
    expected = dense_spmm(x, blocks, layout)
    close(bsjax.spmm(x, blocks, layout), expected)
    close(jax.jit(bsjax.spmm)(x, blocks, layout), expected)


@pytest.mark.parametrize("transpose", [False, True])
def test_gradients_to_second_order(layout, transpose):
    x = normal(0, 5, 32 if transpose else 24)
    blocks = normal(1, layout.num_blocks, B, B)
    ours = lambda x, w: bsjax.spmm(x, w, layout, transpose=transpose)  # noqa: E731
    plain = lambda x, w: dense_spmm(x, w, layout, transpose)  # noqa: E731
    close(jax.grad(loss(ours), (0, 1))(x, blocks), jax.grad(loss(plain), (0, 1))(x, blocks))

    def second(f):
        inner = jax.grad(loss(f), (0, 1))
        return jax.grad(lambda x, w: sum(jnp.sum(jnp.cos(g)) for g in inner(x, w)), (0, 1))(x, blocks)

    close(second(ours), second(plain))


def test_sddmm_gradients(layout):
    x, dy = normal(0, 2, 3, 24), normal(1, 2, 3, 32)

    def plain(x, dy):
        w = jnp.matmul(x.reshape(-1, 24).T, dy.reshape(-1, 32), precision="highest")
        return w.reshape(3, B, 4, B).transpose(0, 2, 1, 3)[layout.rows, layout.cols]

    ours = lambda x, dy: bsjax.sddmm(x, dy, layout)  # noqa: E731
    close(ours(x, dy), plain(x, dy))
    close(jax.grad(loss(ours), (0, 1))(x, dy), jax.grad(loss(plain), (0, 1))(x, dy))


AXES = [(0, None), (None, 0), (0, 0), (1, None), (1, 2)]


@pytest.mark.parametrize("axes", AXES, ids=str)
def test_vmap(layout, axes):
    shapes = (5, 24), (layout.num_blocks, B, B)
    x, blocks = (
        normal(seed, *shape) if axis is None else jnp.moveaxis(normal(seed, 6, *shape), 0, axis)
        for seed, (shape, axis) in enumerate(zip(shapes, axes, strict=True))
    )
    ours = jax.vmap(lambda x, w: bsjax.spmm(x, w, layout), axes)
    plain = jax.vmap(lambda x, w: dense_spmm(x, w, layout), axes)
    close(ours(x, blocks), plain(x, blocks))
    grad_ours = jax.vmap(jax.grad(loss(lambda x, w: bsjax.spmm(x, w, layout)), (0, 1)), axes)
    grad_plain = jax.vmap(jax.grad(loss(lambda x, w: dense_spmm(x, w, layout)), (0, 1)), axes)
    close(grad_ours(x, blocks), grad_plain(x, blocks))
    close(jax.grad(loss(ours), (0, 1))(x, blocks), jax.grad(loss(plain), (0, 1))(x, blocks))


@pytest.mark.parametrize("outer", [(0, None), (None, 0), (0, 0)], ids=str)
@pytest.mark.parametrize("inner", [(0, None), (None, 0), (0, 0)], ids=str)
def test_nested_vmap(layout, outer, inner):
    shapes = [(5, 24), (layout.num_blocks, B, B)]
    for axes, size in ((inner, 3), (outer, 2)):
        shapes = [s if a is None else (size, *s) for s, a in zip(shapes, axes, strict=True)]
    x, blocks = normal(0, *shapes[0]), normal(1, *shapes[1])

    def nest(f):
        return jax.vmap(jax.vmap(f, inner), outer)

    ours, plain = (functools.partial(f, layout=layout) for f in (bsjax.spmm, dense_spmm))
    close(nest(ours)(x, blocks), nest(plain)(x, blocks))
    close(nest(jax.grad(loss(ours), (0, 1)))(x, blocks), nest(jax.grad(loss(plain), (0, 1)))(x, blocks))


def test_vmap_over_blocks_copies_no_activations(layout):
    """The activations that all members share reach the handler once, not once a member."""
    f = jax.jit(jax.vmap(lambda w, x: bsjax.spmm(x, w, layout), (0, None)))
    text = f.lower(normal(1, 16, layout.num_blocks, B, B), normal(0, 64, 24)).as_text()
    call = next(line for line in text.splitlines() if "bsjax_spmm" in line)
    assert "tensor<1x64x24xf32>" in call


def test_vmap_over_patterns():
    masks = [np.eye(3, dtype=bool), np.eye(3, dtype=bool)[::-1]]
    layouts = [bsjax.Layout.from_mask(mask, B) for mask in masks]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layouts)
    x, blocks = normal(0, 2, 5, 24), normal(1, 2, 3, B, B)
    expected = jnp.stack([dense_spmm(x[i], blocks[i], layouts[i]) for i in range(2)])
    close(jax.vmap(bsjax.spmm)(x, blocks, stacked), expected)

    def chain(h, member):
        return bsjax.spmm(h, *member), None

    scanned, _ = jax.lax.scan(chain, x[0], (blocks, stacked))
    close(scanned, dense_spmm(dense_spmm(x[0], blocks[0], layouts[0]), blocks[1], layouts[1]))


def test_while_loop(layout):
    square = bsjax.Layout.from_mask(np.ones((2, 2), bool), B)
    x, blocks = normal(0, 3, 16), 0.1 * normal(1, 4, B, B)

    def run(f):
        step = lambda carry: (carry[0] + 1, f(carry[1], blocks, square))  # noqa: E731
        return jax.jit(lambda x: jax.lax.while_loop(lambda c: c[0] < 4, step, (0, x))[1])(x)

    close(run(bsjax.spmm), run(dense_spmm))


def test_remat_recomputes_once(layout):
    x, blocks = normal(0, 5, 24), normal(1, layout.num_blocks, B, B)

    def two(w, x):
        return jnp.sum(jnp.sin(bsjax.spmm(jnp.sin(bsjax.spmm(x, w, layout)), w, layout, transpose=True)))

    plain, remat = jax.grad(two), jax.grad(jax.checkpoint(two))
    close(remat(blocks, x), plain(blocks, x))
    calls = [jax.jit(f).lower(blocks, x).compile().as_text() for f in (plain, remat)]
    if _ffi.native:  # fprop twice, dgrad of the outer product; the first product alone is needed again
        assert custom_calls(calls[0], "spmm") == 3
        assert custom_calls(calls[1], "spmm") <= 5
        assert custom_calls(calls[0], "sddmm") == custom_calls(calls[1], "sddmm") == 2


def test_unused_gradients_are_not_computed(layout):
    x, blocks = normal(0, 5, 24), normal(1, layout.num_blocks, B, B)
    f = jax.jit(jax.grad(lambda w: jnp.sum(bsjax.spmm(x, w, layout))))
    text = f.lower(blocks).compile().as_text()
    assert custom_calls(text, "spmm") == 0
    assert custom_calls(text, "sddmm") == (1 if _ffi.native else 0)


def test_donation(layout):
    x, blocks = normal(0, 5, 24), normal(1, layout.num_blocks, B, B)
    expected = blocks - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(dense_spmm(x, w, layout))))(blocks)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(jnp.sin(bsjax.spmm(x, w, layout))))(w)

    close(step(jnp.copy(blocks), x), expected)


def test_index_leaves_under_grad(layout):
    x, blocks = normal(0, 5, 24), normal(1, layout.num_blocks, B, B)
    f = lambda x, w, layout: jnp.sum(bsjax.spmm(x, w, layout))  # noqa: E731
    gradient = jax.grad(f, argnums=2, allow_int=True)(x, blocks, layout)
    assert all(leaf.dtype == jax.dtypes.float0 for leaf in jax.tree.leaves(gradient))
    _, pull = jax.vjp(f, x, blocks, layout)
    assert pull(jnp.float32(1))[0].shape == x.shape


def test_export_round_trip(layout):
    rows = export.symbolic_shape("rows")[0]
    blocks = normal(1, layout.num_blocks, B, B)
    f = jax.jit(lambda x, w: bsjax.spmm(x, w, layout))
    args = jax.ShapeDtypeStruct((rows, 24), jnp.float32), jax.ShapeDtypeStruct(blocks.shape, jnp.float32)
    safe = [export.DisabledSafetyCheck.custom_call(f"bsjax_{op}") for op in ("spmm", "sddmm")]
    platforms = ("cpu", "cuda")
    exported = export.export(f, platforms=platforms, disabled_checks=safe)(*args)
    restored = export.deserialize(exported.serialize(vjp_order=2))
    assert restored.platforms == platforms
    for m in (1, 7):
        x = normal(0, m, 24)
        close(restored.call(x, blocks), dense_spmm(x, blocks, layout))
        gradient = jax.grad(lambda x, w: jnp.sum(jnp.sin(restored.call(x, w))), (0, 1))(x, blocks)
        plain = jax.grad(lambda x, w: jnp.sum(jnp.sin(dense_spmm(x, w, layout))), (0, 1))(x, blocks)
        close(gradient, plain)


def test_aot_compilation(layout):
    x, blocks = normal(0, 5, 24), normal(1, layout.num_blocks, B, B)
    compiled = jax.jit(bsjax.spmm).lower(x, blocks, layout).compile()
    close(compiled(x, blocks, layout), dense_spmm(x, blocks, layout))


def test_new_pattern_does_not_recompile(layout):
    traces = []

    @jax.jit
    def f(x, w, layout):
        traces.append(1)
        return bsjax.spmm(x, w, layout)

    x, blocks = normal(0, 5, 24), normal(1, layout.num_blocks, B, B)
    other = bsjax.Layout.from_mask(MASK[::-1, ::-1], B)
    for pattern in (layout, other):
        close(f(x, blocks, pattern), dense_spmm(x, blocks, pattern))
    assert len(traces) == 1


@pytest.mark.mesh
def test_retracing_registers_nothing_new(layout):
    x, blocks = normal(0, 5, 24), normal(1, layout.num_blocks, B, B)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    x = jax.device_put(normal(0, 8, 24), NamedSharding(mesh, P("data")))
    before = None
    for repeat in range(50):
        jax.jit(lambda x, w: bsjax.spmm(x, w, layout)).lower(x, blocks)  # a new function each time: a new trace
        size = _ffi.GroupedOp._partitioned.cache_info().currsize
        before = size if repeat == 0 else before
        assert size == before


def test_concurrent_tracing(layout):
    blocks = normal(1, layout.num_blocks, B, B)

    def work(m):
        x = normal(m, m, 24)
        return m, jax.jit(lambda x, w: bsjax.spmm(x, w, layout))(x, blocks)

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for m, y in pool.map(work, range(1, 17)):
            close(y, dense_spmm(normal(m, m, 24), blocks, layout))


def mesh_of(*shape, names=("data", "model")):
    return Mesh(np.array(jax.devices()).reshape(shape), names[: len(shape)])


@pytest.mark.mesh
@pytest.mark.parametrize("check_vma", [True, False])
def test_shard_map_with_replicated_blocks(layout, check_vma):
    mesh = mesh_of(8)
    x, blocks = normal(0, 16, 24), normal(1, layout.num_blocks, B, B)

    def value(x, w):
        return jax.lax.psum(jnp.sum(jnp.sin(bsjax.spmm(x, w, layout))), "data")

    sharded = jax.shard_map(value, mesh=mesh, in_specs=(P("data"), P()), out_specs=P(), check_vma=check_vma)
    plain = lambda x, w: jnp.sum(jnp.sin(dense_spmm(x, w, layout)))  # noqa: E731
    close(jax.jit(sharded)(x, blocks), plain(x, blocks))
    close(jax.jit(jax.grad(sharded, (0, 1)))(x, blocks), jax.grad(plain, (0, 1))(x, blocks))
    text = jax.jit(jax.grad(sharded, 1)).lower(x, blocks).compile().as_text()
    assert set(collectives(text)) <= {"all-reduce"}


@pytest.mark.mesh
def test_shard_map_with_scan(layout):
    """The varying axes of a carry must come out as they went in."""
    square = bsjax.Layout.from_mask(np.ones((2, 2), bool), B)
    x, blocks = normal(0, 16, 16), 0.1 * normal(1, 4, B, B)

    def run(f):
        def local(x, w):
            return jax.lax.scan(lambda h, _: (jnp.tanh(f(h, w, square)), None), x, length=3)[0]

        return local

    mapped = jax.shard_map(run(bsjax.spmm), mesh=mesh_of(8), in_specs=(P("data"), P()), out_specs=P("data"))
    close(jax.jit(mapped)(x, blocks), run(dense_spmm)(x, blocks))
    ours = jax.jit(jax.grad(lambda x, w: jnp.sum(mapped(x, w)), (0, 1)))(x, blocks)
    close(ours, jax.grad(lambda x, w: jnp.sum(run(dense_spmm)(x, w)), (0, 1))(x, blocks))


@pytest.mark.mesh
def test_shard_map_with_sharded_blocks():
    """Each device holds the blocks of its own output columns; y comes out sharded by features."""
    masks = [np.roll(np.eye(3, 2, dtype=bool), shift, 0) for shift in range(8)]
    layouts = [bsjax.Layout.from_mask(mask, B) for mask in masks]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layouts)
    x, blocks = normal(0, 5, 24), normal(1, 8, 2, B, B)

    def local(x, w, layout):
        one = lambda tree: jax.tree.map(lambda leaf: leaf[0], tree)  # noqa: E731
        return bsjax.spmm(x, one(w), one(layout))

    mapped = jax.shard_map(local, mesh=mesh_of(8), in_specs=(P(), P("data"), P("data")), out_specs=P(None, "data"))
    plain = lambda x, w: jnp.concatenate(  # noqa: E731
        [dense_spmm(x, w[i], layouts[i]) for i in range(8)], axis=1
    )
    close(jax.jit(mapped)(x, blocks, stacked), plain(x, blocks))
    ours = jax.grad(lambda x, w: jnp.sum(jnp.sin(mapped(x, w, stacked))), (0, 1))
    close(jax.jit(ours)(x, blocks), jax.grad(loss(plain), (0, 1))(x, blocks))


@pytest.mark.mesh
@pytest.mark.parametrize(
    ("shape", "spec"),
    [((16, 24), P("data")), ((3, 16, 24), P(None, "data")), ((8, 4, 24), P(("data", "model")))],
    ids=["rows", "time-major", "two axes"],
)
def test_sharded_batch_stays_sharded(layout, shape, spec):
    """Plain jit over a mesh: fprop and dgrad need no collective, wgrad one sum, and nothing is gathered."""
    mesh = mesh_of(4, 2)
    blocks = normal(1, layout.num_blocks, B, B)
    x_host = normal(0, *shape)
    x = jax.device_put(x_host, NamedSharding(mesh, spec))
    w = jax.device_put(blocks, NamedSharding(mesh, P()))

    forward = jax.jit(lambda x, w: bsjax.spmm(x, w, layout))
    compiled = forward.lower(x, w).compile()
    assert collectives(compiled.as_text()) == []
    y = forward(x, w)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, spec), len(shape))
    close(y, dense_spmm(x_host, blocks, layout))

    backward = jax.jit(jax.grad(lambda x, w: jnp.sum(jnp.sin(bsjax.spmm(x, w, layout))), (0, 1)))
    text = backward.lower(x, w).compile().as_text()
    assert set(collectives(text)) == {"all-reduce"}
    plain = jax.grad(lambda x, w: jnp.sum(jnp.sin(dense_spmm(x, w, layout))), (0, 1))
    close(backward(x, w), plain(x_host, blocks))


@pytest.mark.mesh
def test_sharded_features_are_right_too(layout):
    """Splitting features is no sensible request, but it must give the right answer."""
    mesh = mesh_of(4, 2)
    x, blocks = normal(0, 16, 24), normal(1, layout.num_blocks, B, B)
    split = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
    close(jax.jit(bsjax.spmm)(split, blocks, layout), dense_spmm(x, blocks, layout))


@pytest.mark.mesh
def test_vmapped_members_over_a_mesh(layout):
    mesh = mesh_of(8)
    x, blocks = normal(0, 8, 5, 24), normal(1, 8, layout.num_blocks, B, B)
    sharding = NamedSharding(mesh, P("data"))
    f = jax.jit(jax.vmap(lambda x, w: bsjax.spmm(x, w, layout)))
    args = jax.device_put((x, blocks), sharding)
    assert collectives(f.lower(*args).compile().as_text()) == []
    close(f(*args), jax.vmap(lambda x, w: dense_spmm(x, w, layout))(x, blocks))


@pytest.mark.mesh
def test_explicit_sharding(layout):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    x_host, blocks = normal(0, 16, 24), normal(1, layout.num_blocks, B, B)
    with jax.set_mesh(mesh):
        x = jax.device_put(x_host, P("data"))
        y = jax.jit(bsjax.spmm)(x, blocks, layout)
        assert jax.typeof(y).sharding.spec == P("data", None)
        gradient = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(bsjax.spmm(x, w, layout)))))(blocks, x)
    close(y, dense_spmm(x_host, blocks, layout))
    close(gradient, jax.grad(lambda w, x: jnp.sum(jnp.sin(dense_spmm(x, w, layout))))(blocks, x_host))


def test_no_dense_weight_gradient():
    """wgrad of a wide sparse layer takes the room of its blocks, not of the dense matrix."""
    side = 64
    layout = bsjax.Layout.from_mask(np.eye(side, dtype=bool), 32)
    x, blocks = normal(0, 4, side * 32), normal(1, side, 32, 32)
    f = jax.jit(jax.grad(lambda w, x: jnp.sum(jnp.sin(bsjax.spmm(x, w, layout)))))
    memory = f.lower(blocks, x).compile().memory_analysis()
    dense_bytes = (side * 32) ** 2 * 4
    assert memory is not None
    assert memory.temp_size_in_bytes + memory.output_size_in_bytes < dense_bytes // 8


def test_cuda_lowering_holds_one_call_a_product(layout):
    """Lowering for CUDA needs no GPU: each of the three passes is one custom call and nothing densifies."""
    if "CUDA" not in _ffi.registrations:
        pytest.fail("This build has no CUDA handlers: build with an nvcc, as CONTRIBUTING.md says.")
    x, blocks = normal(0, 5, 24), normal(1, layout.num_blocks, B, B)
    step = jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(jnp.sin(bsjax.spmm(x, w, layout))), (0, 1)))
    text = step.trace(x, blocks).lower(lowering_platforms=("cuda",)).as_text()
    assert custom_calls(text, "spmm") == 2
    assert custom_calls(text, "sddmm") == 1
    assert "24x32" not in text
