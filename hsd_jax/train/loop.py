"""The training loop every trainer shares: optimizer, jitted step, progress, checkpoints, resume.

A trainer brings a loss and a stream of batches that depends on (seed, step) alone; the loop brings the rest.
Resuming repeats the run exactly: state, step and batch come back together. Read next: `target.py`, `drafter.py`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hsd_jax.checkpoint import Checkpointer

Loss = Callable[[Any, Any, jax.Array, jax.Array], tuple[jax.Array, dict[str, jax.Array]]]
"""`loss(params, frozen, batch, key) -> (scalar in nats per token, metrics)`."""


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """Optimizer, length and rhythm of a run."""

    steps: int = 1000
    batch: int = 8
    """Rows per optimizer step."""
    micro_batch: int | None = None
    """Rows per pass; gradients are averaged over the passes of a step. None: the whole batch at once. On CPU one or
    two rows are fastest: activations stay in the cache."""
    length: int = 512
    """Tokens per row."""
    learning_rate: float = 2e-3
    warmup: int = 50
    """Steps of linear warm-up; a cosine down to `final_fraction` follows."""
    final_fraction: float = 0.05
    """Learning rate at the last step over the peak."""
    weight_decay: float = 0.1
    clip: float = 1.0
    """Global gradient norm."""
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 100

    def __post_init__(self):
        if self.micro_batch is not None and (self.micro_batch < 1 or self.batch % self.micro_batch):
            raise ValueError(f"train.micro_batch={self.micro_batch}: must divide train.batch={self.batch}")

    @property
    def num_passes(self) -> int:
        return self.batch // (self.micro_batch or self.batch)


def make_optimizer(config: LoopConfig) -> optax.GradientTransformation:
    """AdamW with warm-up, a cosine and a clipped gradient norm."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0,
        config.learning_rate,
        config.warmup,
        max(config.steps, config.warmup + 1),
        config.learning_rate * config.final_fraction,
    )

    def decayed(params):  # norms and biases are not decayed
        return jax.tree.map(lambda p: p.ndim > 1, params)

    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        optax.adamw(schedule, b1=0.9, b2=0.95, weight_decay=config.weight_decay, mask=decayed),
    )


def make_train_step(
    loss: Loss, optimizer: optax.GradientTransformation, num_passes: int = 1, shardings: Any = None
) -> Callable:
    """`step(state, frozen, batch) -> (state, metrics)`, jitted; the state is donated.

    The batch is cut into `num_passes` equal parts, whose losses and gradients are averaged.

    Args:
      shardings: of the state on a mesh. The step returns it there; where XLA likes it best may be elsewhere, and the
        second step would compile again.
    """

    def step(state, frozen, batch):
        key = jax.random.fold_in(jax.random.key(state["seed"]), state["step"])
        parts = batch.reshape(num_passes, batch.shape[0] // num_passes, *batch.shape[1:])

        def one_pass(total, part):
            i, rows = part
            result = jax.value_and_grad(loss, has_aux=True)(state["params"], frozen, rows, jax.random.fold_in(key, i))
            return jax.tree.map(lambda t, r: t + r / num_passes, total, result), None

        like = jax.eval_shape(jax.value_and_grad(loss, has_aux=True), state["params"], frozen, parts[0], key)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        ((value, metrics), grads), _ = jax.lax.scan(one_pass, zeros, (jnp.arange(num_passes), parts))
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        metrics = {"loss": value, "grad_norm": optax.tree.norm(grads), **metrics}
        return dict(state, params=params, opt_state=opt_state, step=state["step"] + 1), metrics

    return jax.jit(step, donate_argnums=0, out_shardings=(shardings, None))


def fit(
    loss: Loss,
    params: Any,
    frozen: Any,
    batches: Callable[[int], Iterator[np.ndarray]],
    config: LoopConfig,
    out: str | Path,
    report: Callable[[str], None] = print,
    shardings: Callable[[Any], Any] = lambda state: None,
) -> Any:
    """Trains and returns the parameters; continues from the newest checkpoint in `out/checkpoints`, if any.

    Args:
      batches: `batches(start_step)` yields the batch of every step from there on.
      shardings: of a state on a mesh; None: one device.
    Raises:
      FloatingPointError: at the first loss that is not finite, naming the step; the last checkpoint stays.
    """
    out = Path(out)
    optimizer = make_optimizer(config)
    state = {
        "params": params,
        "opt_state": optimizer.init(params),
        "step": jnp.zeros((), jnp.int32),
        "seed": jnp.asarray(config.seed, jnp.int32),
    }
    placement = shardings(state)
    state = jax.device_put(state, placement)
    checkpoints = Checkpointer(out / "checkpoints")
    if checkpoints.latest_step() is not None:
        state = checkpoints.restore(state)
        report(f"resuming at step {int(state['step'])} of {config.steps}")
    train_step = make_train_step(loss, optimizer, config.num_passes, placement)
    start = int(state["step"])
    tokens_per_step = config.batch * config.length
    clock, last = time.perf_counter(), start
    stream = batches(start)
    with (out / "metrics.jsonl").open("a") as log:
        for step in range(start, config.steps):
            state, metrics = train_step(state, frozen, next(stream))
            done = step + 1
            if done % config.log_every == 0 or done == config.steps:
                values = {k: np.asarray(v).tolist() for k, v in metrics.items()}
                check_finite(values, done, checkpoints.latest_step())
                now = time.perf_counter()
                rate = tokens_per_step * (done - last) / (now - clock)
                clock, last = now, done
                log.write(json.dumps({"step": done, "tokens": done * tokens_per_step, "tokens_per_s": rate, **values}))
                log.write("\n")
                log.flush()
                report(progress_line(done, config, rate, values))
            if done % config.checkpoint_every == 0 or done == config.steps:
                check_finite(metrics, done, checkpoints.latest_step())  # a bad state must not replace a good one
                checkpoints.save(done, state)
    checkpoints.close()
    return state["params"]


def check_finite(metrics: dict[str, Any], step: int, last_checkpoint: int | None) -> None:
    """Raises FloatingPointError if loss or gradients are not finite, naming the step."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(float(metrics[name])):
            raise FloatingPointError(
                f"{name} is {float(metrics[name])} at step {step}: lower train.learning_rate; the last checkpoint is"
                f" step {last_checkpoint}"
            )


def progress_line(step: int, config: LoopConfig, rate: float, values: dict[str, Any]) -> str:
    """One line a person can read while training."""
    left = (config.steps - step) * config.batch * config.length / rate
    shown = [f"step {step}/{config.steps}", f"loss {values['loss']:.3f}"]
    for name, value in values.items():
        if name in ("loss", "grad_norm"):
            continue
        shown.append(f"{name} " + (" ".join(f"{v:.2f}" for v in value) if isinstance(value, list) else f"{value:.3f}"))
    return ", ".join([*shown, f"{rate:,.0f} tokens/s", f"{left / 60:.0f} min left"])
