"""The modules of `bsjax.nn` for Flax Linen: same names, same parameters, same results."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen

from bsjax._layout import Layout
from bsjax.nn import _dense, initializers


class BlockSparseLinear(linen.Module):
    """A linear layer with a block-sparse weight: `y = x @ w + bias`, of which the stored blocks alone take part.

    Its parameters are `kernel`, `[num_blocks, b, b]`, and `bias`, `[n]`: those of `bsjax.nn.BlockSparseLinear`, which
    computes the same from them. The layout belongs to the module, not to its variables: a checkpoint of the parameters
    does not hold it (`Layout.save` does), and another layout is another module, compiled anew.

    Attributes:
      layout: where the blocks of `w`, `[k, n]`, are: a `bsjax.Layout`.
      use_bias: whether to add a bias.
      dtype: of the computation and the result; float32, float16 or bfloat16. None: what input and parameters promote
        to.
      param_dtype: of the parameters.
      precision: as in `bsjax.spmm`.
      kernel_init: `init(key, (num_blocks, b, b), param_dtype)`: one of `bsjax.nn.initializers` for this layout, or of
        `jax.nn.initializers`. None: `scaled_normal(layout)`.
      bias_init: `init(key, (n,), param_dtype)`.

    Raises:
      TypeError: if `layout` is no `Layout`, or `dtype` is none of the three.
      ValueError: if `layout` is a stack of layouts.

    Example:
      >>> import bsjax, jax, jax.numpy as jnp
      >>> layout = bsjax.Layout.from_mask([[1, 0, 1], [0, 0, 1]], block_size=8)
      >>> layer = bsjax.linen.BlockSparseLinear(layout)
      >>> variables = layer.init(jax.random.key(0), jnp.ones((4, 16)))
      >>> jax.tree.map(jnp.shape, variables)
      {'params': {'bias': (24,), 'kernel': (3, 8, 8)}}
      >>> layer.apply(variables, jnp.ones((4, 16))).shape
      (4, 24)
    """

    # An attribute, as all configuration of a Linen module is: it hashes and compares by content, so equal modules share
    # what they compiled. In a collection of variables it could change without recompiling, as in nnx, but then every
    # `apply` would have to be given that collection beside the parameters.
    layout: Layout
    use_bias: bool = True
    dtype: Any = None
    param_dtype: Any = jnp.float32
    precision: Any = None
    kernel_init: Any = None
    bias_init: Any = jax.nn.initializers.zeros

    def __post_init__(self):
        _dense.check(self.layout, self.dtype)
        super().__post_init__()

    @linen.compact
    def __call__(self, x):
        """Computes `x @ w + bias`: `[..., k]` to `[..., n]` in `dtype`, as `bsjax.nn.BlockSparseLinear` does."""
        layout = self.layout
        kernel_init = self.kernel_init or initializers.scaled_normal(layout)
        shape = (layout.num_blocks, layout.block_size, layout.block_size)
        kernel = self.param("kernel", kernel_init, shape, self.param_dtype)
        bias = self.param("bias", self.bias_init, (layout.shape[1],), self.param_dtype) if self.use_bias else None
        return _dense.apply(x, kernel, bias, layout, self.dtype, self.precision)
