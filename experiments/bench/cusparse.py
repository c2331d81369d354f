"""cuSPARSE as a peer, by its C interface on the memory of JAX arrays: SpMM of Blocked-ELL and BSR, SDDMM of BSR.

cuSPARSE multiplies a sparse matrix from the left, so fprop is y.T = w.T @ x.T and dgrad dx.T = w @ dy.T. The transpose
of a dense matrix in row-major order is the same memory in column-major order; both orders of either dense matrix are
tried, as if activations were stored in the one that suits. The sparse matrix is prepared once and that is not timed.
"""

import ctypes
import ctypes.util
import functools
import importlib.util
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from experiments.bench.peers import Launched, Missing, Refused, Way, first_line, transposed

_COLUMNS, _ROWS = 1, 2  # cusparseOrder_t
_INT32, _ZERO_BASE, _AS_IS = 2, 0, 0  # cusparseIndexType_t, cusparseIndexBase_t, cusparseOperation_t
_ELL_ALG1, _BSR_ALG1, _SDDMM_DEFAULT = 13, 14, 0  # cusparseSpMMAlg_t, cusparseSDDMMAlg_t
_TYPES = {"float32": 0, "float16": 2, "bfloat16": 14}  # cudaDataType
_FLOAT32 = _TYPES["float32"]  # what sums are in
_P, _N, _E = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int  # pointers and handles, sizes, enumerators
_PRODUCT = [_P, _E, _E, _P, _P, _P, _P, _P, _E, _E, _P]  # SpMM and SDDMM, and what sizes or prepares their workspace
_SIGNATURES = {
    "cusparseCreate": [_P],
    "cusparseGetVersion": [_P, _P],
    "cusparseCreateDnMat": [_P, _N, _N, _N, _P, _E, _E],
    "cusparseCreateBlockedEll": [_P, _N, _N, _N, _N, _P, _P, _E, _E, _E],
    "cusparseCreateBsr": [_P, _N, _N, _N, _N, _N, _P, _P, _P, _E, _E, _E, _E, _E],
    "cusparseSpMM_bufferSize": _PRODUCT,
    "cusparseSpMM_preprocess": _PRODUCT,
    "cusparseSpMM": _PRODUCT,
    "cusparseSDDMM_bufferSize": _PRODUCT,
    "cusparseSDDMM_preprocess": _PRODUCT,
    "cusparseSDDMM": _PRODUCT,
    "cusparseDestroyDnMat": [_P],
    "cusparseDestroySpMat": [_P],
}


def ell(layout, blocks, *, transpose):
    """Puts `w`, or `w.T`, into Blocked-ELL form: as many entries in every block row as the longest has.

    Returns:
      columns, int32 `[block rows, width]`, -1 where a shorter row is padded, and values `[rows, width * b]`, row-major,
      zero there.
    """
    indptr, indices, perm, _ = layout.lists(not transpose)
    indptr, b = np.asarray(indptr), layout.block_size
    lengths = np.diff(indptr)
    width = int(lengths.max(initial=0))
    entry = np.arange(width)
    stored = entry < lengths[:, None]
    place = np.where(stored, indptr[:-1, None] + entry, 0)
    columns = np.where(stored, np.asarray(indices)[place], -1).astype(np.int32)
    own = np.asarray(blocks)[np.asarray(perm)[place]]  # [block rows, width, b, b]
    own[~stored] = 0
    # The rows of one block row's blocks side by side: axes block row, row in the block, entry, column in the block.
    own = own.transpose(0, 3, 1, 2) if transpose else own.swapaxes(1, 2)
    return jnp.asarray(columns), jnp.asarray(own.reshape(len(lengths) * b, width * b))


class BlockedEll:
    """`cusparseSpMM` of a Blocked-ELL matrix. The format has no sampled product."""

    name = "cusparse_ell"

    def __init__(self):
        self._library = _Library()
        self.about = f"cuSPARSE {self._library.version}, SpMM of Blocked-ELL"

    def fprop(self, data):
        return self._products(data, data.x, True)

    def dgrad(self, data):
        return self._products(data, data.dy, False)

    def wgrad(self, data):
        raise Refused("SDDMM does not know Blocked-ELL")

    def _products(self, data, x, transpose):
        if x.dtype == jnp.float32 and not data.tf32:
            raise Refused("rounds float32 to TF32")  # seen by its error, 300 times that of BSR's
        columns, values = ell(data.layout, data.blocks, transpose=transpose)
        n, k = data.layout.shape[::-1] if transpose else data.layout.shape
        where = n, k, data.layout.block_size, values.shape[1], columns, values, _INT32, _ZERO_BASE, _type(x)
        return self._library.spmm_ways("cusparseCreateBlockedEll", where, _ELL_ALG1, x, n)


class Bsr:
    """`cusparseSpMM` of a BSR matrix, its blocks row-major as ALG1 wants them; wgrad by `cusparseSDDMM`."""

    name = "cusparse_bsr"

    def __init__(self):
        self._library = _Library()
        self.about = f"cuSPARSE {self._library.version}, SpMM and SDDMM of BSR"

    def fprop(self, data):
        layout = data.layout
        where = self._bsr(layout.shape[::-1], layout.indptr_t, layout.indices_t, transposed(data))
        return self._library.spmm_ways("cusparseCreateBsr", where, _BSR_ALG1, data.x, layout.shape[1])

    def dgrad(self, data):
        layout = data.layout
        where = self._bsr(layout.shape, layout.indptr, layout.indices, data.blocks)
        return self._library.spmm_ways("cusparseCreateBsr", where, _BSR_ALG1, data.dy, layout.shape[0])

    def wgrad(self, data):
        layout = data.layout

        def bsr(dblocks):
            return self._bsr(layout.shape, layout.indptr, layout.indices, dblocks)

        return self._library.sddmm_ways(bsr, data.x, data.dy, data.blocks.shape)

    def _bsr(self, shape, indptr, indices, blocks):
        b = blocks.shape[-1]
        sizes = shape[0] // b, shape[1] // b, len(blocks), b, b
        return *sizes, indptr, indices, blocks, _INT32, _INT32, _ZERO_BASE, _type(blocks), _ROWS


def _type(array):
    return _TYPES[array.dtype.name]


class _Library:
    """libcusparse with a handle on the legacy default stream of the current device, which is also JAX's first."""

    def __init__(self):
        self._calls, self._driver = _load()
        for name, signature in _SIGNATURES.items():
            getattr(self._calls, name).argtypes = signature
        self._calls.cusparseGetErrorString.restype = ctypes.c_char_p
        jax.block_until_ready(jnp.zeros(1))  # the device's context
        self._handle = self._make("cusparseCreate")
        version = ctypes.c_int()
        self._call("cusparseGetVersion", self._handle, ctypes.addressof(version))
        self.version = f"{version.value // 1000}.{version.value // 100 % 10}.{version.value % 100}"
        self._one, self._zero = ctypes.c_float(1), ctypes.c_float(0)

    def spmm_ways(self, create, where, algorithm, x, n):
        """`w @ x.T` for the sparse `w`, `[n, k]`, of `create(*where)`, in both orders of x.T and of the result."""
        (m, k), x_in = x.shape, {_COLUMNS: x, _ROWS: x.T}
        make_sparse = functools.partial(self._descriptor, "cusparseDestroySpMat", create, *where)
        found = []
        for x_order in (_COLUMNS, _ROWS):
            for y_order in (_COLUMNS, _ROWS):
                sparse = make_sparse()  # one each: a preprocessed one belongs to one product
                y = _poisoned((m, n) if y_order == _COLUMNS else (n, m), x.dtype)
                operands = sparse, self._dense(x_in[x_order], k, m, x_order), self._dense(y, n, m, y_order)
                read = jnp.asarray if y_order == _COLUMNS else jnp.transpose
                found.append(self._way("cusparseSpMM", operands, algorithm, y, read, _words(x_order, y_order)))
        return found

    def sddmm_ways(self, bsr, x, dy, shape):
        """`x.T @ dy` at the blocks of `bsr(dblocks)`, in both orders of either."""
        (m, k), n = x.shape, dy.shape[1]
        x_in, dy_in = {_COLUMNS: x, _ROWS: x.T}, {_ROWS: dy, _COLUMNS: dy.T}
        found = []
        for x_order in (_COLUMNS, _ROWS):
            for dy_order in (_ROWS, _COLUMNS):
                dblocks = _poisoned(shape, x.dtype)
                sparse = self._descriptor("cusparseDestroySpMat", "cusparseCreateBsr", *bsr(dblocks))
                dense_x = self._dense(x_in[x_order], k, m, x_order)
                operands = dense_x, self._dense(dy_in[dy_order], m, n, dy_order), sparse
                words = _words(x_order, dy_order)
                found.append(self._way("cusparseSDDMM", operands, _SDDMM_DEFAULT, dblocks, jnp.asarray, words))
        return found

    def _dense(self, memory, rows, cols, order):
        """A dense `[rows, cols]` over an array that is `[cols, rows]` where the order is column-major."""
        lead = rows if order == _COLUMNS else cols
        arguments = rows, cols, lead, memory, _type(memory), order
        return self._descriptor("cusparseDestroyDnMat", "cusparseCreateDnMat", *arguments)

    def _way(self, product, operands, algorithm, result, read, words):
        a, b, c = (operand.handle for operand in operands)
        one, zero = ctypes.addressof(self._one), ctypes.addressof(self._zero)
        arguments = self._handle, _AS_IS, _AS_IS, one, a, b, zero, c, _FLOAT32, algorithm
        kept, ready = [operands, result], []

        def prepare():
            size = ctypes.c_size_t()
            self._call(f"{product}_bufferSize", *arguments, ctypes.addressof(size))
            workspace = jax.block_until_ready(jnp.zeros(max(size.value, 16), jnp.uint8))
            kept.append(workspace)
            ready.append(workspace.unsafe_buffer_pointer())
            self._call(f"{product}_preprocess", *arguments, ready[0])

        def run():
            if not ready:  # so that a way that cuSPARSE refuses is refused alone
                prepare()
            self._call(product, *arguments, ready[0])
            return Launched(result, self._wait)

        return Way(run, lambda launched: read(launched.value), words)

    def _descriptor(self, destroy, create, *arguments):
        arrays = [jax.block_until_ready(a) if isinstance(a, jax.Array) else None for a in arguments]
        values = [a if b is None else b.unsafe_buffer_pointer() for a, b in zip(arguments, arrays, strict=True)]
        return _Descriptor(self._make(create, *values), getattr(self._calls, destroy), arrays)

    def _make(self, create, *arguments):
        handle = ctypes.c_void_p()
        self._call(create, ctypes.addressof(handle), *arguments)
        return handle.value

    def _call(self, name, *arguments):
        status = getattr(self._calls, name)(*arguments)
        if status:
            raise Refused(f"{name}: {self._calls.cusparseGetErrorString(status).decode()}")

    def _wait(self):
        error = self._driver.cuCtxSynchronize()
        if error:
            raise RuntimeError(f"cuSPARSE left the device with CUDA error {error}")


class _Descriptor:
    """A cuSPARSE descriptor, and the arrays whose memory it points to."""

    def __init__(self, handle, destroy, arrays):
        self.handle, self._destroy, self._arrays = handle, destroy, arrays

    def __del__(self):
        self._destroy(self.handle)


def _words(first, second):
    return " and ".join("column-major" if order == _COLUMNS else "row-major" for order in (first, second))


def _poisoned(shape, dtype):
    """Memory for a result. JAX does not know that it will be written, so nothing else may hold this array."""
    return jax.block_until_ready(jnp.full(shape, jnp.nan, dtype))


def _load():
    """libcusparse, as JAX's own wheels brought it or as the system has it, and the driver."""
    wheels = importlib.util.find_spec("nvidia")
    folders = wheels.submodule_search_locations if wheels else []
    paths = [str(path) for folder in folders or [] for path in sorted(pathlib.Path(folder).rglob("libcusparse.so.*"))]
    system = ctypes.util.find_library("cusparse")
    reason = "no libcusparse was found"
    # By its bare name first: that is the one which JAX has loaded already.
    for path in ["libcusparse.so.12", *paths, *([system] if system else [])]:
        try:
            return ctypes.CDLL(path), ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            reason = first_line(error)
    raise Missing(reason)
