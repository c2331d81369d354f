"""Every compiled kernel by its number, each checked and timed: from these rows the tables of choice are written."""

import functools

import jax
import jax.numpy as jnp

from bsjax.testing import timing
from experiments.bench import check, table
from experiments.bench.peers import PASSES, Dense
from experiments.common import CommandError

COLUMNS = (*table.BASE[:6], ("kernel", "kernel", "s"), ("us", "us", ".1f"), ("x chosen", "x_chosen", ".2f"))
_OPS = {"fprop": "spmm", "dgrad": "spmm", "wgrad": "sddmm"}
_CHOOSE = -1


def numbers(config):
    """{op: numbers to measure} of the option `config`."""
    counts = {op: timing.num_kernels(op) for op in ("spmm", "sddmm")}
    if not config:
        return {}
    if not any(counts.values()):
        raise CommandError("`config` needs a GPU and a bsjax built with CUDA: only they have numbered kernels.")
    if config == "all":
        return {op: range(count) for op, count in counts.items()}
    if not config.isdecimal() or int(config) >= max(counts.values()):
        raise CommandError(f"`config` must be `all` or a number below {max(counts.values())}; got {config!r}.")
    return {op: [int(config)] if int(config) < count else [] for op, count in counts.items()}


def measure(case, chosen, dtype, clock):
    """Rows of one case: for each pass the kernel that the handler chooses, then each of those numbers that serves."""
    layout, rows = case.layout(), []
    whole, drawn = (check.operands(layout, case.m, dtype, draw) for draw in (check.integers, check.normal))
    for name in PASSES:
        want = check.result(Dense(out=jnp.float32), name, whole)
        wrong, turns = {}, {}
        for kernel in (_CHOOSE, *chosen[_OPS[name]]):
            run = _kernel(name, whole.tf32, kernel)
            try:
                wrong[kernel] = int(check.wrong_elements(run(*_operands(name, whole)), want))
            except Exception as error:
                if "`config` must be" not in str(error):  # this one does not serve the case; anything else is a fault
                    raise
                continue
            if not wrong[kernel]:
                turns[kernel] = run
        seconds = timing.medians(turns, _operands(name, drawn), clock)
        usual = seconds.get(_CHOOSE)
        best = min(seconds.keys() - {_CHOOSE}, key=lambda number: seconds[number], default=None)
        for kernel, count in wrong.items():
            own = seconds.get(kernel)
            words = "chosen" if kernel == _CHOOSE else f"{kernel}{' *' if kernel == best else ''}"
            row = {"case": case.name, "pass": name, "kernel": words, "wrong": count, "us": own and own * 1e6}
            rows.append(row | table.sizes(case.m, layout, dtype) | {"x_chosen": own and usual and usual / own})
    return rows


def _operands(name, data):
    first = data.dy if name == "dgrad" else data.x
    return first, data.dy if name == "wgrad" else data.blocks, data.layout


def _kernel(name, tf32, kernel):
    op = functools.partial(timing.spmm, transpose=name == "dgrad") if _OPS[name] == "spmm" else timing.sddmm
    return jax.jit(functools.partial(op, tf32=tf32, kernel=kernel))
