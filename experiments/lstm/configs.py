"""The options of the experiment and its named presets: each is a dict of models that are trained and compared."""

import dataclasses
import math

from experiments.common import CommandError

PATTERNS = ("dense", "barabasi_albert", "watts_strogatz", "balanced_random")
DTYPES = ("float32", "bfloat16", "float16")
BLOCK_SIZES = (8, 16, 32, 64, 128)


@dataclasses.dataclass(frozen=True)
class Config:
    """One model, its text and its training.

    Attributes:
      data: a file or folder; empty for the standard library of the running Python.
      heldout: share of the text, at its end, that is evaluated on and never trained on.
      evaluated: windows of it that are evaluated on, from its start; fewer where it holds fewer.
      hidden: units of the state.
      stride: every which unit the bytes and the output meet: `hidden / stride` units are written to and read.
      depth: internal steps of each time step.
      embedding: features of a byte.
      pattern: of the recurrent weights, one of `PATTERNS`.
      block_size: side of a block; "dense" has none.
      degree: how many blocks a pattern has: Barabasi-Albert's m, Watts-Strogatz's k, or the blocks of each row.
      noise: how far the recurrent weights start from the identity: normal, this over the root of the fan-in. Without
        it units that neither bytes nor the output meet start alike, and stay alike for ever.
      batch: streams read side by side.
      length: bytes of a window of truncated back-propagation; the state is carried over to the next.
      steps: windows to train on.
      rate: the highest learning rate of the recurrent weights is this over their fan-in, the mean number of stored
        weights of an output: Adam moves every weight by its rate, so a unit's sum by rate times fan-in, and models
        of different fan-in learn alike only so.
      learning_rate: the highest of all other parameters. Both are Adam's, reached after the warm-up; from there
        they fall to zero as a cosine.
      warmup: share of the steps over which the learning rates rise.
      clip: greatest norm of the gradient.
      ema: decay of the averaged weights that are evaluated.
      dropout: share of the candidate u that is dropped.
      dtype: of the operands of the products, one of `DTYPES`; all else is float32.
      checkpoint_every: steps between checkpoints.
      seed: of the parameters, the patterns and the dropout.
    """

    data: str = ""
    heldout: float = 0.01
    evaluated: int = 256
    hidden: int = 192
    stride: int = 1
    depth: int = 3
    embedding: int = 64
    pattern: str = "dense"
    block_size: int = 8
    degree: int = 3
    noise: float = 0.3
    batch: int = 16
    length: int = 32
    steps: int = 2500
    rate: float = 1.0
    learning_rate: float = 3e-3
    warmup: float = 0.05
    clip: float = 1.0
    ema: float = 0.99
    dropout: float = 0.0
    dtype: str = "float32"
    checkpoint_every: int = 250
    seed: int = 0

    def __post_init__(self):
        for name in (
            "evaluated",
            "stride",
            "embedding",
            "degree",
            "batch",
            "length",
            "steps",
            "checkpoint_every",
        ):
            self._check(name, "at least 1", getattr(self, name) >= 1)
        for name in ("rate", "learning_rate", "clip"):
            self._check(name, "above 0, and finite", 0 < getattr(self, name) < math.inf)
        for name in ("warmup", "ema", "dropout"):
            self._check(name, "at least 0 and below 1", 0 <= getattr(self, name) < 1)
        self._check("heldout", "between 0 and 1", 0 < self.heldout < 1)
        self._check("noise", "at least 0", self.noise >= 0)
        self._check("depth", "at least 2", self.depth >= 2)
        self._check("seed", "from 0 to 2**31 - 1", 0 <= self.seed < 2**31)
        for name, known in (("pattern", PATTERNS), ("dtype", DTYPES), ("block_size", BLOCK_SIZES)):
            self._check(name, f"one of {', '.join(map(str, known))}", getattr(self, name) in known)
        unit = 1 if self.pattern == "dense" else self.block_size
        self._check("hidden", f"a positive multiple of {unit}", self.hidden > 0 and self.hidden % unit == 0)
        self._check("stride", f"a divisor of `hidden`, {self.hidden}", self.hidden % self.stride == 0)

    def _check(self, name, rule, holds):
        if not holds:
            raise CommandError(f"`{name}` must be {rule}; got {getattr(self, name)!r}.")


def pair(base, ratio, block_size):
    """Makes a fair pair: a dense model, and a block-sparse one that is wider and in all else as large.

    The wide one has `ratio` times the units, `1 / ratio**2` of the blocks, as many in each row as in each column, and
    meets the bytes and the output at every `ratio`-th unit: recurrent weights, embedding and output are of exactly
    the dense model's numbers.

    Args:
      base: the `Config` of the dense model.
      ratio: how many times as wide the sparse one is.
      block_size: side of its blocks.

    Returns:
      {"dense": base, "sparse": the wide config}.

    Raises:
      CommandError: if no whole number of blocks a row makes the numbers equal.
    """
    if base.hidden % (ratio * block_size):
        step = ratio * block_size
        raise CommandError(
            f"`hidden` of the dense model must be a multiple of ratio x block_size, {ratio} x {block_size} = {step}, "
            f"so that whole blocks make as many weights; got {base.hidden}. The next multiples are "
            f"{base.hidden // step * step} and {(base.hidden // step + 1) * step}."
        )
    sparse = dataclasses.replace(
        base,
        hidden=ratio * base.hidden,
        stride=ratio,
        pattern="balanced_random",
        block_size=block_size,
        degree=base.hidden // (ratio * block_size),
    )
    return {"dense": base, "sparse": sparse}


def smoke():
    """192 dense units against 576 in blocks of 8, 8 of 72 in each row and column: 258,048 recurrent weights each.

    python -m experiments.lstm.train smoke · 3 minutes on 2 CPU cores · level, over three seeds: see README.md
    """
    # c of each: the best of .5, 1, 2 and 4 over three seeds (README.md).
    models = pair(Config(), ratio=3, block_size=8)
    return {**models, "sparse": dataclasses.replace(models["sparse"], rate=2.0)}


PRESETS = {preset.__name__: preset for preset in (smoke,)}
