"""The programs of a decode and of a drafter's training, lowered for devices that this machine need not have.

Weights, caches and batches are shapes with shardings. Nothing is computed, and only a configuration is read. The
functions are the ones that `decode` and `fit` run. Read next: `hlo.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice, AbstractMesh, Mesh, NamedSharding, PartitionSpec, use_abstract_mesh

from hsd_jax.config import NO_REUSE, ModelConfig, ReuseConfig, TreeConfig
from hsd_jax.drafters.table import init_drafter
from hsd_jax.host import sharding
from hsd_jax.infer.rules import RULES
from hsd_jax.infer.sampling import row_keys
from hsd_jax.kernels import native
from hsd_jax.lab.aot.kinds import PLAIN, PREFILL, TRAIN
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import init_target
from hsd_jax.params import Params, arranged
from hsd_jax.request import Drafting, make_decoder
from hsd_jax.train.abstract import abstract_step
from hsd_jax.train.loop import LoopConfig
from hsd_jax.types import Limits, SamplingParams

DTYPE = jnp.bfloat16
"""Dtype of the weights of target and drafter; most checkpoints have it."""
CHAIN = TreeConfig(nodes=8, depth=7, width=1)
END_TOKENS = 4
"""Length of the array of end tokens, the least that `arguments.py` makes."""


@dataclasses.dataclass(frozen=True)
class CompileJob:
    """The models, sizes and settings to compile for."""

    name: str
    """The name of the target as the user gave it."""
    target: ModelConfig
    drafter: Any
    tree: TreeConfig = CHAIN
    batch: int = 1
    slots: int = 4096
    """Slots of the caches."""
    temperature: float = 0.0
    reuse: ReuseConfig = NO_REUSE
    train: LoopConfig = LoopConfig(batch=4, length=2048, compute="bfloat16")


def params_of(job: CompileJob, mesh: Mesh) -> Params:
    """The shapes of both models' weights, arranged and sharded as `load` does it."""
    target = _cast(jax.eval_shape(lambda: init_target(jax.random.key(0), job.target)))
    drafter = _cast(jax.eval_shape(lambda: _drafter_weights(job)))
    params = jax.eval_shape(
        lambda t, d: arranged(Params(t, d, job.target, job.drafter), _mesh_or_none(mesh)), target, drafter
    )
    heads = sharding.heads_of(params.target_config), sharding.heads_of(params.drafter_config)
    target = sharding.placed(params.target, sharding.weight_shardings(mesh, params.target, *heads[0]))
    drafter = sharding.placed(params.drafter, sharding.weight_shardings(mesh, params.drafter, *heads[1]))
    return dataclasses.replace(params, target=target, drafter=drafter)


def _mesh_or_none(mesh: Mesh) -> Mesh | None:
    """The mesh as `load` takes it: None for one device."""
    return None if mesh.size == 1 else mesh


def _drafter_weights(job: CompileJob) -> Any:
    """The weights of a loaded drafter, with the rows of the head that `draft_vocab.attach` copies."""
    weights = init_drafter(jax.random.key(0), job.drafter)
    num = job.drafter.reduced_vocab_size
    if num is None:
        return weights
    return {**weights, "draft_to_target": jnp.zeros(num, jnp.int32), "head": jnp.zeros((num, job.target.hidden_size))}


def _cast(tree: Any) -> Any:
    """The same shapes with DTYPE in place of float32."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, DTYPE if x.dtype == jnp.float32 else x.dtype), tree)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of `decode` or of training, with the shapes of its arguments on a mesh."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    held: dict[str, Any]
    """The arrays on the devices while it runs, by name: "target", "drafter", "caches", "state", "batch"."""

    def lower(self, platform: str, instead: AbstractDevice | None = None) -> jax.stages.Lowered:
        """The program traced for a platform ("gpu", "tpu") and lowered for the devices of its mesh.

        Args:
          instead: lower for this device instead, with the name that jax has for its platform ("cuda", "tpu").
        """
        device = instead or self._device()
        with native.compiled_for(platform), use_abstract_mesh(AbstractMesh((), (), abstract_device=device)):
            traced = self.function.trace(*self.arguments, **self.options)
            return traced.lower() if instead is None else traced.lower(lowering_platforms=(instead.platform,))

    def _device(self) -> AbstractDevice:
        """The kind of device of the mesh. The GPU kernels ask jax for it, which otherwise names one of this machine."""
        device = next(iter(jax.tree.leaves(self.arguments)[0].sharding.device_set))
        return AbstractDevice(device.device_kind, getattr(device, "core_count", None), device.platform)


def make_program(job: CompileJob, what: str, mesh: Mesh, platform: str) -> Program:
    """A program of PROGRAMS, made for one platform. Other platforms have other programs."""
    with native.compiled_for(platform):
        return _training_step(job, mesh) if what == TRAIN else _of_decode(job, what, mesh)


def _of_decode(job: CompileJob, what: str, mesh: Mesh) -> Program:
    params, drafting = params_of(job, mesh), None
    if what != PLAIN:
        drafting = Drafting(params.drafter_config, job.tree, "match", RULES["match"].scheme, job.reuse)
    dtype = cache_lib.cache_dtype(DTYPE).name
    decoder = make_decoder(params.target_config, drafting, None, dtype, mesh=_mesh_or_none(mesh))
    models = {"target": params.target, "drafter": None if drafting is None else params.drafter}
    tokens, length, keys, limits, sampling = _rows_of_decode(job, mesh)
    prefilled, sizes = (models, tokens, length, keys, limits), {"capacity": job.slots, "max_tokens": job.slots + 1}
    state = jax.eval_shape(lambda *args: decoder.prefill(*args, **sizes), *prefilled)
    state = sharding.placed(state, sharding.row_shardings(mesh, state, job.batch))
    held = {**models, "caches": (state.cache, state.drafter)}
    if what == PREFILL:
        return Program(decoder.prefill, prefilled, sizes, held)
    rounds = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return Program(decoder.loop, (models, None, sampling, limits, rounds, rounds, state), {}, held)


def _rows_of_decode(job: CompileJob, mesh: Mesh) -> tuple[Any, ...]:
    """Tokens, lengths, keys, limits and settings of the rows, as a session makes them."""

    def rows(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((job.batch, *shape), dtype)

    keys = jax.eval_shape(lambda: row_keys([(0, 0)] * job.batch))
    is_known = native.traced_platform() != "cpu"  # as in `sampling.with_exclusions`
    static = {"all_greedy": is_known and job.temperature == 0, "unfiltered": is_known}
    sampling = SamplingParams(rows(dtype=jnp.float32), rows(), rows(dtype=jnp.float32), **static)
    per_row = rows(job.slots), rows(), keys, Limits(rows(), rows(END_TOKENS)), sampling
    return sharding.placed(per_row, sharding.row_shardings(mesh, per_row, job.batch))


def _training_step(job: CompileJob, mesh: Mesh) -> Program:
    """The step of `fit` for a frozen target, as `train.run.train` calls it."""
    made = abstract_step(job.target, job.drafter, job.train, mesh, target_dtype=DTYPE)
    held = {"target": made.frozen, "state": made.state, "batch": made.batch}
    return Program(made.step, (made.state, made.frozen, made.batch), {}, held)
