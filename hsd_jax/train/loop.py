"""The training loop that all trainers share: optimizer, compiled step, progress, checkpoints and resumption.

A trainer gives a loss and a stream of batches that depends on seed and step only. A resumed run repeats the original
one exactly, because state, step and batch are restored together.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from hsd_jax import validation
from hsd_jax.config import ModelConfig
from hsd_jax.host import sharding
from hsd_jax.host.distributed import fetch, put
from hsd_jax.kernels import program
from hsd_jax.train.journal import Journal
from hsd_jax.train.resume import Checkpointer
from hsd_jax.validation import AtLeastTwo, Count, NotNegative, OneOf, Positive, Share, Whole

Batch = dict[str, Any]
"""`tokens` int32 [B, T+1], `mask` bool [B, T+1] and perhaps `hidden` [B, T, H], see `data.Batches`."""
Loss = Callable[[Any, Any, Batch, jax.Array, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
"""`loss(params, frozen, batch, key, step) -> (scalar in nats per token, metrics)`."""
COMPUTE = ("float32", "bfloat16")
EVALUATION_SECONDS = 60.0
"""Seconds between two evaluations of a run that ends by the clock."""


@validation.dataclass
class LoopConfig:
    """Section `train` of a recipe: optimizer, length of a run, and intervals of logs and checkpoints."""

    steps: Count = 1000
    batch: Count = 8
    """Rows per optimizer step."""
    micro_batch: Count | None = None
    """Rows per pass. Gradients are averaged over the passes of a step; in a target's training and in distillation each
    pass counts alike, however few labels it has. None: the whole batch at once. On CPU one or two rows are fastest,
    because activations stay in the cache."""
    length: AtLeastTwo = 512
    """Tokens per row."""
    learning_rate: NotNegative = 2e-3
    warmup: Whole = 50
    """Steps of linear warm-up. A cosine down to `final_fraction` follows."""
    final_fraction: Share = 0.05
    """Learning rate at the last step, divided by the peak."""
    weight_decay: NotNegative = 0.1
    clip: Positive = 1.0
    """Global gradient norm."""
    compute: Annotated[str, OneOf(COMPUTE)] | None = None
    """Dtype of the weights in products. Master weights and optimizer stay float32. null: float32 on CPU, else
    bfloat16."""
    remat: bool = False
    """Rematerialisation: keep no activations of the trained layers, and compute them again in the backward pass."""
    seed: Whole = 0
    log_every: Count = 10
    checkpoint_every: Count = 100

    def __post_init__(self):
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise ValueError(f"train.micro_batch={self.micro_batch}: must divide train.batch={self.batch}")

    @property
    def num_passes(self) -> int:
        return self.batch // (self.micro_batch or self.batch)

    def check_length(self, model: ModelConfig) -> None:
        """Raises a ValueError if rows have more tokens than the model has positions."""
        validation.take(int, self.length, "train.length", le=model.max_position)

    def on_platform(self) -> LoopConfig:
        """The same, with `compute` set to the default of the program's platform if it is None."""
        default = "float32" if program.here().platform == "cpu" else "bfloat16"
        return dataclasses.replace(self, compute=self.compute or default)


def learning_rate(config: LoopConfig) -> optax.Schedule:
    """The learning rate by step: a linear warm-up, then a cosine."""
    peak, until = config.learning_rate, max(config.steps, config.warmup + 1)
    return optax.warmup_cosine_decay_schedule(0.0, peak, config.warmup, until, peak * config.final_fraction)


def make_optimizer(config: LoopConfig) -> optax.GradientTransformation:
    """AdamW with the schedule `learning_rate` and a clipped gradient norm."""

    def decayed(params):  # norms and biases are not decayed
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(learning_rate(config), b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=decayed),
    )


def make_train_step(loss: Loss, config: LoopConfig, shardings: Any = None) -> Callable:
    """`step(state, frozen, batch) -> (state, metrics)`, jitted; the state is donated.

    The batch is cut into `config.num_passes` equal parts, whose losses and gradients are averaged. The new state has
    the given shardings. Without them XLA may choose others, and the next call would compile again.
    """
    optimizer, num_passes, dtype = make_optimizer(config), config.num_passes, config.on_platform().compute

    def computed(params, frozen, batch, key, step):
        if dtype == "bfloat16":  # norms and biases stay float32
            params = jax.tree.map(lambda p: p.astype(jnp.bfloat16) if p.ndim > 1 else p, params)
        return loss(params, frozen, batch, key, step)

    def step(state, frozen, batch):
        key = jax.random.fold_in(jax.random.key(state["seed"]), state["step"])
        parts = jax.tree.map(lambda x: x.reshape(num_passes, x.shape[0] // num_passes, *x.shape[1:]), batch)
        grad_fn = jax.value_and_grad(computed, has_aux=True)

        def one_pass(total, part):
            i, rows = part
            result = grad_fn(state["params"], frozen, rows, jax.random.fold_in(key, i), state["step"])
            return jax.tree.map(lambda t, r: t + r / num_passes, total, result), None

        first = jax.tree.map(lambda x: x[0], parts)
        like = jax.eval_shape(grad_fn, state["params"], frozen, first, key, state["step"])
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        ((value, metrics), grads), _ = jax.lax.scan(one_pass, zeros, (jnp.arange(num_passes), parts))
        with jax.numpy_dtype_promotion("standard"):  # optax's Adam raises a float to an int32 step count
            updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), **metrics}
        return dict(state, params=params, opt_state=opt_state, step=state["step"] + 1), metrics

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def first_state(params: Any, config: LoopConfig) -> dict[str, Any]:
    """The state before the first step. Each step takes a state and returns the next one."""
    return {
        "params": params,
        "opt_state": make_optimizer(config).init(params),
        "step": jnp.zeros((), jnp.int32),
        "seed": jnp.asarray(config.seed, jnp.int32),
    }


class Model(NamedTuple):
    """What `fit` trains."""

    config: Any
    params: Any
    """The first weights."""
    losses: Sequence[tuple[int, Loss]]
    """The losses of the run, one after another, each with its last step. Each is compiled when it begins."""
    frozen: Any = None
    """Weights that the losses read and the run does not change."""


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """How weights are evaluated during a training, and how the best ones are kept."""

    every: int
    """Steps between evaluations."""
    evaluate: Callable[[Any], dict[str, Any]]
    """`evaluate(params) -> metrics`, which JSON can hold."""
    keep: Callable[[Any, dict[str, Any]], None]
    """Called with weights and metrics whenever `tau` is the best so far. It must write atomically."""


def place_by_clock(done: int, steps: int, begun: float | None, stop_at: float | None) -> int:
    """The number of steps whose learning rate the next step has, after `done` of at most `steps` steps.

    In a run that ends at `stop_at` the learning rate follows the share of the time that is over, if that is more than
    the share of the steps. So it has fallen to its last value at the end, however fast the machine is. The time counts
    from `begun`, the end of the first step, which compiles. Such a run cannot be repeated exactly.
    """
    if stop_at is None or begun is None:
        return done
    share = (time.perf_counter() - begun) / max(stop_at - begun, 1e-9)
    return max(done, min(int(share * steps), steps - 1))


def paced(state: dict[str, Any], place: int) -> dict[str, Any]:
    """The state of a run, whose next step has the learning rate that follows `place` steps."""
    is_count = lambda x: isinstance(x, optax.ScaleByScheduleState)  # noqa: E731
    move = lambda x: x._replace(count=np.int32(place)) if is_count(x) else x  # noqa: E731
    return dict(state, opt_state=jax.tree.map(move, state["opt_state"], is_leaf=is_count))


def fit(
    model: Model,
    batches: Any,
    config: LoopConfig,
    journal: Journal,
    evaluator: Evaluator | None = None,
    mesh: Mesh | None = None,
    stop_at: float | None = None,
) -> Any:
    """Trains and returns the parameters. Continues from the newest checkpoint in `checkpoints/`, if there is one.

    The first loss or gradient that is not finite is a FloatingPointError, and no checkpoint is written after it.

    Args:
      batches: a `data.Batches`. Its state is saved with every checkpoint.
      journal: of the folder of the run. It begins after the newest checkpoint and its batches were found to fit.
      mesh: splits the state by `host/sharding.py`, and the batches over its axes of rows.
      stop_at: a time of `time.perf_counter` at which the run ends if it has not before (`place_by_clock`). It is then
        evaluated after its first step, every EVALUATION_SECONDS and at its end.
    """
    state, best, placement = first_state(model.params, config), {}, None
    if mesh is not None:
        placement = sharding.weight_shardings(mesh, state, *sharding.heads_of(model.config))
    state = put(state, placement)
    checkpoints = Checkpointer(journal.out / "checkpoints")
    if checkpoints.latest_step() is not None:
        state, found = checkpoints.restore(state)
        batches.set_state(found["data"])
        best = found["best"]
    start = int(state["step"])
    journal.begin(start)
    programs = [(until, make_train_step(loss, config, placement)) for until, loss in model.losses]
    rate_of, begun, evaluated_at, evaluation_seconds = learning_rate(config), None, -math.inf, 0.0
    unchecked: tuple[int, dict[str, jax.Array]] | None = None
    try:
        for done in range(start + 1, config.steps + 1):
            batches.refresh(state["params"])
            train_step = next(program for until, program in programs if done <= until)
            place = place_by_clock(done - 1, config.steps, begun, stop_at)
            state = state if stop_at is None else paced(state, place)
            state, metrics = train_step(state, model.frozen, place_rows(next(batches), mesh, config.batch))
            begun = begun or time.perf_counter()
            left = math.inf if stop_at is None else stop_at - time.perf_counter()
            is_last = done == config.steps or left <= evaluation_seconds
            is_evaluated = False
            if evaluator is not None:  # by the clock it is first evaluated at once, so that the time of this is known
                is_due = time.perf_counter() - evaluated_at >= EVALUATION_SECONDS
                is_evaluated = is_last or (done % evaluator.every == 0 if stop_at is None else is_due)
            # A step is checked while the next one runs, so that the device never waits for the host.
            is_seen = done % config.log_every == 0 or done % config.checkpoint_every == 0 or is_last or is_evaluated
            for step, values in ([unchecked] if unchecked else []) + ([(done, metrics)] if is_seen else []):
                check_finite(values, step, config, checkpoints.latest_step())
            unchecked = None if is_seen else (done, metrics)
            if done % config.log_every == 0 or is_last:
                values = {k: fetch(v).tolist() for k, v in metrics.items()}
                values["learning_rate"] = float(np.asarray(rate_of(place)))
                journal.step(done, values, left)
            if evaluator is not None and is_evaluated:
                before = time.perf_counter()
                evaluation = evaluator.evaluate(state["params"])
                is_best = not best or evaluation["tau"] > best["tau"]
                if is_best:
                    best = {"step": done, "tau": evaluation["tau"]}
                    evaluator.keep(state["params"], evaluation)
                journal.evaluation(done, evaluation, is_best)
                evaluated_at = time.perf_counter()
                evaluation_seconds = evaluated_at - before
            if done % config.checkpoint_every == 0 or is_last:
                checkpoints.save(done, state, {"data": batches.get_state(), "best": best})
            if is_last:
                break
    finally:
        checkpoints.close()
    return state["params"]


def place_rows(batch: Batch, mesh: Mesh | None, num_rows: int) -> Batch:
    """A batch of `num_rows` rows, split over the mesh. Each process gives the rows that its devices hold."""
    if mesh is None:
        return batch
    whole = {name: jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), x.dtype) for name, x in batch.items()}
    places, make = sharding.row_shardings(mesh, whole, num_rows), jax.make_array_from_process_local_data
    return {name: make(places[name], x, whole[name].shape) for name, x in batch.items()}


def check_finite(metrics: dict[str, Any], step: int, config: LoopConfig, last_checkpoint: int | None) -> None:
    """Raises FloatingPointError if loss or gradients are not finite, naming step and batch."""
    for name in ("loss", "grad_norm"):
        value = float(metrics[name])
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{name} is {value} at step {step} (batch {step - 1}, counted from 0); train.learning_rate="
                f"{config.learning_rate:g}, train.clip={config.clip:g}, last checkpoint {last_checkpoint}"
            )
