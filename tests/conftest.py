"""Strict JAX, eight CPU devices, and the `gpu` marker: those tests run where a CUDA device serves, and only there."""

import os

# Before jax starts: the transformation tests shard over eight devices of one CPU.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

import hypothesis
import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Each new shape is a compilation, so examples are few; deadlines would measure the compiler.
hypothesis.settings.register_profile("default", max_examples=25, deadline=None)
hypothesis.settings.register_profile("thorough", max_examples=300, deadline=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


def pytest_configure(config):
    config.addinivalue_line("markers", "gpu: needs a CUDA device; deselected where there is none")
    config.addinivalue_line("markers", "mesh: needs eight devices; deselected where there are fewer")
    config.addinivalue_line("markers", "large: needs about 10 GB of memory")


def pytest_collection_modifyitems(config, items):
    absent = set()
    if jax.default_backend() != "gpu":
        absent.add("gpu")
    if jax.device_count() < 8:  # on a card: JAX_PLATFORMS=cpu runs them there
        absent.add("mesh")
    kept = [item for item in items if not any(item.get_closest_marker(name) for name in absent)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(kept)])
    items[:] = kept
