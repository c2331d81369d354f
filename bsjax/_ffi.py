"""The only door to the native library: registration, and how XLA batches, partitions and types each call.

A call takes *grouped* operands. `rows` is `[g, ..., f]`, activations of any leading shape; `blocks` is
`[g, num_blocks, b, b]`; a group axis of size 1 is shared by all groups and never copied. The rest are index arrays.
vmap adds rows or groups, a mesh splits rows and groups, and a handler sees one device's share as `[g, m, f]`.
"""

import functools
import importlib
import importlib.metadata
import importlib.util
import math
import pathlib
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec


def _load_native():
    """Imports the extension, or gives None in a source tree where it has not been built."""
    if importlib.util.find_spec("bsjax._native") is None:
        return None
    _native = importlib.import_module("bsjax._native")
    header = pathlib.Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h"
    found = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", header.read_text())
    ours, theirs = _native.ffi_version, tuple(map(int, found))
    # jaxlib takes handlers of its own or an older minor version; a newer one stops every backend from starting.
    if ours[0] != theirs[0] or ours[1] > theirs[1]:
        raise ImportError(
            f"bsjax was built for XLA FFI {ours[0]}.{ours[1]}, but the installed jaxlib "
            f"{importlib.metadata.version('jaxlib')} speaks {theirs[0]}.{theirs[1]}. Install a newer jax, or build "
            "bsjax against this one."
        )
    return _native


native = _load_native()
# {platform as XLA names it: {target: capsule}}; empty without the extension, and then plain JAX serves every platform.
registrations = native.registrations() if native else {}
for _platform, _targets in registrations.items():
    for _target, _capsule in _targets.items():
        jax.ffi.register_ffi_target(_target, _capsule, platform=_platform)


def align(*operands):
    """Gives all operands inside `shard_map` the same varying axes, so that a replicated one can meet a sharded one.

    Outside a custom_vjp this also brings the psum of a replicated operand's gradient.
    """
    axes = [jax.typeof(x).manual_axis_type.varying for x in operands]
    union = frozenset().union(*axes)
    return tuple(
        lax.pcast(x, tuple(sorted(union - own)), to="varying") if union - own else x
        for x, own in zip(operands, axes, strict=True)
    )


def place_like(value, primal):
    """Gives a cotangent the sharding of its primal, which JAX demands on meshes with explicit axes."""
    wanted = jax.typeof(primal).sharding
    if jax.typeof(value).sharding == wanted or jax.sharding.AxisType.Explicit not in wanted.mesh.axis_types:
        return value
    return jax.sharding.reshard(value, wanted.spec)


class GroupedOp:
    """One native op as a JAX primitive: two grouped operands, then index arrays, to one grouped result.

    The attribute `shared` says of each of the two whether all groups share it, its group axis being of size 1; not the
    size itself, which may be 1 or 0 of many or a symbol.

    Attributes:
      target: the FFI target; the handlers of that name serve their platforms, `reference` every other.
      kinds: "rows" or "blocks" for each of the two grouped operands and the result.
      shape: from the shapes of all operands and the attributes to the last axes of the result: `[n]` for rows,
        `[num_blocks, b, b]` for blocks.
      reference: the same op in plain JAX on `[g, m, f]` and `[g, num_blocks, b, b]`.
    """

    def __init__(self, target: str, kinds: tuple[str, str, str], shape: Callable, reference: Callable):
        self.target, self.kinds, self._shape, self._reference = target, kinds, shape, reference
        self._share = Primitive(f"{target}_share")
        self._share.def_abstract_eval(self._abstract_eval)
        mlir.register_lowering(self._share, mlir.lower_fun(self._fallback, multiple_results=False))
        for platform, targets in registrations.items():
            if target in targets:
                mlir.register_lowering(self._share, self._call_native, platform=platform.lower())
        # Outside jit a call is a small program of its own, compiled once a shape; inside one it leaves no trace.
        self._jitted = jax.jit(self._call, static_argnames="attrs", inline=True)
        # jax.checkpoint outside jit evaluates call by call, down to the primitive itself.
        share = jax.jit(lambda *operands, attrs: self._share.bind(*operands, **dict(attrs)), static_argnames="attrs")

        def impl(*operands, **attrs):
            # jax.disable_jit, and jax.debug_nans and debug_infs that look for the culprit without jit, would come back
            # here without end.
            kinds = _debugs()
            with jax.disable_jit(False), jax.debug_nans(False), jax.debug_infs(False):
                result = share(*operands, attrs=tuple(sorted(attrs.items())))
                found = {"nan": jnp.isnan(result).any(), "inf": jnp.isinf(result).any()} if kinds else {}
            for kind in kinds:
                if found[kind]:
                    raise FloatingPointError(f"Invalid value ({kind}) encountered in {target}.")
            return result

        self._share.def_impl(impl)

    def __call__(self, *operands, shared=None, **attrs):
        attrs["shared"] = shared or tuple(x.shape[0] == 1 for x in operands[:2])
        return self._jitted(*operands, attrs=tuple(sorted(attrs.items())))

    def _call(self, *operands, attrs):
        ndims = tuple(x.ndim for x in operands)
        call = custom_vmap(self._partitioned(ndims, attrs))
        call.def_vmap(functools.partial(self._batch, attrs))
        return call(*operands)

    def _abstract_eval(self, *avals, shared, **attrs):
        grouped = [aval for aval, alone in zip(avals, shared, strict=False) if not alone]
        groups = grouped[0].shape[0] if grouped else 1
        rows = avals[self.kinds.index("rows")]
        lead = rows.shape[1:-1] if self.kinds[2] == "rows" else ()
        shape = (groups, *lead, *self._shape(*(aval.shape for aval in avals), **attrs))
        # Under explicit sharding the result keeps the axes of its groups and rows.
        group_axis = next((_axes_of(a)[0] for a in grouped), None)
        spec = [group_axis, *(_axes_of(rows)[1:-1] if lead else ())]
        sharding = avals[0].sharding.update(spec=PartitionSpec(*spec, *[None] * (len(shape) - len(spec))))
        return avals[0].update(shape=shape, weak_type=False, sharding=sharding)

    def _batch(self, attrs, size, batched, *operands):
        attrs = dict(attrs)
        if any(batched[2:]):  # a pattern of its own for each member: one call each
            return self._batch_patterns(operands, batched, attrs), True
        first, second, *indices = operands
        if self.kinds[2] == "rows" and not batched[1]:  # more rows of x, at no cost
            return jnp.moveaxis(self(jnp.moveaxis(first, 0, 1), second, *indices, **attrs), 1, 0), True
        shared = attrs.pop("shared")
        groups = next(
            (x.shape[int(own)] for x, own, alone in zip(operands, batched, shared, strict=False) if not alone), 1
        )
        still = tuple(alone and not own for own, alone in zip(batched, shared, strict=False))
        folded = [
            x if alone else _fold_groups(x, own, size, groups)
            for x, own, alone in zip((first, second), batched, still, strict=False)
        ]
        result = self(*folded, *indices, shared=still, **attrs)
        return result.reshape(size, groups, *result.shape[1:]), True

    def _batch_patterns(self, operands, batched, attrs):
        def one(members):
            rest = iter(members)
            return self(*(next(rest) if own else x for x, own in zip(operands, batched, strict=True)), **attrs)

        return lax.map(one, tuple(x for x, own in zip(operands, batched, strict=True) if own))

    @functools.cache  # noqa: B019  (the two ops live as long as the module)
    def _partitioned(self, ndims, attrs):
        """The op with a sharding rule: rows and groups may be split, features and blocks may not.

        One object for each rank and attributes, so that retracing registers nothing new.
        """

        def share(*operands):
            return self._share.bind(*operands, **dict(attrs))

        partitioned = custom_partitioning(share)
        first, second, result = self._factors(ndims, dict(attrs)["shared"])
        indices = [[f"i{position}"] for position in range(len(ndims) - 2)]
        names = dict.fromkeys(name for factors in (first, second, *indices, result) for name in factors)
        whole = tuple(name for name in names if name[0] not in "gr")  # Shardy wants them as they appear
        contracted = tuple(name for name in first if name[0] == "r" and name not in result)
        rule = ", ".join(" ".join(factors) for factors in (first, second, *indices))

        def partition(mesh, arg_shapes, result_shape):
            del result_shape
            axes = {}
            for factors, shaped in zip((first, second), arg_shapes, strict=False):
                for name, axis in zip(factors, _axes_of(shaped), strict=True):
                    if name[0] in "gr" and axis is not None:
                        axes.setdefault(name, axis)
            axes = _drop_repeated(axes)

            def place(factors):
                return NamedSharding(mesh, PartitionSpec(*(axes.get(name) for name in factors)))

            def lower(*operands):
                # One device's share knows no mesh, also where an explicit one is set.
                with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
                    y = share(*operands)
                    over = [axes[name] for name in contracted if name in axes]
                    over = tuple(axis for own in over for axis in (own if isinstance(own, tuple) else (own,)))
                    return lax.psum(y, over) if over else y

            return mesh, lower, place(result), tuple(map(place, (first, second, *indices)))

        partitioned.def_partition(
            partition,
            sharding_rule=f"{rule} -> {' '.join(result)}",
            need_replication_factors=whole,
            reduction_factors=contracted,
        )
        return partitioned

    def _factors(self, ndims, shared):
        """Names the axes of the two operands and the result: g.. for groups, r.. for rows, others are never split."""
        num_rows = ndims[self.kinds.index("rows")] - 2
        rows = [f"r{i}" for i in range(num_rows)]
        operands = []
        for position in range(2):
            group = f"u{position}" if shared[position] else "g"
            tail = [*rows, f"f{position}"] if self.kinds[position] == "rows" else ["z", "b0", "b1"]
            operands.append([group, *tail])
        group = "u2" if all(shared) else "g"
        result = [group, *rows, "f2"] if self.kinds[2] == "rows" else [group, "z", "b0", "b1"]
        return *operands, result

    def _fallback(self, *operands, **attrs):
        attrs = {name: value for name, value in attrs.items() if name not in ("config", "shared")}
        flat = [
            x.reshape(x.shape[0], math.prod(x.shape[1:-1]), x.shape[-1]) if kind == "rows" else x
            for x, kind in zip(operands[:2], self.kinds, strict=False)
        ]
        y = self._reference(*flat, *operands[2:], **attrs)
        return y if self.kinds[2] == "blocks" else y.reshape(y.shape[0], *operands[0].shape[1:-1], y.shape[-1])

    def _call_native(self, ctx, *operands, **attrs):
        native_attrs = {k: v for k, v in attrs.items() if k not in ("block_size", "shared")}
        native_attrs["config"] = np.int32(native_attrs["config"])
        return jax.ffi.ffi_lowering(self.target)(ctx, *operands, **native_attrs)


def _debugs():
    """What jax.debug_nans and jax.debug_infs ask for."""
    return [kind for kind in ("nan", "inf") if getattr(jax.config, f"jax_debug_{kind}s")]


def _axes_of(shaped):
    """The mesh axes of every dimension of an array or aval, None where it is not split."""
    spec = tuple(shaped.sharding.spec) if isinstance(shaped.sharding, NamedSharding) else ()
    return (*spec, *[None] * (len(shaped.shape) - len(spec)))


def _drop_repeated(axes):
    """Leaves out mesh axes that an earlier dimension already uses: no array can be split twice by one axis."""
    used, kept = set(), {}
    for name, axis in axes.items():
        own = axis if isinstance(axis, tuple) else (axis,)
        if not used.intersection(own):
            kept[name] = axis
            used.update(own)
    return kept


def _fold_groups(x, batched, size, groups):
    """Brings a grouped operand to `[size * groups, ...]`, a shared axis broadcast."""
    if not batched:
        x = x[None]
    x = jnp.broadcast_to(x, (size, groups, *x.shape[2:]))
    return x.reshape(size * groups, *x.shape[2:])
