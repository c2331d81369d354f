"""Peers that come with torch: its own BSR products and STK. Neither is needed to run anything here."""

import importlib
import warnings

import jax
import jax.numpy as jnp

from experiments.bench.peers import Launched, Missing, Refused, Way, first_line, transposed


def _torch():
    try:
        torch = importlib.import_module("torch")
    except (ImportError, OSError) as error:
        raise Missing(first_line(error)) from None
    if not torch.cuda.is_available():
        raise Missing("this torch has no CUDA")
    return torch


class TorchBsr:
    """`w @ x` in torch's BSR layout, by Triton's kernels for half types as they come; wgrad by `sampled_addmm`."""

    name = "torch_bsr"

    def __init__(self):
        self._torch = _torch()
        self.about = f"torch {self._torch.__version__}, sparse_bsr @ dense and sampled_addmm"

    def fprop(self, data):
        layout = data.layout
        w_t = self._bsr(layout.indptr_t, layout.indices_t, transposed(data), layout.shape[::-1])
        return self._products(data.x, w_t, data)

    def dgrad(self, data):
        layout = data.layout
        return self._products(data.dy, self._bsr(layout.indptr, layout.indices, data.blocks, layout.shape), data)

    def wgrad(self, data):
        layout = data.layout
        where = self._bsr(layout.indptr, layout.indices, data.blocks, layout.shape)
        x, dy = self._share(data.x), self._share(data.dy)
        self._set_tf32(data)
        sampled = self._torch.sparse.sampled_addmm
        triton = importlib.import_module(
            "torch.sparse._triton_ops"
        ).sampled_addmm  # the only one for BSR in some torches
        return [
            self._way(lambda: sampled(where, x.t(), dy, beta=0.0).values(), jnp.asarray, "torch.sparse"),
            self._way(lambda: triton(where, x.t(), dy, beta=0.0).values(), jnp.asarray, "_triton_ops"),
        ]

    def _products(self, x, w, data):
        # The product is w @ x.T, and its result [n, m]; x.T is a view, or a copy made before.
        self._set_tf32(data)
        x = self._share(x)
        copied = x.t().contiguous()
        return [
            self._way(lambda: w @ x.t(), jnp.transpose, "x as it is"),
            self._way(lambda: w @ copied, jnp.transpose, "x feature-first"),
        ]

    def _way(self, run, read, words):
        def launch():
            return Launched(run(), self._torch.cuda.synchronize)

        return Way(launch, lambda launched: read(jnp.from_dlpack(launched.value.contiguous())), words)

    def _bsr(self, indptr, indices, blocks, shape):
        with warnings.catch_warnings(action="ignore"):  # that the layout is in beta state
            return self._torch.sparse_bsr_tensor(*map(self._share, (indptr, indices, blocks)), size=shape)

    def _share(self, array):
        return self._torch.from_dlpack(jax.block_until_ready(array))

    def _set_tf32(self, data):
        self._torch.backends.cuda.matmul.allow_tf32 = data.tf32


class Stk:
    """STK (stanford-futuredata/stk): fprop `dds`, wgrad `sdd`, by Triton."""

    name = "stk"

    def __init__(self):
        self._torch = _torch()
        try:
            self._stk = importlib.import_module("stk")
            self._ops = importlib.import_module("stk.ops")
        except (ImportError, OSError) as error:
            raise Missing(first_line(error)) from None
        self.about = "STK, dds and sdd"

    def fprop(self, data):
        w = self._matrix(data)
        x = self._share(data.x)
        return [self._way(lambda: self._ops.dds(x, w))]

    def dgrad(self, data):
        w = self._matrix(data).t()
        dy = self._share(data.dy)
        return [self._way(lambda: self._ops.dds(dy, w))]

    def wgrad(self, data):
        where = self._matrix(data)
        x, dy = self._share(data.x), self._share(data.dy)
        return [self._way(lambda: self._ops.sdd(x.t(), dy, where).data)]

    def _matrix(self, data):
        layout = data.layout
        if layout.block_size != 128 or len(data.x) % 128:
            # Its kernels are written for these tiles; a smaller block reads foreign memory, which spoils the process.
            raise Refused("block size 128 and rows in 128s only")
        if data.blocks.dtype == jnp.float32:
            raise Refused("half types only")
        index = [self._share(a.astype(jnp.int16)) for a in (layout.rows, layout.cols)]
        return self._stk.Matrix(layout.shape, self._share(data.blocks), *index, self._share(layout.indptr))

    def _way(self, run):
        return Way(
            lambda: Launched(run(), self._torch.cuda.synchronize),
            lambda launched: jnp.from_dlpack(launched.value.contiguous()),
        )

    def _share(self, array):
        return self._torch.from_dlpack(jax.block_until_ready(array))
