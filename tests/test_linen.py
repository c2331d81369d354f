"""BlockSparseLinear for Linen: the same layer as in nnx."""

import copy
import pickle
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from flax.errors import ScopeParamShapeError

import bsjax
from bsjax.linen import BlockSparseLinear
from bsjax.nn import initializers

MASK = np.array([[1, 0, 1], [1, 1, 0], [0, 0, 1]], bool)
OTHER = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 1]], bool)  # as many blocks, elsewhere
B = 8


@pytest.fixture
def layout():
    return bsjax.Layout.from_mask(MASK, B)


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(np.float32).astype(dtype))


def params_of(layer, x, seed=0) -> Any:
    return layer.init(jax.random.key(seed), x)["params"]


def output(layer, params, x) -> Any:
    return layer.apply({"params": params}, x)


def same(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


def close(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(lambda a, e: np.testing.assert_allclose(a, e, rtol=1e-5, atol=1e-6), actual, expected)


@pytest.mark.parametrize(
    ("use_bias", "param_dtype", "dtype"),
    [
        (True, jnp.float32, None),
        (False, jnp.float32, None),
        (True, jnp.bfloat16, None),
        (True, jnp.float32, jnp.float16),
        (True, jnp.bfloat16, jnp.float32),
    ],
)
def test_is_the_layer_of_nnx(layout, use_bias, param_dtype, dtype):
    options = {"use_bias": use_bias, "dtype": dtype, "param_dtype": param_dtype}
    other = bsjax.nn.BlockSparseLinear(layout, bias_init=jax.nn.initializers.normal(), rngs=nnx.Rngs(0), **options)
    params = nnx.to_pure_dict(nnx.state(other, nnx.Param))
    x = normal(0, 2, 5, 3 * B, dtype=param_dtype)
    layer = BlockSparseLinear(layout, **options)
    y = output(layer, params, x)
    assert y.dtype == (dtype or param_dtype)
    same(y, other(x))
    made = params_of(layer, x)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), made) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), params
    )
    grads = jax.grad(lambda params: output(layer, params, x).astype(jnp.float32).sum())(params)
    expected = nnx.grad(lambda layer: layer(x).astype(jnp.float32).sum())(other)
    same(grads, nnx.to_pure_dict(expected))


def test_initialisers(layout):
    x = normal(0, 4, 3 * B)
    layer = BlockSparseLinear(layout, kernel_init=initializers.identity(layout))
    same(layer.init_with_output(jax.random.key(0), x)[0], x)
    default = params_of(BlockSparseLinear(layout), x)
    named = params_of(BlockSparseLinear(layout, kernel_init=initializers.scaled_normal(layout)), x)
    same(default, named)
    assert not default["bias"].any()
    ones = params_of(BlockSparseLinear(layout, bias_init=jax.nn.initializers.ones), x)
    assert (ones["bias"] == 1).all()


def test_modules_compare_by_the_content_of_their_layout(layout):
    """So modules are equal, and share compiled functions, as often as they are made anew."""
    traces = []

    def forward(layer, variables, x):
        traces.append(layer)
        return layer.apply(variables, x)

    x = normal(0, 2, 3 * B)
    variables = BlockSparseLinear(layout).init(jax.random.key(0), x)
    jitted = jax.jit(forward, static_argnums=0)
    for _ in range(2):
        jitted(BlockSparseLinear(bsjax.Layout.from_mask(MASK, B)), variables, x)
    assert len(traces) == 1
    other = BlockSparseLinear(bsjax.Layout.from_mask(OTHER, B))
    assert other != BlockSparseLinear(layout)
    close(jitted(other, variables, x), other.apply(variables, x))
    assert len(traces) == 2


def test_inside_a_module_under_remat_and_vmap(layout):
    class Network(linen.Module):
        remat: bool

        @linen.compact
        def __call__(self, x):
            layer = linen.remat(BlockSparseLinear) if self.remat else BlockSparseLinear
            for name in ("first", "second"):
                x = jnp.tanh(layer(layout, name=name)(x))
            return x

    x = normal(0, 3, 4, 3 * B)
    variables = Network(False).init(jax.random.key(0), x)
    gradient = jax.grad(lambda variables, network: network.apply(variables, x).sum())
    close(jax.jit(gradient, static_argnums=1)(variables, Network(True)), gradient(variables, Network(False)))
    mapped = jax.vmap(Network(False).apply, in_axes=(None, 0))(variables, x)
    close(mapped, Network(False).apply(variables, x))


def test_scans_over_stacked_layers(layout):
    layer, x = BlockSparseLinear(layout), normal(0, 5, 3 * B)

    class Step(linen.Module):
        @linen.compact
        def __call__(self, x, _):
            return jnp.tanh(BlockSparseLinear(layout, name="layer")(x)), None

    network = linen.scan(Step, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)()
    variables: Any = network.init(jax.random.key(0), x, None)
    stacked = variables["params"]["layer"]
    assert stacked["kernel"].shape == (3, layout.num_blocks, B, B)

    def in_turn(stacked):
        y = x
        for i in range(3):
            y = jnp.tanh(output(layer, jax.tree.map(lambda leaf, i=i: leaf[i], stacked), y))
        return y.sum()

    grads = jax.jit(jax.grad(lambda variables: network.apply(variables, x, None)[0].sum()))(variables)
    close(grads["params"]["layer"], jax.grad(in_turn)(stacked))


@pytest.fixture
def adam_promotes():
    """optax's Adam raises a float to an integer power, which strict promotion refuses."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def test_a_run_resumes_from_a_checkpoint_bit_for_bit(adam_promotes, layout, tmp_path):
    layer, x, y = BlockSparseLinear(layout), normal(0, 9, 3 * B), normal(1, 9, 3 * B)
    optimizer = optax.adam(1e-2)

    @jax.jit
    def step(params, state):
        grads = jax.grad(lambda params: jnp.mean((output(layer, params, x) - y) ** 2))(params)
        updates, state = optimizer.update(grads, state)
        return optax.apply_updates(params, updates), state

    def start(seed):
        params = params_of(layer, x, seed)
        return params, optimizer.init(params)

    run = step(*start(0))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", run)
    with ocp.StandardCheckpointer() as checkpointer:
        resumed = checkpointer.restore(tmp_path / "state", start(1))
    same(resumed, run)
    same(step(*resumed), step(*run))


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda layer: layer.clone(), lambda x: pickle.loads(pickle.dumps(x))]
)
def test_copies_are_equal(layout, duplicate):
    layer = BlockSparseLinear(layout, dtype=jnp.bfloat16)
    assert duplicate(layer) == layer


def test_errors(layout):
    with pytest.raises(TypeError, match="`layout` must be a bsjax.Layout.*got ndarray"):
        BlockSparseLinear(MASK)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="`dtype` must be float32, float16, bfloat16 or None; got int8"):
        BlockSparseLinear(layout, dtype=jnp.int8)
    layer, x = BlockSparseLinear(layout), normal(0, 2, 3 * B)
    with pytest.raises(ValueError, match="The last dimension of `x` must be 24"):
        layer.init(jax.random.key(0), x[:, :B])
    variables = layer.init(jax.random.key(0), x)
    diagonal = BlockSparseLinear(bsjax.Layout.from_mask(np.eye(3), B))
    with pytest.raises(ScopeParamShapeError, match="kernel"):
        diagonal.apply(variables, x)
