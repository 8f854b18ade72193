"""The routes of the server: an ASGI application around an engine.

Starlette alone: a stream of server-sent events is a few lines, and sse-starlette would end running streams as soon as
the server is told to stop.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import hsd_jax
from hsd_jax.serve import metrics, schema
from hsd_jax.serve.engine import READY, Engine, Job, Refused
from hsd_jax.serve.schema import Answer, Limits, to_json

COALESCED_SECONDS = 0.02
"""The least time between two chunks of a stream."""
COMMENT_SECONDS = 15.0
"""The time after which a stream that says nothing sends a comment, so that nobody takes it for dead."""
PAGE = Path(__file__).with_name("page.html")
EVENTS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def make_app(engine: Engine, model: str = "hsd", key: str | None = None, limits: Limits | None = None) -> Starlette:
    """The application. The caller starts and closes the engine.

    Args:
      model: the name of the model, which requests may give.
      key: what `Authorization: Bearer KEY` must have on all routes but /, /health, /version and /metrics.
    Raises:
      ValueError: if the checkpoint has no tokenizer.
    """
    if engine.params.tokenizer is None:
        raise ValueError("the checkpoint has no tokenizer, and a server speaks in texts")
    server = _Server(engine, model, None if key is None else key.encode(), limits or Limits())
    posts = {
        "/v1/chat/completions": (schema.Chat, server.complete),
        "/v1/completions": (schema.Completion, server.complete),
        "/tokenize": (schema.Tokenize, server.tokenize),
        "/detokenize": (schema.Detokenize, server.detokenize),
    }
    gets = {"/v1/models": server.models, "/v1/models/{name:path}": server.models}
    free = {"/health": server.health, "/version": server.version, "/metrics": server.metrics}
    routes = [Route(path, server.guarded(partial(*one[::-1])), methods=["POST"]) for path, one in posts.items()]
    routes += [Route(path, server.guarded(answer)) for path, answer in gets.items()]
    routes += [Route(path, answer) for path, answer in free.items()]
    described = JSONResponse(schema.openapi({path: kind for path, (kind, _) in posts.items()}, hsd_jax.__version__))
    routes.append(Route("/openapi.json", described, methods=["GET"]))
    if PAGE.is_file():
        page = HTMLResponse(PAGE.read_bytes(), headers={"Cache-Control": "no-cache", "X-Frame-Options": "DENY"})
        routes.append(Route("/", page, methods=["GET"]))
    handlers: Any = {Refused: _of_refused, HTTPException: _of_http, ClientDisconnect: _of_gone, Exception: _of_any}
    return Starlette(routes=routes, exception_handlers=handlers)


class _Server:
    def __init__(self, engine: Engine, model: str, key: bytes | None, limits: Limits):
        self.engine, self.params, self.model, self.key, self.limits = engine, engine.params, model, key, limits
        self.created = int(time.time())

    def guarded(self, answer: Callable[[Request], Awaitable[Response]]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that asks for the key."""

        async def endpoint(request: Request) -> Response:
            said = request.headers.get("authorization", "").encode("latin-1")  # the bytes that were sent
            if self.key is not None and not hmac.compare_digest(said, b"Bearer " + self.key):
                raise Refused(401, "the API key is missing or wrong", code="invalid_api_key")
            return await answer(request)

        return endpoint

    async def read(self, kind: Any, request: Request) -> Any:
        """The checked body of a request."""
        if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            # A page of another origin may send other types without asking.
            raise Refused(415, "the content type must be application/json")
        most, body = self.limits.body_bytes, bytearray()
        try:
            async with asyncio.timeout(self.limits.seconds):
                async for part in request.stream():
                    body += part
                    if len(body) > most:
                        raise Refused(413, f"the body has more than {most} bytes", code="body_too_large")
        except TimeoutError:
            raise Refused(408, "the body did not come in time", code="timeout") from None
        asked = schema.read(kind, bytes(body))
        if asked.model not in (None, self.model):
            raise Refused(404, f"model: this server has {self.model}", "model", "model_not_found")
        return asked

    async def complete(self, kind: Any, request: Request) -> Response:
        """An answer to a conversation, or the continuation of texts."""
        asked = await self.read(kind, request)
        rows = await run_in_threadpool(schema.rows_of_request, asked, self.params, self.engine.max_len, self.limits)
        loop, news = asyncio.get_running_loop(), asyncio.Event()
        job = Job(
            rows,
            wake=partial(loop.call_soon_threadsafe, news.set),
            is_plain=asked.speculate is False,
            by_pass=bool(asked.return_passes),
            is_whole=not asked.stream,
            deadline=time.monotonic() + self.limits.seconds,
        )
        answer = Answer(asked, job, self.params, self.model)
        self.engine.submit(job)
        if asked.stream:
            return _Stream(self.engine, job, _events(answer, job, news))
        try:
            pieces = await _unless_gone(_all(job, news), request.receive)
        finally:
            self.engine.cancel(job)
        if job.failure is not None:
            raise job.failure
        return JSONResponse(answer.whole(pieces))

    async def tokenize(self, kind: Any, request: Request) -> Response:
        """The tokens of a text or a conversation."""
        asked = await self.read(kind, request)
        tokens = await run_in_threadpool(schema.tokens_of, asked, self.params)
        return JSONResponse({"count": len(tokens), "max_model_len": self.engine.max_len, "tokens": tokens})

    async def detokenize(self, kind: Any, request: Request) -> Response:
        """The text of tokens."""
        asked = await self.read(kind, request)
        return JSONResponse({"prompt": schema.text_of(asked, self.params)})

    async def models(self, request: Request) -> Response:
        """The model, as a list of one."""
        one = {"id": self.model, "object": "model", "created": self.created, "owned_by": "hsd_jax"}
        one |= {"max_model_len": self.engine.max_len}
        name = request.path_params.get("name")
        if name not in (None, self.model):
            raise Refused(404, f"model: this server has {self.model}", "model", "model_not_found")
        return JSONResponse(one if name else {"object": "list", "data": [one]})

    async def health(self, request: Request) -> Response:
        """Whether requests are taken, and why not."""
        engine = self.engine
        found = {"status": engine.status} | ({"error": engine.error} if engine.error else {})
        return JSONResponse(found, 200 if engine.status == READY else 503)

    async def version(self, request: Request) -> Response:
        return JSONResponse({"version": hsd_jax.__version__})

    async def metrics(self, request: Request) -> Response:
        return Response(self.engine.metrics.shown(), headers={"Content-Type": metrics.CONTENT_TYPE})


class _Stream(StreamingResponse):
    """Server-sent events of a job, which ends with the connection."""

    def __init__(self, engine: Engine, job: Job, events: AsyncIterator[bytes]):
        super().__init__(events, media_type="text/event-stream", headers=EVENTS)
        self._engine, self._job = engine, job

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            with contextlib.suppress(ClientDisconnect):
                await _unless_gone(self.stream_response(send), receive)
        finally:
            self._engine.cancel(self._job)


async def _events(answer: Answer, job: Job, news: asyncio.Event) -> AsyncIterator[bytes]:
    """The chunks of a stream, as server-sent events."""
    while not job.is_over:
        try:
            await asyncio.wait_for(news.wait(), COMMENT_SECONDS)
        except TimeoutError:
            yield b": waiting\n\n"
            continue
        news.clear()
        for chunk in answer.chunks(job.drain()):
            yield b"data: " + to_json(chunk) + b"\n\n"
        if not job.is_over:
            await asyncio.sleep(COALESCED_SECONDS)
    for chunk in answer.chunks(job.drain()):  # what came before a failure
        yield b"data: " + to_json(chunk) + b"\n\n"
    if job.failure is not None:
        yield b"data: " + to_json(_error(job.failure)) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def _all(job: Job, news: asyncio.Event) -> list[tuple[int, Any]]:
    """All pieces of a job."""
    found = []
    while not job.is_over:
        await news.wait()
        news.clear()
        found += job.drain()
    return found


async def _unless_gone(work: Any, receive: Any) -> Any:
    """What `work` returns. Raises `ClientDisconnect` as soon as the client has gone."""

    async def gone() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    tasks = asyncio.ensure_future(work), asyncio.ensure_future(gone())
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if tasks[0].done():
            return tasks[0].result()
        raise ClientDisconnect
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _error(refused: Refused) -> dict[str, Any]:
    """An error as OpenAI writes it."""
    kind = {401: "authentication_error", 429: "rate_limit_error"}.get(refused.status, "invalid_request_error")
    kind = "server_error" if refused.status >= 500 else kind
    return {"error": {"message": refused.message, "type": kind, "param": refused.param, "code": refused.code}}


async def _of_refused(request: Request, error: Refused) -> Response:
    headers = {"Retry-After": str(error.retry_after)} if error.retry_after else {}
    if error.status in (500, 504):
        headers["X-Should-Retry"] = "false"  # OpenAI's client would send what has failed twice more
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(_error(error), error.status, headers)


async def _of_http(request: Request, error: HTTPException) -> Response:
    return JSONResponse(_error(Refused(error.status_code, error.detail)), error.status_code, dict(error.headers or {}))


async def _of_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=499)  # nobody reads it


async def _of_any(request: Request, error: Exception) -> Response:
    return await _of_refused(request, Refused(500, "an error of the server", code="internal_error"))
