"""The ops."""

from bsjax.ops._matmul import save_products as save_products
from bsjax.ops._matmul import sddmm as sddmm
from bsjax.ops._matmul import spmm as spmm
