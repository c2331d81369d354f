"""Block masks: which blocks of a matrix to store. Their generators, what they are like, and a drawing of them.

Every generator returns a bool NumPy array, one entry a block, for `bsjax.Layout.from_mask`. Those that draw take a
`seed`: the same numbers give the same mask. The measures and `plot` take masks and layouts alike.

Example:
  >>> import bsjax
  >>> mask = bsjax.patterns.watts_strogatz(64, 6, 0.2, seed=0)
  >>> bsjax.Layout.from_mask(mask, block_size=32)
  Layout(shape=(2048, 2048), block_size=32, num_blocks=448, density=0.1094)
"""

from bsjax.patterns._graphs import barabasi_albert as barabasi_albert
from bsjax.patterns._graphs import watts_strogatz as watts_strogatz
from bsjax.patterns._graphs import watts_strogatz_2d as watts_strogatz_2d
from bsjax.patterns._measures import average_path_length as average_path_length
from bsjax.patterns._measures import clustering as clustering
from bsjax.patterns._measures import column_lengths as column_lengths
from bsjax.patterns._measures import density as density
from bsjax.patterns._measures import reach as reach
from bsjax.patterns._measures import row_lengths as row_lengths
from bsjax.patterns._measures import summary as summary
from bsjax.patterns._plot import plot as plot
from bsjax.patterns._rectangles import balanced_random as balanced_random
from bsjax.patterns._rectangles import banded as banded
from bsjax.patterns._rectangles import block_diagonal as block_diagonal
from bsjax.patterns._rectangles import dense as dense
from bsjax.patterns._rectangles import random as random
