"""Every way to call a product, its gradients against dense float64; and layers of random configuration, transformed."""

import functools
import math

import hypothesis.extra.numpy
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from jax import export
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import bsjax
from bsjax.testing import oracle

B, MEMBERS = 8, 3
RNG = np.random.default_rng(0)
PLACES = RNG.permutation([(r, c) for r in range(3) for c in range(4)])[:7]
LAYOUT = bsjax.Layout.from_indices(PLACES[:, 0], PLACES[:, 1], (24, 32), B)

# The three products, by their operands' shapes. Each is linear in both, so it has first and second derivatives in both.
PRODUCTS = {
    "spmm": (lambda x, w: bsjax.spmm(x, w, LAYOUT), (8, 24), (7, B, B)),
    "spmm of w.T": (lambda x, w: bsjax.spmm(x, w, LAYOUT, transpose=True), (8, 32), (7, B, B)),
    "sddmm": (lambda x, dy: bsjax.sddmm(x, dy, LAYOUT), (8, 24), (8, 32)),
}


def dense(name, a, c):
    """The same in float64, from jnp alone."""
    places = np.asarray(LAYOUT.rows), np.asarray(LAYOUT.cols)
    if name == "sddmm":
        w = (a.T @ c).reshape(3, B, 4, B).transpose(0, 2, 1, 3)
        return w[places]
    w = jnp.zeros((3, 4, B, B), c.dtype).at[places].set(c).transpose(0, 2, 1, 3).reshape(24, 32)
    return a @ (w.T if name == "spmm of w.T" else w)


def mesh():
    return Mesh(np.array(jax.devices()), ("d",))


def over_a_mesh(f, name):
    """x's rows split; of the spmm the result's too, of the sddmm it is a sum over devices."""

    def local(a, c):
        y = f(a, c)
        return jax.lax.psum(y, "d") if name == "sddmm" else y

    second = P("d") if name == "sddmm" else P()
    return jax.shard_map(local, mesh=mesh(), in_specs=(P("d"), second), out_specs=P() if name == "sddmm" else P("d"))


def scanned(f, name):
    del name
    return lambda a, c: jax.lax.scan(lambda carry, _: (carry, f(a, c)), 0, length=2)[1].mean(0)


MODES = {
    "eager": lambda f, name: f,
    "jit": lambda f, name: jax.jit(f),
    "remat": lambda f, name: jax.checkpoint(f),
    "remat, products kept": lambda f, name: jax.checkpoint(f, policy=bsjax.save_products),
    "scan": scanned,
    "shard_map": over_a_mesh,
}
AXES = {"": None, "vmap over the first": (0, None), "over the second": (None, 0), "over both": (0, 0)}


def losses(f):
    """A scalar of f, and a scalar of its gradients: differentiated once more it is of the second order."""
    first = lambda a, c: jnp.sum(jnp.sin(f(a, c)))  # noqa: E731
    second = lambda a, c: sum(jnp.sum(jnp.cos(g)) for g in jax.grad(first, (0, 1))(a, c))  # noqa: E731
    return first, second


@pytest.mark.mesh
@pytest.mark.parametrize("axes", AXES, ids=lambda name: name or "plain")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", PRODUCTS)
def test_gradients_of_both_orders_in_every_mode(name, mode, axes):
    product, *shapes = PRODUCTS[name]
    axes = AXES[axes]
    shapes = [
        (MEMBERS, *shape) if axes and axis == 0 else shape for shape, axis in zip(shapes, axes or (0, 0), strict=True)
    ]
    a, c = (0.5 * np.random.default_rng(seed).normal(size=shape) for seed, shape in enumerate(shapes))
    a, c = a.astype(np.float32), c.astype(np.float32)

    def mapped(f):
        return jax.vmap(f, axes) if axes else f

    ours = losses(mapped(MODES[mode](product, name)))
    with jax.enable_x64(True):
        exact = losses(mapped(functools.partial(dense, name)))
        expected = [jax.jit(jax.grad(f, (0, 1)))(a.astype(np.float64), c.astype(np.float64)) for f in exact]
    for f, (da, dc) in zip(ours, expected, strict=True):
        for g, e in zip(jax.jit(jax.grad(f, (0, 1)))(a, c), (da, dc), strict=True):
            # Sums of at most 32 products in float32, of the second order through three products.
            np.testing.assert_allclose(g, e, rtol=1e-4, atol=1e-5 * max(1, float(np.abs(e).max())))


# ---------------------------------------------------------------------------------- random layers, ten transformations


def transformations(layer, x):
    """What ten transformations make of `layer(x)`: name and value, each `[m, n]` in float32."""
    graph, state = nnx.split(layer)
    f = lambda state, x: nnx.merge(graph, state)(x)  # noqa: E731
    copies = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), state)
    yield "jit", jax.jit(f)(state, x)
    yield "nnx.jit", nnx.jit(lambda layer, x: layer(x))(layer, x)
    yield "vmap over x", jax.vmap(f, (None, 0))(state, x[None])[0]
    yield "vmap over rows", jax.vmap(f, (None, 0))(state, x)
    yield "vmap over layers", jax.vmap(f, (0, None))(copies, x)[1]
    yield "scan over layers", jax.lax.scan(lambda carry, state: (carry, f(state, x)), 0, copies)[1][1]
    yield "remat", jax.checkpoint(f)(state, x)
    yield "cond", jax.lax.cond(x.shape[0] > 0, lambda: f(state, x), lambda: 0 * f(state, x))
    replicated = jax.shard_map(f, mesh=mesh(), in_specs=(P(), P()), out_specs=P())
    yield "shard_map", jax.jit(replicated)(state, x)
    checks = [export.DisabledSafetyCheck.custom_call("bsjax_spmm")]
    leaves, form = jax.tree.flatten(state)
    flat = jax.jit(lambda leaves, x: f(jax.tree.unflatten(form, leaves), x))
    exported = export.deserialize(export.export(flat, disabled_checks=checks)(leaves, x).serialize())
    yield "export", exported.call(leaves, x)
    with jax.disable_jit():
        yield "disable_jit", f(state, x)


@pytest.mark.mesh
@given(
    mask=hypothesis.extra.numpy.arrays(bool, st.tuples(st.integers(1, 4), st.integers(1, 4))),
    b=st.sampled_from([8, 16, 32]),
    rows=st.sampled_from([1, 3, 9]),
    use_bias=st.booleans(),
    dtype=st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
)
@hypothesis.settings(max_examples=6)  # each compiles eleven programs
def test_random_layers_under_ten_transformations(mask, b, rows, use_bias, dtype):
    layout = bsjax.Layout.from_mask(mask, b)
    layer = bsjax.nn.BlockSparseLinear(layout, use_bias=use_bias, dtype=dtype, rngs=nnx.Rngs(0))
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.integers(-3, 4, (rows, layout.shape[0])), dtype)
    # Whole numbers, whose sums are exact in any order: up to 128 products of 9 fit the 11 bits of float16, but not the
    # 8 of bfloat16, to which the exact sum is rounded once.
    layer.kernel.set_value(jnp.asarray(rng.integers(-3, 4, layer.kernel.shape), jnp.float32))
    exact = oracle.spmm(x, layer.kernel[...], layout).astype(np.float32).astype(dtype).astype(np.float32)
    number = 0
    for name, y in transformations(layer, x):
        assert y.dtype == dtype, name
        np.testing.assert_array_equal(np.asarray(y, np.float32), exact, err_msg=name)
        number += 1
    assert number >= 10
    assert math.prod(y.shape) == rows * layout.shape[1]
