"""An engine and its application at an address, until a signal ends them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from hsd_jax.serve.engine import BROKEN, Engine

STUCK_SECONDS = 60
"""The time after which a client that reads nothing of what was sent to it is taken for gone (on Linux)."""
SPARE_SECONDS = 5
"""Time beyond that of the last requests, in which what they said last is sent."""


class _Server(uvicorn.Server):
    """A server whose requests end before it does, in time or with an error that their clients can read."""

    def __init__(self, config: uvicorn.Config, engine: Engine, drain_seconds: float, say: Callable[[str], None]):
        super().__init__(config)
        self._engine, self._say, self._seconds = engine, say, iter((drain_seconds, 0.0))
        """What requests get after the first and the second signal."""

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.should_exit = True
        seconds = next(self._seconds, None)
        if seconds is None:
            self.force_exit = True
        else:
            num = self._engine.num_running + self._engine.num_waiting
            self._engine.drain(seconds)
            with contextlib.suppress(OSError):  # nobody may read stderr any more: `hsd serve 2>&1 | tee log`
                self._say(f"ending: {num} answers get {seconds:g} s; another signal ends the server sooner")


def serve(app: Any, engine: Engine, host: str, port: int, drain_seconds: float, say: Callable[[str], None]) -> int:
    """Serves until SIGTERM or SIGINT comes, or until the engine fails before it is ready. Returns the exit status.

    Args:
      drain_seconds: the time that requests get to end after the signal.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.create_server((host, port), family=family, backlog=1024) as listener:
        # What is sent goes out at once; connections have it from the listener. asyncio sets it only where the protocol
        # of a socket is named, and then each event would wait for the client's word about the one before it.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * STUCK_SECONDS)
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        address = f"http://{shown}:{listener.getsockname()[1]}"
        most = int(drain_seconds) + SPARE_SECONDS
        config = uvicorn.Config(
            app, lifespan="off", log_level="warning", access_log=False, timeout_graceful_shutdown=most
        )
        server = _Server(config, engine, drain_seconds, say)
        say(f"compiling; {address}/health says when it is ready")
        engine.start()

        def watch() -> None:
            if engine.wait_ready():
                say(f"ready at {address}/v1, {engine.slots} slots of {engine.max_len} tokens, {engine.plan}")
            elif engine.status == BROKEN:
                server.should_exit = True

        threading.Thread(target=watch, daemon=True).start()
        try:
            server.run(sockets=[listener])
        finally:
            engine.close()
    return 1 if engine.status == BROKEN else 0
