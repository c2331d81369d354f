"""How fast are spmm and sddmm? `python -m experiments.bench.matmul` checks each case, then prints one table."""

import dataclasses
import json
import pathlib

import jax

from bsjax.testing import timing
from experiments import command
from experiments.bench import cases, check, cusparse, kernels, plot, table, torch_peers
from experiments.bench.peers import PASSES, Dense, Missing, Ours, Reference
from experiments.common import CommandError, write_text

USAGE = """python -m experiments.bench.matmul [key=value ...]
  suite=NAME     standard (by default), sweep (densities), sizes, dtypes or all
  case=NAME      one case of any suite
  dtype=NAME     float32, tf32, float16 or bfloat16 where a case has none of its own; by default bfloat16 on a GPU,
                 float32 elsewhere
  rows=COUNT     rows of x, in place of the case's own
  peers=NAMES    of dense,reference,cusparse_ell,cusparse_bsr,torch_bsr,stk; all that are here by default
  config=NUMBER  no peers, but the compiled CUDA kernel of that number beside the one that is chosen; `all` for each
  commit=NAME    what is measured, where git cannot tell
  workdir=PATH   where matmul.json and matmul.png (kernels.json with config=) are written; runs/bench by default"""


@dataclasses.dataclass(frozen=True)
class Options:
    suite: str = "standard"
    case: str = ""
    dtype: str = ""
    rows: int = 0
    peers: str = ""
    config: str = ""
    commit: str = ""
    workdir: str = "runs/bench"


# -------------------------------------------------------------------------------------------------------------- rows


def _fastest(ways, clock):
    """The way that two turns of each favour."""
    if len(ways) == 1:
        return ways[0]
    seconds = timing.medians({i: way.run for i, way in enumerate(ways)}, (), clock, rounds=2)
    return ways[min(seconds, key=lambda position: seconds[position])]


def measure(case, peers, dtype, clock):
    """Checks one case, then times it: a list of rows, one a pass. A pass that is wrong has no times."""
    layout, rows = case.layout(), []
    checked = check.passes(peers, check.operands(layout, case.m, dtype, check.integers))
    data = check.operands(layout, case.m, dtype, check.normal)
    for name in PASSES:
        wrong, right, refused = checked[name]
        ways = {} if wrong else {"ours": getattr(Ours(), name)(data)[0]}
        for peer in peers:
            if ways and peer.name in right:
                found = getattr(peer, name)(data)
                ways[peer.name] = _fastest([found[position] for position in right[peer.name]], clock)
        seconds = timing.medians({timed: way.run for timed, way in ways.items()}, (), clock)
        rows.append(
            {
                "case": case.name,
                "pass": name,
                "random": case.random,
                "wrong": wrong,
                "refused": refused,
                "ways": {timed: way.words for timed, way in ways.items() if way.words},
                **table.sizes(case.m, layout, dtype),
                **table.figures(seconds, [peer.name for peer in peers], case.m, layout, dtype),
            }
        )
    return rows


# -------------------------------------------------------------------------------------------------------------- main


def find_peers(on_gpu, names=""):
    """The peers of this machine, and `{name: why it is missing}` of the others."""
    # On a GPU the reference is thousands of kernels, and time by kernels leaves out the gaps between them.
    kinds = [Dense, cusparse.BlockedEll, cusparse.Bsr, torch_peers.TorchBsr, torch_peers.Stk]
    kinds = {kind.name: kind for kind in (kinds if on_gpu else [Dense, Reference])}
    asked = names.split(",") if names else list(kinds)
    if not set(asked) <= set(kinds):
        raise CommandError(f"`peers` must be among {', '.join(kinds)} here; got {names!r}.")
    here, missing = [], {}
    for name in asked:
        try:
            here.append(kinds[name]())
        except Missing as reason:
            missing[name] = str(reason)
    return here, missing


def main(arguments):
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return
    options = command.override({"matmul": Options()}, arguments)["matmul"]
    on_gpu = jax.default_backend() == "gpu"
    chosen = _chosen(options, cases.suites(on_gpu), on_gpu)
    numbers = kernels.numbers(options.config)
    peers, missing = ([], {}) if options.config else find_peers(on_gpu, options.peers)
    clock = timing.device_clock()
    record = {"head": table.head(clock, options.commit, peers, missing), "rows": []}
    workdir = pathlib.Path(options.workdir).expanduser()
    workdir.mkdir(parents=True, exist_ok=True)
    path = workdir / ("kernels.json" if options.config else "matmul.json")
    for name, words in record["head"].items():
        print(f"* {name}: {words}")
    columns = kernels.COLUMNS if options.config else table.columns([peer.name for peer in peers])
    print(f"\n{table.head_lines(columns)}")
    for case, dtype in chosen:
        rows = kernels.measure(case, numbers, dtype, clock) if options.config else measure(case, peers, dtype, clock)
        for row in rows:
            record["rows"].append(row)
            print(table.line(row, columns), flush=True)
        write_text(path, json.dumps(record, indent=1) + "\n")  # kept if a later case fails
    if not options.config:
        print(f"\n{table.summary(record['rows'], [peer.name for peer in peers])}")
        print(plot.save(record, workdir / "matmul.png"))
    failed = [f"{row['case']} {row['pass']}" for row in record["rows"] if row["wrong"]]
    if failed:
        raise CommandError(f"FAILED: {', '.join(failed)} differ from the dense product, so they have no speed.", code=1)


def _chosen(options, suites, on_gpu):
    """The cases to run, each with its dtype."""
    known = suites["all"]
    if options.suite not in suites:
        raise CommandError(f"`suite` must be one of {', '.join(suites)}; got {options.suite!r}.")
    if options.case and options.case not in known:
        raise CommandError(f"`case` must be one of {', '.join(known)}; got {options.case!r}.")
    dtypes = cases.dtypes(on_gpu)
    if options.dtype and options.dtype not in dtypes:
        raise CommandError(f"`dtype` must be one of {', '.join(dtypes)}; got {options.dtype!r}.")
    if options.rows < 0:
        raise CommandError(f"`rows` must be at least 1, or 0 for the case's own; got {options.rows}.")
    chosen = [known[options.case]] if options.case else list(suites[options.suite].values())
    own = options.dtype or cases.default_dtype(on_gpu)
    return [(dataclasses.replace(case, m=options.rows or case.m), case.dtype or own) for case in chosen]


if __name__ == "__main__":
    command.run(main)
