"""Device time of several functions on the same arguments, measured so that their ratios can be trusted."""

import dataclasses
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

# Calls back to back on a GPU: enough for the median to leave out a stray one, few enough to take turns often.
_CALLS = 5


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

    Where CUPTI does not serve, the clock is wall time over a chain of calls, and its name says why.
    """
    if jax.default_backend() != "gpu":
        return Clock("wall time of each call", lambda f, args: [_wall(f, args, 1)])
    try:
        from jax.experimental.mosaic.gpu import profiler

        clock = Clock(
            "sum of kernel times by CUPTI, without launches and gaps", lambda f, args: _cupti(profiler, f, args)
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
    """Median seconds per call of each of several jitted functions on the same arguments.

    They take turns, A B A B, so that a change of clock or load falls on all of them. Each is called once before, to
    compile and warm up; the arguments are the same in every call, so as much of them as fits stays in the caches.

    Args:
      functions: {name: function}.
      args: what each is called with: arrays that are on the device, since a closed-over one would be folded.
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
    for _ in range(rounds):
        for name, f in functions.items():
            samples[name] += clock.samples(f, args)
    return {name: statistics.median(values) for name, values in samples.items()}


def _wall(f, args, calls):
    begin = time.perf_counter()
    results = [f(*args) for _ in range(calls)]
    jax.block_until_ready(results)
    return (time.perf_counter() - begin) / calls


def _cupti(profiler, f, args):
    _, milliseconds = profiler.measure(f, iterations=_CALLS)(*args)
    if milliseconds is None:
        raise RuntimeError("no kernel was seen")
    return [value / 1e3 for value in milliseconds]
