"""`hsd serve`: answers requests over HTTP as OpenAI's API does."""

from __future__ import annotations

import argparse
import importlib.util
import ipaddress
import os
import sys
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from hsd_jax.cli import options
from hsd_jax.host.files import is_writer, read_text
from hsd_jax.settings import SpeculationSettings
from hsd_jax.validation import Positive, Whole

NEEDED = "starlette", "uvicorn", "prometheus_client"
KEY_VARIABLE = "HSD_API_KEY"
LOCAL = "127.0.0.1"
MOST_TOKENS = 4096
"""The length of a slot without --max-len. Its caches are made at the start."""
Port = Annotated[int, Field(ge=0, le=65535)]


def add_parser(commands) -> None:
    """Declares `hsd serve`."""
    parser = options.add_command(
        commands,
        "serve",
        run,
        "answer requests over HTTP, as OpenAI's API does",
        "Serve a model to clients of OpenAI's API: chat completions, completions, streams, and a page to try it.\n"
        "Without --target it serves SmolLM2 where it is installed, else the bundled pair. Slots hold 4096 tokens at\n"
        "most, or --max-len. docs/serve.md has the routes and fields.",
        """
hsd serve
hsd serve --target NAME --drafter NAME --slots 16 --max-len 4096 --mesh model=4
HSD_API_KEY=... hsd serve --demo --host 0.0.0.0 --port 8000
""",
    )
    options.add_model_arguments(parser, is_required=False)
    options.add_speculation(parser)
    group = parser.add_argument_group("server")
    options.add_value(group, "--host ADDRESS", str, "address to listen at", LOCAL, without=LOCAL)
    options.add_value(group, "--port N", options.value_of(Port), "port; 0: a free one", 8000)
    options.add_value(group, "--name NAME", str, "the model's name for clients", without="that of the target")
    what = f"file of the API key that clients must send (default: the environment variable {KEY_VARIABLE}, or none)"
    options.add_value(group, "--api-key-file FILE", Path, what)
    options.add_value(group, "--slots N", options.COUNT, "answers that are written at the same time", 8)
    what = "slots for requests with speculate=false; 0: they are refused"
    options.add_value(group, "--plain-slots N", options.value_of(Whole), what, 1)
    what = "room for the states of answers that have ended: a prompt that begins as one is read from where it differs"
    options.add_value(group, "--prefix-tokens N", options.value_of(Whole), what, without="that of two slots")
    what = "requests get 429 while so many answers wait for a slot"
    options.add_value(group, "--max-waiting N", options.COUNT, what, 256)
    options.add_value(group, "--max-n N", options.COUNT, "answers that one request may ask for", 16)
    options.add_value(group, "--max-body BYTES", options.COUNT, "the largest body of a request", 4 * 2**20)
    options.add_value(group, "--max-seconds S", options.value_of(Positive), "time of a request, its wait included", 600)
    what = "after SIGTERM: time that running requests get to end"
    options.add_value(group, "--drain-seconds S", options.value_of(Positive), what, 30)


def run(args: argparse.Namespace) -> int:
    """Serves until SIGTERM or Ctrl-C."""
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise ValueError(f"hsd serve needs {', '.join(missing)}: pip install 'hsd_jax[serve]'")
    key = read_key(args.api_key_file)
    if key is None and not is_local(args.host):
        options.say(f"warning: anyone who reaches {args.host} can use this server; set {KEY_VARIABLE}")
    import jax

    from hsd_jax.serve.app import make_app
    from hsd_jax.serve.engine import Engine
    from hsd_jax.serve.metrics import Metrics
    from hsd_jax.serve.schema import Limits
    from hsd_jax.serve.server import serve

    args.target = getattr(args, "target", None) or options.default_target()
    options.say(f"loading {args.target}")
    params = options.load_params(args)
    # With several threads XLA starts exchanges of one program at the same time. Gloo knows them by their order alone.
    is_one_thread = os.environ.get("NPROC") == "1" and jax.local_device_count() == 1
    if jax.process_count() > 1 and jax.default_backend() == "cpu" and not is_one_thread:
        raise ValueError("several processes of CPUs: expected NPROC=1 in the environment, and one device in each")
    name = args.name or str(args.target)
    max_len = None if hasattr(args, "max_len") else min(params.max_len, MOST_TOKENS)
    settings: dict[str, Any] = options.given(args, SpeculationSettings) | {
        "tree": None if params.drafter is None else options.tree_asked(args, params)
    }
    engine = Engine(
        params,
        args.slots,
        max_len,
        plain_slots=args.plain_slots,
        max_waiting=args.max_waiting,
        prefix_tokens=args.prefix_tokens,
        metrics=Metrics(name),
        **settings,
    )
    if not is_writer():
        engine.follow()
        return 0
    app = make_app(engine, name, key, Limits(args.max_body, args.max_n, args.max_seconds))
    code = serve(app, engine, args.host, args.port, args.drain_seconds, options.say)
    if engine.is_compiling:  # Python would wait for it
        sys.stdout.flush()
        os._exit(code)
    return code


def read_key(path: Path | None) -> str | None:
    """The API key, of a file or of the environment."""
    text = (os.environ.get(KEY_VARIABLE, "") if path is None else read_text(path)).strip()
    if path is not None and (not text or "\n" in text):
        raise ValueError(f"--api-key-file {path}: expected one line with the key")
    return text or None


def is_local(host: str) -> bool:
    """Whether only this machine reaches an address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
