"""The operands of a case, and whether a result is right: exactly that of the dense product, on whole numbers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.peers import PASSES, Data, Dense, Ours, first_line


def operands(layout, m, dtype, draw):
    """The `Data` of a case, drawn by `normal` or `integers`; dtype is one of cases.DTYPES."""
    (k, n), b, tf32 = layout.shape, layout.block_size, dtype == "tf32"
    dtype = jnp.dtype("float32" if tf32 else dtype)
    # x and dy by one program for all cases of their shape; the blocks, whose number is the case's own, by NumPy.
    x, dy = (draw(jax.random.key(seed), (m, side), dtype) for seed, side in ((0, k), (1, n)))
    shape = layout.num_blocks, b, b
    blocks = np.random.default_rng(2)
    blocks = blocks.integers(-3, 4, shape) if draw is integers else blocks.standard_normal(shape, np.float32)
    blocks = jnp.asarray(blocks.astype(dtype))
    return Data(layout, x, dy, blocks, _scatter(blocks, layout), tf32)


@jax.jit
def _scatter(blocks, layout):
    b = layout.block_size
    w = jnp.zeros((layout.block_shape[0], b, layout.block_shape[1], b), blocks.dtype)
    return w.at[layout.rows, :, layout.cols, :].set(blocks).reshape(layout.shape)


@functools.partial(jax.jit, static_argnums=(1, 2))
def normal(key, shape, dtype):
    return jax.random.normal(key, shape, dtype)


@functools.partial(jax.jit, static_argnums=(1, 2))
def integers(key, shape, dtype):
    """Whole numbers in [-3, 3]: sums of their products are exact in float32, in any order."""
    return jax.random.randint(key, shape, -3, 4, jnp.int8).astype(dtype)


@jax.jit
def wrong_elements(got, want):
    return jnp.sum(~(got == want.astype(got.dtype)))  # a NaN counts


def passes(peers, data):
    """{pass: (elements of ours that are wrong, {peer: positions of its right ways}, {peer: why it has none})}."""
    found = {}
    for name in PASSES:
        want = result(Dense(out=jnp.float32), name, data)
        checked = {peer.name: _right_ways(peer, name, data, want) for peer in peers}
        found[name] = (
            int(wrong_elements(result(Ours(), name, data), want)),
            {peer: ways for peer, (ways, _) in checked.items() if ways},
            {peer: reason for peer, (ways, reason) in checked.items() if not ways},
        )
    return found


def _right_ways(peer, name, data, want):
    """Which ways of a peer give the result `want`, as positions; and, where none does, why not."""
    try:
        ways = getattr(peer, name)(data)
    except Exception as error:  # a foreign library may raise anything, and one that fails is left out
        return [], first_line(error)
    right, reasons = [], []
    for position, way in enumerate(ways):
        try:
            wrong = int(wrong_elements(way.read(jax.block_until_ready(way.run())), want))
        except Exception as error:
            reasons.append(first_line(error))
            continue
        if wrong:
            reasons.append(f"{wrong} wrong elements")
        else:
            right.append(position)
    return right, "" if right else "; ".join(dict.fromkeys(reasons))


def result(peer, name, data):
    """What the only way of a peer gives."""
    (way,) = getattr(peer, name)(data)
    return way.read(jax.block_until_ready(way.run()))
