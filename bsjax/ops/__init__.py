"""The ops."""

from bsjax.ops._matmul import sddmm as sddmm
from bsjax.ops._matmul import spmm as spmm
