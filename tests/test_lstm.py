"""The LSTM of the experiment: the model against NumPy, and its weight gradients, one product each for all steps."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import partial_eval

from bsjax import info
from experiments.common import CommandError
from experiments.lstm import configs, model, recurrence

DENSE = configs.Config(hidden=16, depth=3, embedding=4, batch=3, length=5, block_size=8)
SPARSE = dataclasses.replace(DENSE, hidden=32, stride=2, pattern="balanced_random", degree=2)
BOTH = pytest.mark.parametrize("config", [DENSE, SPARSE], ids=["dense", "sparse"])


def random_like(tree, seed):
    """The same tree of arrays, all of them random: the identity start would hide half of the model."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape), x.dtype), tree)


def a_model(config):
    layouts = model.make_layouts(config)
    params = random_like(model.init(jax.random.key(0), config, layouts), 1)
    state = random_like(model.initial_state(config, config.batch), 2)
    tokens = jnp.asarray(np.random.default_rng(3).integers(0, 256, (config.length, config.batch)), jnp.int32)
    return params, layouts, state, tokens


# ------------------------------------------------------------------------------------------------------------ model


def densify(w, layout):
    if layout is None:
        return np.asarray(w, np.float64)
    b, (k, n) = layout.block_size, layout.shape
    dense = np.zeros((k // b, b, n // b, b))
    for block, row, column in zip(np.asarray(w), *np.nonzero(layout.to_mask()), strict=True):
        dense[row, :, column, :] = block
    return dense.reshape(k, n)


def numpy_model(params, layouts, state, tokens, config):
    """The docstring of model.py in NumPy, float64, weights dense."""
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), {k: v for k, v in params.items() if k != "weights"})
    weights = [densify(w, layout) for w, layout in zip(params["weights"], layouts, strict=True)]
    c, h = (np.asarray(x, np.float64) for x in state)

    def norm(x, gain, bias):
        return (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5) * gain + bias

    def sigmoid(x):
        return 1 / (1 + np.exp(-x))

    embedding = p["embedding"] / np.sqrt((p["embedding"] ** 2).sum(-1, keepdims=True)) * p["embedding_gain"]
    logits = []
    for token in np.asarray(tokens):
        m, a = np.ones_like(h), np.zeros_like(h)
        m[:, :: config.stride] += embedding[token] @ p["multiply"]
        a[:, :: config.stride] += embedding[token] @ p["add"]
        z = norm(h @ weights[0], p["gain"][0], p["bias"][0]) * m
        z = np.maximum(norm(z @ weights[1], p["gain"][1], p["bias"][1]) + a, 0)
        for d in range(2, config.depth):
            z = np.maximum(norm(z @ weights[d], p["gain"][d], p["bias"][d]), 0)
        gates = np.split(z @ weights[-1], 4, axis=-1)
        i, f, o, u = (norm(g, p["gate_gain"][j], p["gate_bias"][j]) for j, g in enumerate(gates))
        c = sigmoid(f + 1) * c + sigmoid(i) * np.tanh(u)
        h = sigmoid(o) * np.tanh(c)
        logits.append(h[:, :: config.stride] @ p["output"] + p["output_bias"])
    return (c, h), np.stack(logits)


@BOTH
def test_model_is_that_of_the_formulas(config):
    arguments = a_model(config)
    (c, h), logits = model.apply(*arguments, config)
    (expected_c, expected_h), expected = numpy_model(*arguments, config)
    # Measured error 2e-6 of values around 1; a layer norm or a gate that is off moves them by more than 1e-2.
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(c, expected_c, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(h, expected_h, rtol=1e-4, atol=1e-4)


@BOTH
def test_state_carries_over_windows(config):
    params, layouts, state, tokens = a_model(config)
    whole_state, whole = model.apply(params, layouts, state, tokens, config)
    state, first = model.apply(params, layouts, state, tokens[:2], config)
    state, second = model.apply(params, layouts, state, tokens[2:], config)
    np.testing.assert_allclose(np.concatenate([first, second]), whole, rtol=1e-5, atol=1e-5)
    for a, b in zip(state, whole_state, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@BOTH
def test_weights_start_as_the_identity_and_noise(config):
    layouts = model.make_layouts(config)
    plain = model.init(jax.random.key(0), dataclasses.replace(config, noise=0.0), layouts)["weights"]
    noisy = model.init(jax.random.key(0), config, layouts)["weights"]
    eye = np.eye(config.hidden)
    fan_ins = model.fan_ins(noisy, config)
    assert fan_ins == [16.0] * 4  # of 16 dense units, and of 2 blocks of 8
    for w, start, layout, copies in zip(noisy, plain, layouts, [1] * config.depth + [4], strict=True):
        np.testing.assert_array_equal(densify(start, layout), np.tile(eye, (1, copies)))
        noise = np.asarray(w - start)
        assert (noise != 0).all()
        assert abs(noise.std() / (0.3 / 16**0.5) - 1) < 0.15  # 256 numbers or more: .04 is one standard deviation


@pytest.mark.parametrize("pattern", configs.PATTERNS[1:])
def test_patterns_differ_by_layer_and_by_gate(pattern):
    config = dataclasses.replace(SPARSE, hidden=128, pattern=pattern)
    *internal, gates = [layout.to_mask() for layout in model.make_layouts(config)]
    masks = [*internal, *np.split(gates, 4, axis=1)]
    assert len(masks) == config.depth + 4
    assert all(mask.shape == (16, 16) and mask.diagonal().all() and not mask.all() for mask in masks)
    assert len({mask.tobytes() for mask in masks}) == len(masks)
    assert sum(mask.sum() for mask in masks) * config.block_size**2 == model.count_recurrent(config)
    again = model.make_layouts(config)
    np.testing.assert_array_equal(internal[0], again[0].to_mask())


def shapes(config):
    layouts = model.make_layouts(config)
    return jax.eval_shape(lambda: model.init(jax.random.key(0), config, layouts))


@pytest.mark.parametrize(("hidden", "ratio", "block_size"), [(192, 3, 8), (704, 2, 16), (704, 4, 16), (64, 1, 64)])
def test_a_pair_has_as_many_weights(hidden, ratio, block_size):
    models = configs.pair(dataclasses.replace(DENSE, hidden=hidden), ratio, block_size)
    params = {name: shapes(config) for name, config in models.items()}
    counts = {name: sum(w.size for w in p["weights"]) for name, p in params.items()}
    assert counts["dense"] == counts["sparse"] == 7 * hidden**2
    assert {name: model.count_recurrent(config) for name, config in models.items()} == counts
    for key in ("multiply", "add", "output", "output_bias", "embedding"):
        assert params["dense"][key].shape == params["sparse"][key].shape
    masks = [layout.to_mask() for layout in model.make_layouts(models["sparse"])]
    side = hidden // block_size // ratio
    for mask in [*masks[:-1], *np.split(masks[-1], 4, axis=1)]:
        assert (mask.sum(0) == side).all()
        assert (mask.sum(1) == side).all()


def test_a_pair_that_cannot_be_equal_is_refused():
    with pytest.raises(CommandError, match=r"multiple of ratio x block_size, 3 x 8 = 24, .*got 184.* 168 and 192"):
        configs.pair(dataclasses.replace(DENSE, hidden=184), 3, 8)


def test_dropout_drops_a_share_of_the_candidate():
    params, layouts, state, tokens = a_model(DENSE)
    config = dataclasses.replace(DENSE, dropout=0.5)
    (c, _), logits = model.apply(params, layouts, state, tokens[:1], config, jax.random.key(0))
    (other, _), _ = model.apply(params, layouts, state, tokens[:1], config, jax.random.key(1))
    assert (np.asarray(c) != np.asarray(other)).any()
    plain = model.apply(params, layouts, state, tokens[:1], DENSE, jax.random.key(0))[1]
    np.testing.assert_array_equal(plain, model.apply(params, layouts, state, tokens[:1], config)[1])
    assert np.isfinite(logits).all()


@BOTH
def test_bfloat16_products_stay_near_float32(config):
    arguments = a_model(config)
    _, expected = model.apply(*arguments, config)
    _, logits = model.apply(*arguments, dataclasses.replace(config, dtype="bfloat16"))
    assert logits.dtype == jnp.float32
    error = np.abs(np.asarray(logits - expected)).mean()
    assert 1e-4 < error < 0.2  # logits have a standard deviation of about 2; bfloat16 keeps 8 bits


# -------------------------------------------------------------------------------------------------- weight gradients


def plain_scan(step, dtype, weights, layouts, params, carry, xs):
    def multiply(i, h):
        return recurrence.product(h, weights[i], layouts[i], dtype)

    return jax.lax.scan(lambda carry, x: step(multiply, params, carry, x), carry, xs)


def loss(params, layouts, state, tokens, config):
    (c, h), logits = model.apply(params, layouts, state, tokens, config)
    return jnp.sum(jax.nn.log_softmax(logits)[..., 7]) + jnp.sum(c * h)


@BOTH
def test_gradients_are_those_of_a_plain_scan(config, monkeypatch):
    params, layouts, state, tokens = a_model(config)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 2)), static_argnums=4)
    got = gradient(params, layouts, state, tokens, config)
    monkeypatch.setattr(recurrence, "scan_products", plain_scan)
    gradient = jax.jit(jax.grad(loss, argnums=(0, 2)), static_argnums=4)  # traced anew
    expected = gradient(params, layouts, state, tokens, config)
    flat, structure = jax.tree.flatten(got)
    assert structure == jax.tree.structure(expected)
    for a, b in zip(flat, jax.tree.leaves(expected), strict=True):
        scale = np.abs(b).max()
        assert scale > 0
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * scale)


def count(jaxpr, name, inside=False):
    """How often the primitive of an op is called outside of any loop, and inside of one."""
    counts = np.zeros(2, int)
    for equation in jaxpr.eqns:
        if equation.primitive.name.startswith(name):
            counts[int(inside)] += 1
            continue  # what serves it may have names and loops of its own
        looped = inside or equation.primitive.name in ("scan", "while")
        for parameter in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                counts += count(inner, name, looped)
    return counts


def test_each_weight_gradient_is_one_sddmm_over_all_steps(monkeypatch):
    params, layouts, state, tokens = a_model(SPARSE)
    products = SPARSE.depth + 1

    def calls():
        gradient = jax.jit(jax.grad(loss), static_argnums=4)
        traced = gradient.trace(params, layouts, state, tokens, SPARSE)
        jaxpr = traced.jaxpr.jaxpr
        # What the loop's own derivative left unused: XLA drops it too.
        alive, _ = partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
        return {op: count(alive, f"bsjax_{op}").tolist() for op in ("spmm", "sddmm")}, traced

    counts, traced = calls()
    assert counts["sddmm"] == [products, 0]  # outside of the loop, inside of it
    assert counts["spmm"] == [0, 2 * products]
    if "native" in info.kernels()["cpu"]:
        compiled = str(traced.lower().compile().as_text())
        assert compiled.count('custom_call_target="bsjax_sddmm"') == products
    monkeypatch.setattr(recurrence, "scan_products", plain_scan)
    assert calls()[0]["sddmm"] == [0, products]  # what it would be without the rule


def test_second_order_gradients_are_those_of_a_plain_scan(monkeypatch):
    config = dataclasses.replace(DENSE, depth=2, length=3)
    params, layouts, state, tokens = a_model(config)

    def hessian_product():  # of the loss in the weights, with one direction
        def along(weights):
            gradient = jax.grad(lambda w: loss({**params, "weights": w}, layouts, state, tokens, config))
            return sum(jnp.vdot(g, d) for g, d in zip(gradient(weights), direction, strict=True))

        return jax.jit(jax.grad(along))(params["weights"])

    direction = random_like(params["weights"], 4)
    got = hessian_product()
    monkeypatch.setattr(recurrence, "scan_products", plain_scan)
    for a, b in zip(got, hessian_product(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4 * np.abs(b).max())
