"""A scan over time whose weight gradients are taken after the loop: one product over all steps, not one a step."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import bsjax

_SAVED = "product"
# float32 is float32 for the dense model too: a card's default would round its operands to TF32, the sparse one's never.
_PRECISION = lax.Precision.HIGHEST


def product(x, w, layout=None, dtype=jnp.float32):
    """Multiplies `x @ w`, for a dense `w` or, with a `layout`, a block-sparse one.

    Args:
      x: `[..., k]`, float32.
      w: `[k, n]`, or the blocks `[num_blocks, b, b]` of such a matrix, float32.
      layout: where the blocks are; None for a dense `w`.
      dtype: what both operands are rounded to.

    Returns:
      `[..., n]` in float32, accumulated in float32, rounded to `dtype` in between.
    """
    x, w = x.astype(dtype), w.astype(dtype)
    y = jnp.matmul(x, w, precision=_PRECISION) if layout is None else bsjax.spmm(x, w, layout)
    return y.astype(jnp.float32)


def product_gradient(x, dy, layout=None, dtype=jnp.float32):
    """Computes the gradient of `product` in `w`, summed over all leading axes of `x` and `dy`, in float32."""
    x, dy = x.astype(dtype), dy.astype(dtype)
    if layout is not None:
        return bsjax.sddmm(x, dy, layout).astype(jnp.float32)
    rows = tuple(range(x.ndim - 1))
    return jnp.tensordot(x, dy, (rows, rows), precision=_PRECISION).astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def scan_products(step, dtype, weights, layouts, params, carry, xs):
    """Scans `step` over time like `lax.scan`, with one weight gradient for each weight and all steps together.

    Plain differentiation of a scan multiplies `x.T @ dy` at every step and sums the results: T small products that
    each read and write a whole weight. Here the loop only keeps each step's `x` and `dy`, and one product over their
    `[T * batch]` rows follows it.

    Args:
      step: `step(multiply, params, carry, x) -> (carry, y)`. `multiply(i, h)` is `product(h, weights[i], ...)` and is
        called once for each `i`. Whatever else is to be differentiated must come through `params`, `carry` or `x`.
      dtype: the dtype of the products, see `product`.
      weights: a sequence of weights, as `product` takes them.
      layouts: one layout, or None, for each weight.
      params: any pytree, the same for all steps.
      carry: any pytree, the state before the first step.
      xs: a pytree of arrays `[T, ...]`.

    Returns:
      The state after the last step, and the `y` of all steps, stacked: `[T, ...]`.
    """
    multiply = functools.partial(_multiply, weights, layouts, dtype)
    return lax.scan(lambda carry, x: step(multiply, params, carry, x), carry, xs)


def _multiply(weights, layouts, dtype, i, h):
    return product(h, weights[i], layouts[i], dtype)


def _scan_fwd(step, dtype, weights, layouts, params, carry, xs):
    def one_step(taps, params, carry, x):
        """The step, with a tap added to the result of each product: the tap's gradient is the product's `dy`."""
        inputs = [None] * len(weights)

        def multiply(i, h):
            inputs[i] = h.astype(dtype)
            return checkpoint_name(_multiply(weights, layouts, dtype, i, h), _SAVED) + taps[i]

        carry, y = step(multiply, params, carry, x)
        return carry, (y, inputs)

    # Only the products are kept for the way back; norms and gates are cheaper computed again than written and read.
    saved = jax.checkpoint_policies.save_only_these_names(_SAVED)
    one_step = jax.checkpoint(one_step, policy=saved, prevent_cse=False)

    def all_steps(taps, params, carry, xs):
        carry, (ys, inputs) = lax.scan(lambda carry, x: one_step(x[0], params, carry, x[1]), carry, (taps, xs))
        return (carry, ys), inputs

    taps = _zero_taps(step, dtype, weights, layouts, params, carry, xs)
    result, pullback, inputs = jax.vjp(all_steps, taps, params, carry, xs, has_aux=True)
    return result, (pullback, inputs, layouts)


def _zero_taps(step, dtype, weights, layouts, params, carry, xs):
    """Zeros `[T, ...]` in the shape of every product's results; XLA folds them into the additions."""

    def shapes(carry, x):
        results = [None] * len(weights)

        def multiply(i, h):
            results[i] = _multiply(weights, layouts, dtype, i, h)
            return results[i]

        step(multiply, params, carry, x)
        return results

    num_steps = jax.tree.leaves(xs)[0].shape[0]
    results = jax.eval_shape(shapes, carry, jax.tree.map(lambda x: x[0], xs))
    return [jnp.zeros((num_steps, *y.shape), y.dtype) for y in results]


def _scan_bwd(step, dtype, residuals, cotangents):
    pullback, inputs, layouts = residuals
    taps, params, carry, xs = pullback(cotangents)
    weights = [product_gradient(x, dy, layout, dtype) for x, dy, layout in zip(inputs, taps, layouts, strict=True)]
    return weights, None, params, carry, xs


scan_products.defvjp(_scan_fwd, _scan_bwd)
