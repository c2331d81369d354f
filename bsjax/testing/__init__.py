"""What tests and benchmarks share: the table of cases, oracle and plain-JAX reference, comparisons, device time."""

from bsjax.ops import _reference as reference
from bsjax.testing import _oracle as oracle
from bsjax.testing import _timing as timing
from bsjax.testing._cases import CASES as CASES
from bsjax.testing._cases import Case as Case
from bsjax.testing._compare import assert_as_accurate as assert_as_accurate
from bsjax.testing._compare import integers as integers
from bsjax.testing._compare import ulp as ulp

__all__ = ["CASES", "Case", "assert_as_accurate", "integers", "oracle", "reference", "timing", "ulp"]
