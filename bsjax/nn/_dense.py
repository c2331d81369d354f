"""BlockSparseLinear: a linear layer whose weight is block-sparse."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx.nn import dtypes

from bsjax._layout import Layout, of_leaves, to_leaves
from bsjax.nn import initializers
from bsjax.ops import spmm

_DTYPES = (jnp.float32, jnp.float16, jnp.bfloat16)


class Pattern(nnx.Variable):
    """The nnx variables that hold the arrays of a layer's `Layout`: state that travels with the module, never trained.

    A type of its own, so that `nnx.Param` selects the weights alone: gradients and optimisers do not see the indices.

    Example:
      >>> import bsjax
      >>> from flax import nnx
      >>> layout = bsjax.Layout.from_mask([[1, 0], [1, 1]], block_size=8)
      >>> layer = bsjax.nn.BlockSparseLinear(layout, rngs=nnx.Rngs(0))
      >>> list(nnx.state(layer, bsjax.nn.Pattern)), list(nnx.state(layer, nnx.Param))
      (['pattern'], ['bias', 'kernel'])
    """


class BlockSparseLinear(nnx.Module):
    """A linear layer with a block-sparse weight: `y = x @ w + bias`, of which the stored blocks alone take part.

    The blocks are `kernel`, an ordinary `nnx.Param`: `nnx.grad`, optax and checkpoints see an array like any other.
    The layout is in variables of type `Pattern`, copies of the arrays that were given: they travel with the module
    through `split`, `jit`, `vmap` and `scan`, so a module with another pattern of as many blocks does not recompile,
    and stacked layers may each have their own. Members of an ensemble that share one pattern are one product only if
    that is said: `nnx.vmap(..., in_axes=nnx.StateAxes({bsjax.nn.Pattern: None, ...: 0}))`; with patterns of their own
    they run one after the other.

    A checkpoint of `nnx.state(layer, nnx.Param)` holds the weights without their places. Restored into a module with
    another pattern of as many blocks it would give another `w`, and nothing would tell; so save `nnx.state(layer)`,
    which has both, or keep the layout beside it (`Layout.save`) and compare: `layer.layout == Layout.load(path)`.

    Attributes:
      kernel: `nnx.Param`, `[num_blocks, b, b]`, in the order of `layout`.
      bias: `nnx.Param`, `[n]`, or None.
      pattern: `nnx.Dict` of `Pattern`, the arrays of the layout by their names.
      shape, block_size: those of the layout.

    Example:
      >>> import bsjax, jax.numpy as jnp
      >>> from flax import nnx
      >>> layout = bsjax.Layout.from_mask([[1, 0, 1], [0, 0, 1]], block_size=8)
      >>> layer = bsjax.nn.BlockSparseLinear(layout, rngs=nnx.Rngs(0))
      >>> layer(jnp.ones((4, 16))).shape
      (4, 24)
      >>> grads = nnx.grad(lambda layer, x: layer(x).sum())(layer, jnp.ones((4, 16)))
      >>> grads.kernel.shape, grads.bias.shape
      ((3, 8, 8), (24,))
    """

    def __init__(
        self,
        layout,
        *,
        use_bias=True,
        dtype=None,
        param_dtype=jnp.float32,
        precision=None,
        kernel_init=None,
        bias_init=jax.nn.initializers.zeros,
        rngs,
    ):
        """Makes the parameters.

        Args:
          layout: where the blocks of `w`, `[k, n]`, are: a `bsjax.Layout`.
          use_bias: whether to add a bias.
          dtype: of the computation and the result; float32, float16 or bfloat16. None: what input and parameters
            promote to.
          param_dtype: of the parameters.
          precision: as in `bsjax.spmm`.
          kernel_init: `init(key, (num_blocks, b, b), param_dtype)`: one of `bsjax.nn.initializers` for this layout, or
            of `jax.nn.initializers`. None: `scaled_normal(layout)`.
          bias_init: `init(key, (n,), param_dtype)`.
          rngs: an `nnx.Rngs`; a key of its stream `params` is taken for each parameter.

        Raises:
          TypeError: if `layout` is no `Layout`, or `dtype` is none of the three.
          ValueError: if `layout` is a stack of layouts.
        """
        check(layout, dtype)
        kernel_init = kernel_init or initializers.scaled_normal(layout)
        shape = (layout.num_blocks, layout.block_size, layout.block_size)
        self.kernel = nnx.Param(kernel_init(rngs.params(), shape, param_dtype))
        self.bias: Any = nnx.data(None)
        if use_bias:
            self.bias = nnx.Param(bias_init(rngs.params(), (layout.shape[1],), param_dtype))
        # Copies: the caller's layout lives on when this state is donated, and two layers of one layout share no buffer.
        self.pattern = nnx.Dict({name: Pattern(jnp.copy(leaf)) for name, leaf in to_leaves(layout).items()})
        self.shape = layout.shape
        self.block_size = layout.block_size
        self.dtype = dtype
        self.param_dtype = param_dtype
        self.precision = precision

    @property
    def layout(self):
        """Where the blocks of `w` are: the `bsjax.Layout` in `pattern`."""
        leaves = {name: leaf.get_value() for name, leaf in self.pattern.items()}
        return of_leaves(leaves, self.shape, self.block_size)

    def __call__(self, x):
        """Computes `x @ w + bias`.

        Args:
          x: `[..., k]`.

        Returns:
          `[..., n]` in `dtype`: accumulated in float32 and rounded, then the bias added in `dtype`.

        Raises:
          TypeError: if `dtype` is None and input and parameters promote to none of the three dtypes.
          ValueError: if a shape does not fit `layout`.
        """
        bias = None if self.bias is None else self.bias[...]
        return apply(x, self.kernel[...], bias, self.layout, self.dtype, self.precision)


def check(layout, dtype):
    """Checks what a layer is made of; shared with Linen."""
    if not isinstance(layout, Layout):
        raise TypeError(
            "`layout` must be a bsjax.Layout, as Layout.from_mask(mask, block_size) makes it; "
            f"got {type(layout).__name__}."
        )
    layout.check()
    if dtype is not None and jnp.dtype(dtype) not in _DTYPES:
        raise TypeError(f"`dtype` must be float32, float16, bfloat16 or None; got {jnp.dtype(dtype).name}.")


def apply(x, kernel, bias, layout, dtype, precision):
    """The layer as a function of arrays; shared with Linen."""
    layout.check()  # before dtypes are promoted: who cast the whole state should hear of the pattern
    expected = (layout.num_blocks, layout.block_size, layout.block_size)
    if kernel.shape != expected:
        raise ValueError(
            f"`kernel` must have shape {expected}, (num_blocks, b, b) of `layout`; got {kernel.shape}. "
            "Parameters fit the layout that they were made for only."
        )
    x, kernel, bias = dtypes.promote_dtype((x, kernel, bias), dtype=dtype)
    y: Any = spmm(x, kernel, layout, precision=precision)
    return y if bias is None else y + jnp.broadcast_to(bias, y.shape)
