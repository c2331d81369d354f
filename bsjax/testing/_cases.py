"""The one table of named workloads that tests and benchmarks share."""

import dataclasses
from collections.abc import Callable

import numpy as np

from bsjax import patterns
from bsjax._layout import Layout


@dataclasses.dataclass(frozen=True)
class Case:
    """One product: a pattern, its block size and the number of rows of x.

    Example:
      >>> from bsjax.testing import CASES
      >>> sorted({case.block_size for case in CASES})
      [8, 16, 32, 64, 128]
    """

    name: str
    mask: Callable[[], np.ndarray]
    block_size: int
    m: int

    def layout(self) -> Layout:
        return Layout.from_mask(self.mask(), self.block_size)


def _random(rows, cols, density, seed=0):
    return lambda: np.random.default_rng(seed).random((rows, cols)) < density


def _fixed(rows):
    return lambda: np.array(rows, bool)


def _hub():
    """One full row and one full column, the rest sparse: lists that differ tenfold."""
    mask = np.random.default_rng(0).random((12, 10)) < 0.1
    mask[3], mask[:, 7] = True, True
    return mask


CASES = (
    Case("no_blocks", _fixed(np.zeros((3, 2))), 16, 5),
    Case("no_rows_of_blocks", _fixed(np.zeros((0, 2))), 16, 5),
    Case("no_columns_of_blocks", _fixed(np.zeros((3, 0))), 16, 5),
    Case("no_activations", _random(3, 2, 0.5), 16, 0),
    Case("one_block", _fixed([[1]]), 32, 17),
    Case("one_of_many", _fixed([[0, 0, 0], [0, 0, 1], [0, 0, 0]]), 32, 9),
    Case("empty_row_and_column", _fixed([[1, 0, 1], [0, 0, 0], [1, 0, 1]]), 8, 19),
    Case("one_block_row", _fixed([[1, 0, 1, 1, 0]]), 16, 33),
    Case("one_block_column", _fixed([[1], [0], [1], [1]]), 64, 33),
    Case("tall", _random(13, 3, 0.4), 8, 40),
    Case("wide", _random(3, 13, 0.4), 16, 40),
    Case("odd_counts_8", _random(7, 5, 0.5), 8, 31),
    Case("odd_counts_16", _random(7, 5, 0.5), 16, 31),
    Case("odd_counts_32", _random(7, 5, 0.5), 32, 31),
    Case("odd_counts_64", _random(5, 3, 0.5), 64, 31),
    Case("odd_counts_128", _random(3, 5, 0.5), 128, 31),
    Case("one_row", _random(6, 6, 0.4), 32, 1),
    Case("past_one_tile", _random(4, 4, 0.5), 32, 257),
    Case("hub", _hub, 16, 65),
    Case("all_8", _fixed(np.ones((5, 4))), 8, 37),
    Case("all_128", _fixed(np.ones((2, 3))), 128, 130),
    Case("barabasi_albert", lambda: patterns.barabasi_albert(16, 2, seed=0), 32, 128),
    Case("watts_strogatz", lambda: patterns.watts_strogatz(16, 4, 0.2, seed=0), 32, 128),
)
