"""The README's table of checkpoints: each row is tried, on a dense layer of Flax and on a block-sparse one."""

import pathlib
import re
from typing import Any

import flax.errors
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import bsjax

B = 8
MASK, OTHER = np.eye(8, dtype=bool), np.eye(8, dtype=bool)[::-1]
MORE = MASK | OTHER  # another number of blocks
X = jnp.asarray(np.random.default_rng(0).normal(size=(5, 64)).astype(np.float32))


def layout(mask=MASK):
    return bsjax.Layout.from_mask(mask, B)


def layer(kind, seed, mask=MASK) -> Any:
    rngs = nnx.Rngs(seed)
    return (
        nnx.Linear(64, 64, rngs=rngs) if kind == "nnx.Linear" else bsjax.nn.BlockSparseLinear(layout(mask), rngs=rngs)
    )


def linen_layer(kind, mask=MASK):
    return linen.Dense(64) if kind == "nnx.Linear" else bsjax.linen.BlockSparseLinear(layout(mask))


def save(path, state):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, state)


def restore(path, *target):
    with ocp.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, *target)


def same(actual, expected):
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), actual, expected)


def trained(kind, seed, steps):
    run = nnx.List([layer(kind, seed)])
    optimizer = nnx.Optimizer(run[0], optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    train(run[0], optimizer, steps)
    return run[0], optimizer


def train(own, optimizer, steps):
    for _ in range(steps):
        optimizer.update(own, nnx.grad(lambda own: (own(X) ** 2).mean())(own))


# Each way gives "yes" if what was saved comes back, or says what comes instead.


def with_target(kind, path):
    saved, fresh = layer(kind, 0), layer(kind, 1)
    save(path, nnx.state(saved))
    nnx.update(fresh, restore(path, nnx.state(fresh)))
    same(fresh(X), saved(X))
    same(nnx.state(fresh), nnx.state(saved))
    return "yes"


def without_target(kind, path):
    saved, fresh = layer(kind, 0), layer(kind, 1)
    save(path, nnx.to_pure_dict(nnx.state(saved)))
    state = nnx.state(fresh)
    nnx.replace_by_pure_dict(state, restore(path))
    nnx.update(fresh, state)
    same(fresh(X), saved(X))
    graph = nnx.graphdef(fresh)
    same(nnx.merge(graph, state)(X), saved(X))
    return "yes"


def training_state(kind, path, *, pure):
    run, resumed = trained(kind, 0, 3), trained(kind, 1, 0)
    if pure:
        save(path, nnx.to_pure_dict(nnx.state(run)))
        state = nnx.state(resumed)
        nnx.replace_by_pure_dict(state, nnx.restore_int_paths(restore(path)))
        nnx.update(resumed, state)
    else:
        save(path, nnx.state(run))
        nnx.update(resumed, restore(path, nnx.state(resumed)))
    for each in (run, resumed):
        train(*each, 2)
    same(nnx.state(resumed), nnx.state(run))
    return "yes"


def variables_of_linen(kind, path, *, way):
    module = linen_layer(kind)
    saved, fresh = (module.init(jax.random.key(seed), X) for seed in range(2))
    if way == "flax.serialization":
        restored = flax.serialization.from_bytes(fresh, flax.serialization.to_bytes(saved))
    else:
        save(path, saved)
        restored = restore(path, fresh) if way == "target" else restore(path)
    same(module.apply(restored, X), module.apply(saved, X))
    return "yes"


def on_fewer_devices(kind, path):
    def mesh(number):
        return Mesh(np.array(jax.devices()[:number]), ("d",))

    saved, fresh = layer(kind, 0), layer(kind, 1)
    rows = NamedSharding(mesh(8), P("d"))
    saved.kernel.set_value(jax.device_put(saved.kernel[...], rows))
    save(path, nnx.state(saved))
    state = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh(2), P())),
        nnx.state(fresh),
    )
    state.kernel.set_value(
        jax.ShapeDtypeStruct(saved.kernel.shape, jnp.float32, sharding=NamedSharding(mesh(2), P("d")))
    )
    nnx.update(fresh, restore(path, state))
    assert len(fresh.kernel[...].sharding.device_set) == 2
    np.testing.assert_allclose(fresh(X), saved(X), rtol=1e-5, atol=1e-6)
    return "yes"


def under_another_pattern(kind, path):
    if kind == "nnx.Linear":
        return "-"
    saved, fresh = layer(kind, 0), layer(kind, 1, OTHER)
    save(path, nnx.state(saved))
    nnx.update(fresh, restore(path, nnx.state(fresh)))
    same(fresh(X), saved(X))
    assert fresh.layout == layout(MASK)
    return "yes; the saved pattern comes with it"


def under_another_number_of_blocks(kind, path):
    if kind == "nnx.Linear":
        return "-"
    save(path, nnx.to_pure_dict(nnx.state(layer(kind, 0), nnx.Param)))
    fresh = layer(kind, 1, MORE)
    state = nnx.state(fresh, nnx.Param)
    nnx.replace_by_pure_dict(state, restore(path))
    nnx.update(fresh, state)
    with pytest.raises(ValueError, match=r"`kernel` must have shape \(16, 8, 8\).*got \(8, 8, 8\).*fit the layout"):
        fresh(X)
    saved = linen_layer(kind).init(jax.random.key(0), X)
    with pytest.raises((ValueError, flax.errors.ScopeParamShapeError), match=r"\(8, 8, 8\)"):
        linen_layer(kind, MORE).apply(saved, X)
    return "refused by a sentence"


def parameters_under_another_pattern(kind, path):
    if kind == "nnx.Linear":
        return "-"
    saved, fresh = layer(kind, 0), layer(kind, 1, OTHER)
    saved.layout.save(path / "layout.npz")
    nnx.update(fresh, nnx.state(saved, nnx.Param))
    assert not np.array_equal(fresh(X), saved(X))
    assert bsjax.Layout.load(path / "layout.npz") != fresh.layout
    return "not noticed: save the layout beside them and compare"


ROWS = {
    "nnx state, Orbax with a target": with_target,
    "nnx state as a pure dict, Orbax without a target": without_target,
    "nnx state of layer and optimizer, with a target": lambda *args: training_state(*args, pure=False),
    "the same as a pure dict, without a target": lambda *args: training_state(*args, pure=True),
    "Linen variables, Orbax with a target": lambda *args: variables_of_linen(*args, way="target"),
    "Linen variables, Orbax without a target": lambda *args: variables_of_linen(*args, way="none"),
    "Linen variables, `flax.serialization`": lambda *args: variables_of_linen(*args, way="flax.serialization"),
    "saved on 8 devices, restored on 2": on_fewer_devices,
    "nnx state into a layer of another pattern, as many blocks": under_another_pattern,
    "any into a layer of another number of blocks": under_another_number_of_blocks,
    "parameters alone (as in Linen) into another pattern, as many blocks": parameters_under_another_pattern,
}


def readme_table():
    text = (pathlib.Path(__file__).parents[1] / "README.md").read_text()
    table = text[text.index("| checkpoint |") :].split("\n\n")[0]
    return {cells[0]: cells[1:] for cells in (re.findall(r"[^|]+", line) for line in table.splitlines()[2:])}


def test_the_readme_lists_what_is_tried():
    assert [name.strip() for name in readme_table()] == list(ROWS)


@pytest.mark.mesh
@pytest.mark.parametrize("row", ROWS)
def test_checkpoint(row, tmp_path):
    told = {name.strip(): [cell.strip() for cell in cells] for name, cells in readme_table().items()}[row]
    found = []
    for kind in ("nnx.Linear", "BlockSparseLinear"):
        (tmp_path / kind).mkdir()
        found.append(ROWS[row](kind, tmp_path / kind if "parameters" in row else tmp_path / kind / "state"))
    assert found == told
