"""The multiplicative LSTM with internal steps ("deep update"), dense or block-sparse, as parameters and functions.

From the state h and the embedding of the byte x, with LN a layer norm and W square, dense or block-sparse:

    z = LN(W_0 h) * m(x)                      z = relu(LN(W_1 z) + a(x))       z = relu(LN(W_d z)),  d = 2 .. depth - 1
    i, f, o, u = LN(W_g z)                    c' = sigmoid(f + 1) c + sigmoid(i) tanh(u)       h' = sigmoid(o) tanh(c')

The four gates are one product with a `[n, 4n]` matrix. Every internal layer and every gate has a pattern of its own.
m, a and the output meet every `stride`-th unit only: m is 1 and a is 0 at the others.

References:
  Gray, Radford and Kingma, "GPU Kernels for Block-Sparse Weights", 2017.
  Krause, Lu, Murray and Renals, "Multiplicative LSTM for sequence modelling", 2016.
"""

import jax
import jax.numpy as jnp
import numpy as np

import bsjax
from experiments.common import CommandError
from experiments.lstm import recurrence

VOCABULARY = 256  # bytes
_EPSILON = 1e-5  # under the root of a variance


def make_layouts(config) -> list:
    """Makes the patterns of a config: a list of `depth` layouts `[n, n]` and one `[n, 4n]`; of None where dense."""
    if config.pattern == "dense":
        return [None] * (config.depth + 1)
    masks = [_make_mask(config, seed) for seed in range(config.depth + 4)]
    masks[config.depth :] = [np.concatenate(masks[config.depth :], axis=1)]
    return [bsjax.Layout.from_mask(mask, config.block_size) for mask in masks]


def _make_mask(config, layer):
    """One `[n / b, n / b]` pattern, the diagonal in it: there the weights start."""
    n, degree, seed = config.hidden // config.block_size, config.degree, config.seed + 1000 * layer
    patterns = bsjax.patterns
    try:
        if config.pattern == "barabasi_albert":
            return patterns.barabasi_albert(n, degree, seed=seed)
        if config.pattern == "watts_strogatz":
            return patterns.watts_strogatz(n, degree, seed=seed)
        mask = patterns.balanced_random(n, n, degree / n, seed=seed)
    except ValueError as error:
        raise CommandError(
            f"`degree` {degree} makes no {config.pattern} pattern of {n} x {n} blocks: {error}"
        ) from None
    # What a fair comparison rests on: `configs.pair` counts on it, and so does one rate for all units.
    assert (np.concatenate([mask.sum(0), mask.sum(1)]) == degree).all()
    return mask


def count_recurrent(config):
    """The number of recurrent weights, as the patterns of the config have it."""
    if config.pattern == "dense":
        return (config.depth + 4) * config.hidden**2
    return sum(layout.num_blocks for layout in make_layouts(config)) * config.block_size**2


def init(key, config, layouts):
    """Makes the parameters, all float32: recurrent weights start near the identity, biases as zero, gains as one.

    Returns:
      A dict: `weights`, a list of the `depth` internal matrices `[n, n]` and the gates' `[n, 4n]` (the blocks
      `[num_blocks, b, b]` of them where there is a layout); `gain` and `bias` `[depth, n]`, `gate_gain` and
      `gate_bias` `[4, n]` of the norms; `embedding` `[256, e]` with `embedding_gain` `[256, 1]`; `multiply` and `add`
      `[e, n / stride]`, which make m and a; `output` `[n / stride, 256]` with `output_bias` `[256]`.
    """
    n, e, depth = config.hidden, config.embedding, config.depth
    met = n // config.stride
    *keys, key = jax.random.split(key, 5)
    return {
        "weights": [
            _near_identity(key, n, copies, layout, config.noise)
            for key, copies, layout in zip(jax.random.split(key, depth + 1), _copies(config), layouts, strict=True)
        ],
        "gain": jnp.ones((depth, n)),
        "bias": jnp.zeros((depth, n)),
        "gate_gain": jnp.ones((4, n)),
        "gate_bias": jnp.zeros((4, n)),
        "embedding": jax.random.normal(keys[0], (VOCABULARY, e)),
        "embedding_gain": jnp.ones((VOCABULARY, 1)),
        # Rows of the embedding have norm one: m - 1 and a start with the variance of these.
        "multiply": jax.random.normal(keys[1], (e, met)),
        "add": jax.random.normal(keys[2], (e, met)),
        "output": jax.random.normal(keys[3], (met, VOCABULARY)) / np.sqrt(met),
        "output_bias": jnp.zeros(VOCABULARY),
    }


def _near_identity(key, n, copies, layout, noise):
    """`copies` identity matrices side by side and noise: `[n, copies * n]`, or the stored blocks of that."""
    if layout is None:
        start = jnp.tile(jnp.eye(n), (1, copies))
    else:
        diagonal = layout.rows == layout.cols % (n // layout.block_size)
        start = jnp.where(diagonal[:, None, None], jnp.eye(layout.block_size)[None], 0)
    fan_in = start.size / (copies * n)
    return start + noise / np.sqrt(fan_in) * jax.random.normal(key, start.shape)


def fan_ins(weights, config):
    """The mean number of stored weights of an output, of each of the recurrent `weights`."""
    return [w.size / (copies * config.hidden) for w, copies in zip(weights, _copies(config), strict=True)]


def _copies(config):
    """How many `[n, n]` matrices lie side by side in each recurrent weight."""
    return [1] * config.depth + [4]


def initial_state(config, batch):
    """The state (c, h) before any byte: zeros `[batch, n]`."""
    return jnp.zeros((batch, config.hidden)), jnp.zeros((batch, config.hidden))


def apply(params, layouts, state, tokens, config, key=None):
    """Reads bytes and predicts each next one.

    Args:
      params: as `init` makes them.
      layouts: as `make_layouts` makes them.
      state: (c, h), each `[batch, n]` float32: where an earlier call stopped, or `initial_state`.
      tokens: `[T, batch]` int32.
      config: its `dtype` is that of the operands of the products; norms, gates and the state are float32.
      key: a random key, with which a share `config.dropout` of the candidate u is dropped; None drops nothing.

    Returns:
      The state after the last byte and the logits `[T, batch, 256]` of the byte after each, float32.
    """
    rows = params["embedding"] / jnp.linalg.norm(params["embedding"], axis=-1, keepdims=True)
    # A product picks the rows: the gradient of indexing is a scatter, slow on a CPU and in no fixed order on a GPU.
    embedded = recurrence.product(jax.nn.one_hot(tokens, VOCABULARY), params["embedding_gain"] * rows)
    inputs = {
        "multiply": _spread(1 + recurrence.product(embedded, params["multiply"]), config.stride, 1),
        "add": _spread(recurrence.product(embedded, params["add"]), config.stride, 0),
    }
    if key is not None and config.dropout:
        keep = jax.random.bernoulli(key, 1 - config.dropout, (*tokens.shape, config.hidden))
        inputs["keep"] = keep.astype(jnp.float32) / (1 - config.dropout)
    norms = {k: params[k] for k in ("gain", "bias", "gate_gain", "gate_bias")}
    state, h = recurrence.scan_products(_step, config.dtype, params["weights"], layouts, norms, state, inputs)
    # Of each group the first, not h[..., ::stride]: XLA's GPU compiler (jaxlib 0.11.2) aborts on products that it fuses
    # with the second derivative of a strided slice.
    read = h.reshape(*h.shape[:-1], -1, config.stride)[..., 0]
    logits = recurrence.product(read, params["output"], None, config.dtype)
    return state, logits + params["output_bias"][None, None]


def _step(multiply, norms, state, inputs):
    """One time step; returns the new state and h, of which the output reads every `stride`-th unit."""
    c, h = state
    depth = norms["gain"].shape[0]
    z = inputs["multiply"] * _layer_norm(multiply(0, h), norms["gain"][0], norms["bias"][0])
    for d in range(1, depth):
        y = _layer_norm(multiply(d, z), norms["gain"][d], norms["bias"][d])
        z = jax.nn.relu(y + inputs["add"] if d == 1 else y)
    gates = multiply(depth, z).reshape(z.shape[0], 4, -1)
    gates = _layer_norm(gates, norms["gate_gain"], norms["gate_bias"])
    i, f, o, u = (gates[:, gate] for gate in range(4))
    u = jnp.tanh(u) * inputs.get("keep", 1)
    c = jax.nn.sigmoid(f + 1) * c + jax.nn.sigmoid(i) * u
    h = jax.nn.sigmoid(o) * jnp.tanh(c)
    return (c, h), h


def _layer_norm(x, gain, bias):
    """Normalises over the last axis; `gain` and `bias` have the trailing shape of `x`."""
    x = x - jnp.mean(x, axis=-1, keepdims=True)
    scale = jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + _EPSILON)
    return x * scale * gain[None] + bias[None]


def _spread(x, stride, fill):
    """Puts the columns of `[..., n / stride]` at every `stride`-th place of `[..., n]`, and `fill` between them."""
    between = jnp.full((*x.shape, stride - 1), fill, x.dtype)
    return jnp.concatenate([x[..., None], between], axis=-1).reshape(*x.shape[:-1], -1)


def count_parameters(params):
    return sum(x.size for x in jax.tree.leaves(params))
