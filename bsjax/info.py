"""`python -m bsjax.info` prints versions, devices, and which kernels serve each platform."""

import importlib.metadata
import platform

import jax

import bsjax
from bsjax import _ffi

REFERENCE = "plain JAX reference"


def kernels() -> dict[str, str]:
    """Returns, for each platform, what serves a product there."""
    native = _ffi.native
    if native is None:
        return {"cpu": REFERENCE, "cuda": REFERENCE}
    cuda = REFERENCE
    if native.cuda_version:
        cuda = f"native, built by CUDA {native.cuda_version} for {native.cuda_architectures}"
    return {"cpu": "native", "cuda": cuda}


def report() -> str:
    """Returns the text that `python -m bsjax.info` prints."""
    lines = [
        f"bsjax      {bsjax.__version__}",
        f"jax        {jax.__version__}",
        f"jaxlib     {importlib.metadata.version('jaxlib')}",
        f"python     {platform.python_version()} on {platform.platform()}",
        f"devices    {', '.join(f'{d.platform}:{d.id} ({d.device_kind})' for d in jax.devices())}",
    ]
    lines += [f"{name:<4} kernels {what}" for name, what in kernels().items()]
    if _ffi.native is None:
        lines.append("This installation has no native extension: everything runs in plain JAX.")
    elif _ffi.native.cuda_version is None:
        lines.append("This wheel is CPU-only: it was built without an nvcc, so a GPU runs plain JAX.")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
