"""The programs of a decode and of a drafter's training, lowered for devices that are not there.

Weights, caches and batches are shapes with a place on the mesh: nothing is computed and nothing is read but a
configuration. The functions are those that `decode` and `fit` run. Read next: `hlo.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hsd_jax import sharding
from hsd_jax.config import ModelConfig, TreeConfig
from hsd_jax.drafters.table import init_drafter, make_drafter
from hsd_jax.infer.accept import RULES, make_rule
from hsd_jax.infer.decode import Decoder
from hsd_jax.infer.plain import make_plain_step
from hsd_jax.infer.sampling import row_keys
from hsd_jax.infer.step import make_step
from hsd_jax.kernels import native
from hsd_jax.models import cache as cache_lib
from hsd_jax.models.target import init_target
from hsd_jax.train import drafter as training
from hsd_jax.train.loop import LoopConfig, make_optimizer, make_train_step
from hsd_jax.types import Limits, SamplingParams

PREFILL, PLAIN, SPECULATIVE, TRAIN = PROGRAMS = ("prefill", "plain", "speculative", "train")
DTYPE = jnp.bfloat16
"""Of the weights of target and drafter, in which most checkpoints come."""
END_TOKENS = 4
"""Places for end tokens, as many as `request.py` makes at least."""


@dataclasses.dataclass(frozen=True)
class Job:
    """What is to be compiled."""

    name: str
    """Of the target, as it was asked for."""
    target: ModelConfig
    drafter: Any
    tree: TreeConfig = TreeConfig(nodes=8, depth=7, width=1)
    batch: int = 1
    slots: int = 4096
    """Of the caches."""
    temperature: float = 0.0
    train: LoopConfig = LoopConfig(batch=4, length=2048, compute="bfloat16")


def default_drafter(target: ModelConfig, depth: int) -> Any:
    """A hidden drafter of one layer at the target's widths: a parallel trunk, a quarter of the vocabulary."""
    model = training.DrafterModel(trunk="parallel", num_steps=max(8, depth), draft_vocab=0.25)
    return training.drafter_config(model, target)


def weights_of(job: Job, mesh: Mesh) -> dict[str, Any]:
    """The shapes of both models' weights, placed as `params.place` does."""
    target = _cast(jax.eval_shape(lambda: init_target(jax.random.key(0), job.target)))
    drafter = _cast(jax.eval_shape(lambda: _drafter_weights(job)))
    try:
        from hsd_jax.models.packing import pack

        parts = mesh.shape["model"]
        target = jax.eval_shape(lambda w: pack(w, job.target, parts), target)
        drafter = jax.eval_shape(lambda w: pack(w, job.drafter, parts), drafter)
    except ImportError:
        pass
    heads = job.target.num_heads, job.target.num_kv_heads
    drafter_heads = getattr(job.drafter, "num_heads", 1), getattr(job.drafter, "num_kv_heads", 1)
    return {
        "target": placed(target, sharding.weight_shardings(mesh, target, *heads)),
        "drafter": placed(drafter, sharding.weight_shardings(mesh, drafter, *drafter_heads)),
    }


def _drafter_weights(job: Job) -> Any:
    """Those of a loaded drafter, with the rows of the head that `draft_vocab.attach` copies."""
    weights = init_drafter(jax.random.key(0), job.drafter)
    num = job.drafter.reduced_vocab_size
    if num is None:
        return weights
    return {**weights, "draft_to_target": jnp.zeros(num, jnp.int32), "head": jnp.zeros((num, job.target.hidden_size))}


def _cast(tree: Any) -> Any:
    """The same shapes with their floats as weights are held."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, DTYPE if x.dtype == jnp.float32 else x.dtype), tree)


def placed(tree: Any, shardings: Any) -> Any:
    """Shapes with their place on a mesh."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, shardings)


@dataclasses.dataclass(frozen=True)
class Program:
    """A function of `decode` or of training, with the shapes of its arguments on a mesh."""

    function: Any
    arguments: tuple[Any, ...]
    options: dict[str, Any]
    held: dict[str, Any]
    """What lies on the devices while it runs, by what it is: "target", "drafter", "caches", "state", "batch"."""

    def lower(self, platform: str, by_name: str | None = None) -> jax.stages.Lowered:
        """The program traced for a platform ("gpu", "tpu") and lowered for the devices of its mesh.

        Args:
          by_name: lowered for this platform of jax ("cuda", "tpu") instead, whatever the devices are.
        """
        with native.compiled_for(platform):
            traced = self.function.trace(*self.arguments, **self.options)
            return traced.lower() if by_name is None else traced.lower(lowering_platforms=(by_name,))


def make_program(job: Job, what: str, mesh: Mesh, platform: str) -> Program:
    """A program of PROGRAMS; tracing it for another platform than this one is another program."""
    with native.compiled_for(platform):
        return _training_step(job, mesh) if what == TRAIN else _of_decode(job, what, mesh)


def _of_decode(job: Job, what: str, mesh: Mesh) -> Program:
    decoder, sizes = _decoder(job, what, mesh), {"capacity": job.slots, "max_tokens": job.slots + 1}
    models, tokens, length, keys, limits, sampling = _decode_arguments(job, what, mesh)
    prefilled = models, tokens, length, keys, limits
    state = jax.eval_shape(lambda *args: decoder.prefill(*args, **sizes), *prefilled)
    state = placed(state, sharding.row_shardings(mesh, state, job.batch))
    held = {**models, "caches": (state.cache, state.drafter)}
    if what == PREFILL:
        return Program(decoder.prefill, prefilled, sizes, held)
    rounds = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return Program(decoder.loop, (models, sampling, limits, rounds, state), {}, held)


def _decoder(job: Job, what: str, mesh: Mesh) -> Decoder:
    """As `request._decoder` makes it; prefill reads for the drafter, too."""
    cache_dtype = cache_lib.fastest_dtype(DTYPE)
    is_one = mesh.size == 1
    options: dict[str, Any] = {"use_native": is_one}
    if "mesh" in inspect.signature(Decoder).parameters:
        options = {"mesh": None if is_one else mesh}
    if what == PLAIN:
        return Decoder(job.target, make_plain_step(job.target), None, cache_dtype, **options)
    drafter = make_drafter(job.target, job.drafter, job.tree, cache_dtype, RULES["match"].scheme)
    step = make_step(job.target, drafter, make_rule("match", job.tree))
    return Decoder(job.target, step, drafter, cache_dtype, **options)


def _decode_arguments(job: Job, what: str, mesh: Mesh) -> tuple[Any, ...]:
    models = weights_of(job, mesh) if what != PLAIN else weights_of(job, mesh) | {"drafter": None}

    def rows(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct((job.batch, *shape), dtype)

    keys = jax.eval_shape(lambda: row_keys([(0, 0)] * job.batch))
    end_tokens: Any = jax.ShapeDtypeStruct((END_TOKENS,), jnp.int32)
    limits = Limits(rows(), end_tokens)
    greedy: Any = {"all_greedy": job.temperature == 0} if "all_greedy" in SamplingParams.__dataclass_fields__ else {}
    sampling = SamplingParams(rows(dtype=jnp.float32), rows(), rows(dtype=jnp.float32), **greedy)
    per_row = rows(job.slots), rows(), keys, limits, sampling
    return models, *placed(per_row, sharding.row_shardings(mesh, per_row, job.batch))


def _training_step(job: Job, mesh: Mesh) -> Program:
    """The step of `fit` for a frozen target, as `train.run.train_drafter` calls it."""
    num, target = job.drafter.reduced_vocab_size, job.target
    draft_to_target = None if num is None else jnp.arange(num, dtype=jnp.int32)
    loss = training.make_loss(target, job.drafter, draft_to_target=draft_to_target)

    def begin() -> dict[str, Any]:
        params, zero = init_drafter(jax.random.key(0), job.drafter), jnp.zeros((), jnp.int32)
        return {"params": params, "opt_state": make_optimizer(job.train).init(params), "step": zero, "seed": zero}

    state = jax.eval_shape(begin)
    heads = getattr(job.drafter, "num_heads", 1), getattr(job.drafter, "num_kv_heads", 1)
    shardings = sharding.weight_shardings(mesh, state, *heads)
    frozen = _cast(jax.eval_shape(lambda: init_target(jax.random.key(0), target)))
    frozen = placed(frozen, sharding.weight_shardings(mesh, frozen, target.num_heads, target.num_kv_heads))
    shape = job.train.batch, job.train.length + 1
    dtypes = {"tokens": jnp.int32, "mask": jnp.bool_, "starts": jnp.int32}
    batch = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    batch = placed(batch, sharding.row_shardings(mesh, batch, shape[0]))
    state = placed(state, shardings)
    held = {"target": frozen, "state": state, "batch": batch}
    return Program(make_train_step(loss, job.train, shardings), (state, frozen, batch), {}, held)
