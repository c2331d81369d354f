"""Device time of several functions on the same arguments, measured so that their ratios can be trusted; and every
compiled kernel by its number, for those who time or test them one by one."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from bsjax.ops import _matmul

# Calls a turn, back to back on a GPU: enough for the median to leave out a stray one, few enough to take turns often.
_CALLS = 5
# Seconds of a call that is measured well by few: it is not called back to back, and sits out after _FEW turns.
_SLOW, _FEW = 0.02, 3


@dataclasses.dataclass(frozen=True)
class Clock:
    """A way to take time.

    Attributes:
      name: what it measures, in words for the head of a table.
      samples: `samples(f, args)` calls f on args, once or more, and returns seconds per call, one number or more.
    """

    name: str
    samples: Callable[[Callable, tuple], list[float]]


def device_clock() -> Clock:
    """The best clock for the default device: kernel times by CUPTI on a GPU, wall time elsewhere.

    CUPTI sees every kernel of the process, whoever launches it: XLA, torch, Triton, a C library. Where it does not
    serve, the clock is wall time over a chain of calls, and its name says why.
    """
    if jax.default_backend() != "gpu":
        return Clock("wall time of each call", _wall_times)
    try:
        from jax.experimental.mosaic.gpu import profiler

        cupti = profiler.mosaic_gpu_lib._mosaic_gpu_ext  # pyright: ignore[reportPrivateImportUsage]
        clock = Clock(
            "sum of kernel times by CUPTI, without launches and gaps", lambda f, args: _kernel_times(cupti, f, args)
        )
        clock.samples(jax.jit(jnp.square), (jnp.ones(8),))
        return clock
    except (ImportError, AttributeError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        calls = 4 * _CALLS  # a longer chain: launches should hide behind the device's work
        return Clock(
            f"wall time over {calls} calls, launches included, since CUPTI does not serve ({reason})",
            lambda f, args: [_wall(f, args, calls)],
        )


def medians(functions, args, clock, rounds=5) -> dict[str, float]:
    """Median seconds per call of each of several functions on the same arguments.

    They take turns, A B A B, so that a change of clock or load falls on all of them. Each is called once before, to
    compile and warm up; the arguments are the same in every call, so as much of them as fits stays in the caches. One
    that takes longer than 20 ms a call sits out after three turns.

    Args:
      functions: {name: function}; what it returns is an array, or anything that `jax.block_until_ready` waits for.
      args: what each is called with: arrays that are on the device, since one closed over by a jitted function would
        be folded.
      clock: a `Clock`.
      rounds: how often each has its turn.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from bsjax.testing import timing
      >>> functions = {"square": jax.jit(jnp.square), "sine": jax.jit(jnp.sin)}
      >>> seconds = timing.medians(functions, (jnp.ones(8),), timing.device_clock())
      >>> sorted(seconds), min(seconds.values()) > 0
      (['sine', 'square'], True)
    """
    for f in functions.values():
        jax.block_until_ready(f(*args))
    samples = {name: [] for name in functions}
    for turn in range(rounds):
        for name, f in functions.items():
            if turn < _FEW or min(samples[name]) < _SLOW:
                samples[name] += clock.samples(f, args)
    return {name: statistics.median(values) for name, values in samples.items()}


def _wall_times(f, args):
    first = _wall(f, args, 1)
    return [first, *(_wall(f, args, 1) for _ in range(_CALLS - 1 if first < _SLOW else 0))]


def _wall(f, args, calls):
    begin = time.perf_counter()
    results = [f(*args) for _ in range(calls)]
    jax.block_until_ready(results)
    return (time.perf_counter() - begin) / calls


def _kernel_times(cupti, f, args):
    """Seconds of each of several calls back to back: of those kernels that ran from its begin on."""
    begin = time.perf_counter()
    jax.block_until_ready(f(*args))
    calls = 1 if time.perf_counter() - begin > _SLOW else _CALLS
    cupti._cupti_init()
    try:
        jax.block_until_ready([f(*args) for _ in range(calls)])
    finally:
        kernels = cupti._cupti_get_timings(False)  # True detaches CUPTI, which takes ten times as long
    if not kernels:
        raise RuntimeError("no kernel was seen")
    milliseconds = [value for _, value in kernels]
    if len(kernels) % calls:  # a call that launches now more, now fewer: their mean
        return [sum(milliseconds) / calls / 1e3]
    each = len(kernels) // calls
    return [sum(milliseconds[i : i + each]) / 1e3 for i in range(0, len(kernels), each)]


# ----------------------------------------------------------------------------------------------- kernels by number


def num_kernels(op) -> int:
    """How many compiled kernels "spmm" or "sddmm" has on this platform to choose from by number; 0 off a GPU."""
    native = _matmul._ffi.native
    if jax.default_backend() != "gpu" or native is None or native.cuda_version is None:
        return 0
    return native.num_cuda_configs[f"bsjax_{op}"]


def spmm(x, blocks, layout, *, transpose=False, tf32=False, kernel):
    """`bsjax.spmm` by the kernel of that number; raises where it does not serve the case, and names `config`."""
    lists = layout.lists(transpose)
    return _matmul._spmm_call(x[None], blocks[None], *lists, transpose=transpose, tf32=tf32, config=kernel)[0]


def sddmm(x, dy, layout, *, tf32=False, kernel):
    """`bsjax.sddmm` by the kernel of that number."""
    attrs = {"block_size": layout.block_size, "tf32": tf32, "config": kernel}
    return _matmul._sddmm_call(x[None], dy[None], layout.rows, layout.cols, layout.wgrad_schedule, **attrs)[0]
