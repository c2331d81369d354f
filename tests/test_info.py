"""`python -m bsjax.info`: what it says of this build, of a CPU-only one, and of a tree without an extension."""

import subprocess
import sys
import types

import jax
import pytest

import bsjax
from bsjax import _ffi, info


def test_command():
    done = subprocess.run([sys.executable, "-m", "bsjax.info"], capture_output=True, text=True, check=True)
    said = {line.split()[0]: line for line in done.stdout.splitlines()}
    assert bsjax.__version__ in said["bsjax"]
    assert jax.__version__ in said["jax"]
    assert jax.default_backend() in said["devices"]
    assert said["cpu"].endswith(info.kernels()["cpu"])
    assert said["cuda"].endswith(info.kernels()["cuda"])


def test_kernels_are_those_that_are_registered():
    native = {name for name, what in info.kernels().items() if what.startswith("native")}
    assert native == {platform.lower() for platform in _ffi.registrations}


@pytest.mark.parametrize(
    ("native", "kernels", "sentence"),
    [
        (None, {"cpu": info.REFERENCE, "cuda": info.REFERENCE}, "has no native extension"),
        (types.SimpleNamespace(cuda_version=None), {"cpu": "native", "cuda": info.REFERENCE}, "CPU-only"),
        (
            types.SimpleNamespace(cuda_version="13.0", cuda_architectures="sm_80"),
            {"cpu": "native", "cuda": "native, built by CUDA 13.0 for sm_80"},
            None,
        ),
    ],
)
def test_other_builds(monkeypatch, native, kernels, sentence):
    monkeypatch.setattr(_ffi, "native", native)
    assert info.kernels() == kernels
    assert ("CPU-only" in info.report() or "no native" in info.report()) == bool(sentence)
    if sentence:
        assert sentence in info.report().splitlines()[-1]
