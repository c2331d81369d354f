"""BlockSparseLinear for nnx and the initialisers: values against dense, training, transformations, checkpoints."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx

import bsjax
from bsjax.nn import BlockSparseLinear, Pattern, initializers
from bsjax.testing import assert_as_accurate, integers, oracle

MASK = np.array([[1, 0, 1, 0], [0, 0, 1, 0], [1, 0, 1, 0]], bool)  # columns of 2, 0, 3 and 0 blocks
SQUARE = np.array([[1, 0, 1], [1, 1, 0], [0, 0, 1]], bool)
OTHER = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1]], bool)  # as many blocks, elsewhere
B = 8


def layout_of(mask, b=B):
    return bsjax.Layout.from_mask(mask, b)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype))


def layer_of(mask=SQUARE, seed=0, **options):
    return BlockSparseLinear(layout_of(mask), bias_init=jax.nn.initializers.normal(1.0), rngs=nnx.Rngs(seed), **options)


def mean_square(layer, x, y):
    return jnp.mean((layer(x) - y) ** 2)


def same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected)


@pytest.mark.parametrize("lead", [(), (5,), (2, 0), (2, 3)], ids=str)
@pytest.mark.parametrize("use_bias", [True, False])
def test_computes_the_dense_layer(lead, use_bias):
    layer = layer_of(MASK, use_bias=use_bias)
    layer.kernel.set_value(integers(0, (5, B, B)))
    x = integers(1, (*lead, 3 * B))
    exact = oracle.spmm(x, layer.kernel[...], layer.layout)
    if use_bias:
        assert layer.bias.shape == (4 * B,)
        layer.bias.set_value(integers(2, (4 * B,)))
        exact = exact + np.asarray(layer.bias[...])
    else:
        assert layer.bias is None
    y = layer(x)
    assert y.dtype == jnp.float32
    np.testing.assert_array_equal(y, exact)


@pytest.mark.parametrize(
    ("x_dtype", "param_dtype", "dtype", "expected"),
    [
        (jnp.float32, jnp.float32, None, jnp.float32),
        (jnp.bfloat16, jnp.bfloat16, None, jnp.bfloat16),
        (jnp.float16, jnp.float32, jnp.float32, jnp.float32),
        (jnp.float32, jnp.float32, jnp.bfloat16, jnp.bfloat16),
        (jnp.int32, jnp.float32, jnp.float16, jnp.float16),
    ],
)
def test_dtypes(x_dtype, param_dtype, dtype, expected):
    """The parameters stay in theirs, the product takes place in `dtype`, and so do gradients come back."""
    layer = layer_of(param_dtype=param_dtype, dtype=dtype)
    assert layer.kernel.dtype == layer.bias.dtype == param_dtype
    x = normal(0, 6, 3 * B).astype(x_dtype)
    y = layer(x)
    assert y.dtype == expected
    w = jnp.asarray(oracle.to_dense(layer.kernel[...].astype(expected), layer.layout), expected)
    bias = layer.bias[...].astype(expected)
    plain = jnp.matmul(x.astype(expected), w, precision="highest") + bias[None]
    exact = oracle.spmm(x.astype(expected), layer.kernel[...].astype(expected), layer.layout)
    exact += np.asarray(bias, np.float64)
    assert_as_accurate(y, plain, exact)
    grads = nnx.grad(lambda layer: layer(x).astype(jnp.float32).sum())(layer)
    assert grads.kernel.dtype == grads.bias.dtype == param_dtype


def test_parameters_are_all_that_param_selects():
    layer = layer_of()
    assert set(nnx.state(layer, nnx.Param)) == {"kernel", "bias"}
    assert set(nnx.state(layer, Pattern)) == {"pattern"}
    floats = jax.tree.leaves(nnx.state(layer, nnx.Param))
    assert all(jnp.issubdtype(leaf.dtype, jnp.floating) for leaf in floats)
    assert len(jax.tree.leaves(nnx.state(layer))) == len(floats) + len(jax.tree.leaves(layer.layout))
    graph, params, rest = nnx.split(layer, nnx.Param, ...)
    x = normal(0, 2, 3 * B)
    same(nnx.merge(graph, params, rest)(x), layer(x))


def test_gradients_are_those_of_the_dense_layer():
    layer = layer_of()
    x, y = normal(0, 7, 3 * B), normal(1, 7, 3 * B)
    w = jnp.asarray(oracle.to_dense(layer.kernel[...], layer.layout), jnp.float32)

    def dense_loss(w, bias):
        return jnp.mean((jnp.matmul(x, w, precision="highest") + bias[None] - y) ** 2)

    value, (dw, dbias) = jax.value_and_grad(dense_loss, (0, 1))(w, layer.bias[...])
    blocks = dw.reshape(3, B, 3, B).transpose(0, 2, 1, 3)[layer.layout.rows, layer.layout.cols]
    for transform in (lambda f: f, nnx.jit, lambda f: nnx.jit(nnx.remat(f))):
        loss, grads = nnx.value_and_grad(transform(mean_square))(layer, x, y)
        close(loss, value)
        close(grads.kernel[...], blocks)
        close(grads.bias[...], dbias)
    assert "pattern" not in grads


def test_another_pattern_does_not_recompile():
    traces = []

    @nnx.jit
    def forward(layer, x):
        traces.append(layer)
        return layer(x)

    x = normal(0, 2, 3 * B)
    for mask in (SQUARE, OTHER):
        layer = layer_of(mask)
        close(forward(layer, x), layer(x))
    assert len(traces) == 1
    forward(layer_of(MASK, seed=1), x)
    assert len(traces) == 2  # a shape of its own: the count above can rise


@pytest.mark.parametrize("scan", ["nnx", "lax"])
def test_scans_over_stacked_layers_of_different_patterns(scan):
    layers = [layer_of(mask, seed) for seed, mask in enumerate([SQUARE, OTHER, SQUARE])]
    graph = nnx.split(layers[0])[0]
    stack = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(nnx.state, layers))

    def in_turn(layers, x):
        for layer in layers:
            x = jnp.tanh(layer(x))
        return x.sum()

    def scanned(stacked, x):
        return nnx.scan(lambda x, layer: jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(
            x, stacked
        ).sum()

    def scanned_by_lax(stacked, x):
        def step(x, state):
            return jnp.tanh(nnx.merge(graph, state)(x)), None

        return jax.lax.scan(step, x, nnx.state(stacked))[0].sum()

    x, stacked = normal(0, 5, 3 * B), nnx.merge(graph, stack)
    value, grads = nnx.jit(nnx.value_and_grad(scanned if scan == "nnx" else scanned_by_lax))(stacked, x)
    expected, expected_grads = nnx.value_and_grad(in_turn)(layers, x)
    close(value, expected)
    for i in range(3):
        close(grads.kernel[i], expected_grads[i].kernel[...])
        close(grads.bias[i], expected_grads[i].bias[...])


def test_vmap_makes_and_runs_layers_with_patterns_of_their_own():
    layouts = [layout_of(SQUARE), layout_of(OTHER)]
    keys = jax.random.split(jax.random.key(0), 2)

    @nnx.vmap
    def make(layout, key):
        return BlockSparseLinear(layout, rngs=nnx.Rngs(key))

    many = make(jax.tree.map(lambda *leaves: jnp.stack(leaves), *layouts), keys)
    x = normal(0, 2, 5, 3 * B)
    y = nnx.vmap(lambda layer, x: layer(x))(many, x)
    for i, layout in enumerate(layouts):
        one = BlockSparseLinear(layout, rngs=nnx.Rngs(keys[i]))
        close(many.kernel[i], one.kernel[...])
        close(y[i], one(x[i]))


@pytest.fixture
def adam_promotes():
    """optax's Adam raises a float to an integer power, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_learns_a_block_sparse_teacher(adam_promotes):
    """optax alone, over the state of the parameters; the loss falls a hundredfold."""
    teacher, student = layer_of(seed=0), layer_of(seed=1)
    graph, params, rest = nnx.split(student, nnx.Param, ...)
    x = normal(0, 256, 3 * B)
    y = teacher(x)
    optimizer = optax.adam(3e-2)

    @jax.jit
    def step(params, state):
        loss, grads = jax.value_and_grad(lambda params: mean_square(nnx.merge(graph, params, rest), x, y))(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(150):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 100
    nnx.update(student, params)
    np.testing.assert_allclose(student.kernel[...], teacher.kernel[...], atol=0.2)


def trained(mask, seed):
    layer = layer_of(mask, seed)
    return layer, nnx.Optimizer(layer, optax.adam(1e-2), wrt=nnx.Param)


def train(layer, optimizer, steps):
    x, y = normal(0, 9, 3 * B), normal(1, 9, 3 * B)
    for _ in range(steps):
        optimizer.update(layer, nnx.grad(mean_square)(layer, x, y))


def test_a_run_resumes_from_a_checkpoint_bit_for_bit(adam_promotes, tmp_path):
    """The whole state holds the pattern too, so a module made with another one becomes the one that was saved."""
    run = trained(SQUARE, seed=0)
    train(*run, steps=3)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", nnx.state(run))
    resumed = trained(OTHER, seed=1)
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(resumed, checkpointer.restore(tmp_path / "state", nnx.state(resumed)))
    same(nnx.state(resumed), nnx.state(run))
    assert resumed[0].layout == layout_of(SQUARE)
    for each in (run, resumed):
        train(*each, steps=2)
    same(nnx.state(resumed), nnx.state(run))


def test_parameters_alone_fit_a_layer_of_the_saved_layout(tmp_path):
    """Then the layout is saved beside them, and tells that another pattern is another layer."""
    layer = layer_of(SQUARE)
    layer.layout.save(tmp_path / "layout.npz")
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "params", nnx.state(layer, nnx.Param))
    fresh = BlockSparseLinear(bsjax.Layout.load(tmp_path / "layout.npz"), rngs=nnx.Rngs(9))
    with ocp.StandardCheckpointer() as checkpointer:
        nnx.update(fresh, checkpointer.restore(tmp_path / "params", nnx.state(fresh, nnx.Param)))
    x = normal(0, 2, 3 * B)
    same(fresh(x), layer(x))
    assert fresh.layout == layer.layout
    assert layer_of(OTHER).layout != layer.layout


@pytest.mark.parametrize("duplicate", [copy.deepcopy, nnx.clone, lambda layer: pickle.loads(pickle.dumps(layer))])
def test_copies_are_independent(duplicate):
    layer, x = layer_of(), normal(0, 2, 3 * B)
    other = duplicate(layer)
    assert other.layout == layer.layout
    same(other(x), layer(x))
    before = layer(x)
    other.kernel.set_value(2 * other.kernel[...])
    same(layer(x), before)
    assert not np.array_equal(other(x), before)


def test_eval_shape_makes_no_arrays():
    abstract = nnx.eval_shape(layer_of)
    assert isinstance(abstract.kernel.get_value(), jax.ShapeDtypeStruct)
    assert abstract.kernel.shape == (5, B, B)


def test_errors_when_made():
    with pytest.raises(TypeError, match="`layout` must be a bsjax.Layout.*got ndarray"):
        BlockSparseLinear(MASK, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match="`dtype` must be float32, float16, bfloat16 or None; got int32"):
        layer_of(dtype=jnp.int32)
    with pytest.raises(ValueError, match="`shape` must be"):
        layer_of(kernel_init=initializers.scaled_normal(layout_of(MASK, 16)))
    stack = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), layout_of(MASK))
    with pytest.raises(ValueError, match=r"`layout` must be one layout; got a stack of shape \(2,\)"):
        BlockSparseLinear(stack, rngs=nnx.Rngs(0))


def test_errors_when_called():
    layer, x = layer_of(SQUARE), normal(0, 2, 3 * B)
    with pytest.raises(ValueError, match="The last dimension of `x` must be 24"):
        layer(x[:, :B])
    with pytest.raises(ValueError, match="`precision` must be None"):
        layer_of(precision="exact")(x)
    nnx.update(layer, nnx.state(layer_of(np.eye(3)), nnx.Param))
    with pytest.raises(ValueError, match=r"`kernel` must have shape \(5, 8, 8\).*got \(3, 8, 8\)"):
        layer(x)
