"""Runs a small grid of both products under compute-sanitizer: `python tests/sanitize.py [tool ...]`.

memcheck finds accesses out of bounds, racecheck unordered shared memory, synccheck misused barriers, initcheck reads of
unwritten memory. Each tool and block size runs in a process of its own, and any finding fails the command. Needs a CUDA
card.
"""

import argparse
import itertools
import os
import subprocess
import sys

TOOLS = ("memcheck", "racecheck", "synccheck", "initcheck")


def grid(b):
    """The kernels of one block size: dtypes x directions, on a pattern with an empty row and column.

    The pattern comes from the host; from a traced program, with padding; and with a broken seal.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    import bsjax
    from bsjax import _ffi

    if jax.default_backend() != "gpu":
        sys.exit("No CUDA device: the sanitizer checks the CUDA kernels only.")
    assert "CUDA" in _ffi.registrations, "This wheel has no CUDA handlers."
    mask = np.array([[1, 0, 1, 1], [0, 0, 0, 0], [1, 0, 0, 1]], bool)
    layout = bsjax.Layout.from_mask(mask, b)
    places = (np.append(places, -1) for places in np.nonzero(mask))
    traced = jax.jit(lambda rows, cols: bsjax.Layout.from_indices(rows, cols, layout.shape, b))(*places)
    harmed = jax.tree.map(lambda leaf: 2 * leaf, layout)
    rng = np.random.default_rng(0)
    for dtype, m in itertools.product(["float32", "float16", "bfloat16"], [1, 33, 200]):
        shapes = (m, layout.shape[0]), (m, layout.shape[1]), (layout.num_blocks, b, b)
        x, dy, w = (jnp.asarray(rng.normal(size=shape).astype(jnp.dtype(dtype))) for shape in shapes)
        for precision in ("float32", "tensorfloat32") if dtype == "float32" else ("float32",):
            y = bsjax.spmm(x, w, layout, precision=precision)
            dx = bsjax.spmm(dy, w, layout, transpose=True, precision=precision)
            dw = bsjax.sddmm(x, dy, layout, precision=precision)
            members = jax.vmap(bsjax.spmm, (0, 0, None))(jnp.stack([x, x]), jnp.stack([w, w]), layout)
            for out in (y, dx, dw, members):
                assert np.isfinite(np.asarray(out).astype(np.float32)).all()
        padded = jnp.concatenate([w, jnp.full_like(w[:1], jnp.nan)])
        for out in (bsjax.spmm(x, padded, traced), bsjax.sddmm(x, dy, traced)):
            assert np.isfinite(np.asarray(out).astype(np.float32)).all()
        for out in (bsjax.spmm(x, w, harmed), bsjax.spmm(dy, w, harmed, transpose=True), bsjax.sddmm(x, dy, harmed)):
            assert np.isnan(np.asarray(out).astype(np.float32)).all()
        print(f"ran block_size={b} {dtype} rows={m}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tools", nargs="*", default=["memcheck", "racecheck"], help=", ".join(TOOLS))
    parser.add_argument("--block-size", type=int, nargs="*", default=[8, 16, 32, 64, 128])
    parser.add_argument("--grid", type=int, metavar="B", help="run the grid of one block size, without a sanitizer")
    args = parser.parse_args()
    if args.grid:
        return grid(args.grid)
    failed = False
    for tool, b in itertools.product(args.tools, args.block_size):
        if tool not in TOOLS:
            parser.error(f"unknown tool {tool!r}; known: {', '.join(TOOLS)}")
        # Only our kernels: XLA's own are not ours to check, and checking them takes most of the time.
        command = [
            "compute-sanitizer",
            "--tool",
            tool,
            "--error-exitcode",
            "9",
            "--kernel-name",
            "kernel_substring=bsjax",
        ]
        environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        done = subprocess.run([*command, sys.executable, __file__, "--grid", str(b)], env=environment, check=False)
        print(
            f"{tool} block_size={b}: {'clean' if done.returncode == 0 else f'failed ({done.returncode})'}", flush=True
        )
        failed |= done.returncode != 0
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
