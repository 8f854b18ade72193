"""The training loop that all trainers share: optimizer, compiled step, progress, checkpoints and resumption.

A trainer gives a loss and a stream of batches that depends on seed and step only. A resumed run repeats the original
one exactly, because state, step and batch are restored together.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hsd_jax import settings
from hsd_jax.config import ModelConfig
from hsd_jax.host.distributed import fetch, put
from hsd_jax.kernels import program
from hsd_jax.settings import AtLeastTwo, Count, NotNegative, OneOf, Positive, Share, Whole
from hsd_jax.train.journal import Journal
from hsd_jax.train.resume import Checkpointer

Batch = dict[str, Any]
"""`tokens` int32 [B, T+1], `mask` bool [B, T+1] and perhaps `hidden` [B, T, H], see `data.Batches`."""
Loss = Callable[[Any, Any, Batch, jax.Array, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
"""`loss(params, frozen, batch, key, step) -> (scalar in nats per token, metrics)`."""
COMPUTE = ("float32", "bfloat16")
EVALUATION_SECONDS = 60.0
"""Seconds between two evaluations of a run that ends by the clock."""


@settings.dataclass
class LoopConfig:
    """Section `train` of a recipe: optimizer, length of a run, and intervals of logs and checkpoints."""

    steps: Count = 1000
    batch: Count = 8
    """Rows per optimizer step."""
    micro_batch: Count | None = None
    """Rows per pass. Gradients are averaged over the passes of a step. None: the whole batch at once. On CPU one or two
    rows are fastest, because activations stay in the cache."""
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
        if self.length > model.max_position:
            raise ValueError(f"train.length={self.length}: the model has {model.max_position} positions")

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


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """How weights are evaluated during a training, and how the best ones are kept."""

    every: int
    """Steps between evaluations."""
    evaluate: Callable[[Any], dict[str, Any]]
    """`evaluate(params) -> metrics`, which JSON can hold."""
    keep: Callable[[Any, dict[str, Any]], None]
    """Called with weights and metrics whenever `tau` is the best so far. It must write atomically."""


class Deadline:
    """The end of a run by the clock. Without one, the number of steps decides everything.

    The learning rate then follows the share of the time that is over, if that is more than the share of the steps. So
    it has fallen to its last value at the end, however fast the machine is. The time counts from the end of the first
    step, which compiles. Such a run cannot be repeated exactly.
    """

    def __init__(self, stop_at: float | None, steps: int):
        self._stop_at, self._steps = math.inf if stop_at is None else stop_at, steps
        self._begin: float | None = None
        self._evaluated = self._evaluation = -math.inf

    @property
    def left(self) -> float:
        """Seconds until the end."""
        return self._stop_at - time.perf_counter()

    def place(self, done: int) -> int:
        """The number of steps whose learning rate the next step has, after `done` steps."""
        if self._stop_at == math.inf or self._begin is None:
            return done
        share = (time.perf_counter() - self._begin) / max(self._stop_at - self._begin, 1e-9)
        return max(done, min(int(share * self._steps), self._steps - 1))

    def stepped(self) -> None:
        """A step has been given to the device."""
        self._begin = time.perf_counter() if self._begin is None else self._begin

    def paced(self, state: dict[str, Any], done: int) -> dict[str, Any]:
        """The state of the run before its next step, with the learning rate of `place`."""
        if self._stop_at == math.inf:
            return state
        is_count = lambda x: isinstance(x, optax.ScaleByScheduleState)  # noqa: E731
        count, of_state = np.int32(self.place(done)), state["opt_state"]
        paced = jax.tree.map(lambda x: x._replace(count=count) if is_count(x) else x, of_state, is_leaf=is_count)
        return dict(state, opt_state=paced)

    def is_near(self) -> bool:
        """Whether only the last evaluation still fits."""
        return self.left <= max(self._evaluation, 0.0)

    def evaluates(self, done: int, every: int) -> bool:
        """Whether an evaluation is due: by the clock, and first at once, so that its time is known."""
        if self._stop_at == math.inf:
            return done % every == 0
        return time.perf_counter() - self._evaluated >= EVALUATION_SECONDS

    def evaluated(self, seconds: float) -> None:
        """An evaluation has ended, which took `seconds`."""
        self._evaluated, self._evaluation = time.perf_counter(), seconds


def fit(
    loss: Loss,
    params: Any,
    frozen: Any,
    batches: Any,
    config: LoopConfig,
    out: str | Path,
    journal: Journal,
    shardings: Callable[[Any], Any] = lambda state: None,
    place: Callable[[Batch], Batch] = lambda batch: batch,
    evaluator: Evaluator | None = None,
    on_start: Callable[[], None] = lambda: None,
    stages: Sequence[tuple[int, Loss]] = (),
    stop_at: float | None = None,
) -> Any:
    """Trains and returns the parameters. Continues from the newest checkpoint in `out/checkpoints`, if there is one.

    The first loss or gradient that is not finite is a FloatingPointError, and no checkpoint is written after it.

    Args:
      batches: a `data.Batches`. Its state is saved with every checkpoint.
      shardings, place: as `run.placement` returns them.
      on_start: called before the first step, after the newest checkpoint and its batches were found to fit.
      stages: other losses for the beginning, each with its last step, ascending. Each is compiled when it begins.
      stop_at: a time of `time.perf_counter` at which the run ends if it has not before, see `Deadline`. It is then
        evaluated after its first step, every EVALUATION_SECONDS and at its end.
    """
    state = first_state(params, config)
    placement = shardings(state)
    state = put(state, placement)
    checkpoints = Checkpointer(Path(out) / "checkpoints")
    best: dict[str, Any] = {}
    if checkpoints.latest_step() is not None:
        state, found = checkpoints.restore(state)
        batches.set_state(found["data"])
        best = found["best"]
    start = int(state["step"])
    on_start()
    journal.resume(start)
    programs = [(until, make_train_step(one, config, placement)) for until, one in (*stages, (config.steps, loss))]
    rate_of, tokens_per_step = learning_rate(config), config.batch * config.length
    clock, last, deadline = time.perf_counter(), start, Deadline(stop_at, config.steps)
    unchecked: tuple[int, dict[str, jax.Array]] | None = None
    try:
        for done in range(start + 1, config.steps + 1):
            batches.refresh(state["params"])
            train_step = next(program for until, program in programs if done <= until)
            state, metrics = train_step(deadline.paced(state, done - 1), frozen, place(next(batches)))
            deadline.stepped()
            is_last = done == config.steps or deadline.is_near()
            is_evaluated = evaluator is not None and (is_last or deadline.evaluates(done, evaluator.every))
            # A step is checked while the next one runs, so that the device never waits for the host.
            is_due = done % config.log_every == 0 or done % config.checkpoint_every == 0 or is_last or is_evaluated
            for step, values in ([unchecked] if unchecked else []) + ([(done, metrics)] if is_due else []):
                check_finite(values, step, config, checkpoints.latest_step())
            unchecked = None if is_due else (done, metrics)
            if done % config.log_every == 0 or is_last:
                values = {k: fetch(v).tolist() for k, v in metrics.items()}
                now = time.perf_counter()
                speed = tokens_per_step * (done - last) / (now - clock)
                clock, last = now, done
                values["learning_rate"] = float(np.asarray(rate_of(deadline.place(done - 1))))
                journal.step(done, done * tokens_per_step, speed, values, deadline.left)
            if evaluator is not None and is_evaluated:
                begun = time.perf_counter()
                evaluation = evaluator.evaluate(state["params"])
                is_best = not best or evaluation["tau"] > best["tau"]
                if is_best:
                    best = {"step": done, "tau": evaluation["tau"]}
                    evaluator.keep(state["params"], evaluation)
                journal.log_evaluation(done, done * tokens_per_step, evaluation, is_best)
                clock, last = time.perf_counter(), done  # an evaluation is not part of the training speed
                deadline.evaluated(clock - begun)
            if done % config.checkpoint_every == 0 or is_last:
                checkpoints.save(done, state, {"data": batches.get_state(), "best": best})
            if is_last:
                break
    finally:
        checkpoints.close()
    return state["params"]


def check_finite(metrics: dict[str, Any], step: int, config: LoopConfig, last_checkpoint: int | None) -> None:
    """Raises FloatingPointError if loss or gradients are not finite, naming step and batch."""
    for name in ("loss", "grad_norm"):
        value = float(metrics[name])
        if not math.isfinite(value):
            raise FloatingPointError(
                f"{name} is {value} at step {step} (batch {step - 1}, counted from 0); train.learning_rate="
                f"{config.learning_rate:g}, train.clip={config.clip:g}, last checkpoint {last_checkpoint}"
            )
