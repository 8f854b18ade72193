"""Replicas of the server behind one address, with Ray Serve: pip install 'hsd_jax[serve]' 'ray[serve]'.

Each replica is a process with its own weights, session and application, the one that `hsd serve` runs. Ray starts them,
spreads requests over them, and replaces one that dies or whose device failed. Routes and fields are those of
docs/serve.md; /health and /metrics are those of the replica that happens to answer.

    HSD_API_KEY=... python examples/ray_serve.py --replicas 2 --target smollm2
    curl -H "Authorization: Bearer ..." localhost:8000/v1/models
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from ray import serve  # type: ignore[import-not-found]

WAITING = 64
"""Answers that may wait in a replica. Others get 429, or wait with Ray."""


class Replica:
    """A model with its session and its application."""

    engine: Any = None

    def __init__(self, target: str, slots: int, max_len: int, key: str | None):
        import hsd_jax
        from hsd_jax.serve.engine import Engine
        from hsd_jax.serve.metrics import Metrics

        self.target, self.key = target, key
        self.engine = Engine(hsd_jax.load(target), slots, max_len, max_waiting=WAITING, metrics=Metrics(target))
        self.engine.start()
        if not self.engine.wait_ready():
            raise RuntimeError(self.engine.error)

    def __serve_build_asgi_app__(self) -> Any:
        """What Ray asks for the application."""
        from hsd_jax.serve.app import make_app

        return make_app(self.engine, self.target, self.key)

    def check_health(self) -> None:
        """Ray replaces a replica that raises an error here."""
        if self.engine.status != "ready":
            raise RuntimeError(self.engine.error)

    def __del__(self) -> None:
        if self.engine is not None:  # else the models could not be loaded
            self.engine.close()


def build(replicas: int, target: str, slots: int, max_len: int, key: str | None = None, **resources: float) -> Any:
    """The application for `serve.run`. `resources` are those of a replica, for example `num_gpus=1`."""
    deployment = serve.deployment(
        serve.ingress()(Replica),  # no application yet: a replica makes its own, because a session cannot be sent there
        num_replicas=replicas,
        max_ongoing_requests=slots + WAITING,
        health_check_period_s=5,
        ray_actor_options=resources,
    )
    return deployment.bind(target, slots, max_len, key)


def main() -> None:
    """Runs until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--max-len", type=int, default=4096)
    parser.add_argument("--num-gpus", type=float, default=0)
    args = parser.parse_args()
    how = args.replicas, args.target, args.slots, args.max_len, os.environ.get("HSD_API_KEY")
    serve.run(build(*how, num_gpus=args.num_gpus), blocking=True)


if __name__ == "__main__":
    main()
