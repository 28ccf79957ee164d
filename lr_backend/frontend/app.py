"""The routes. What a request passes stands here in its order: id, key, rate, body, place, fields, calls, answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from fastapi import FastAPI
from lr_client import AsyncClient, ClientError, ReasoningSplitter
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

import lr_backend
from lr_backend.engine import Role
from lr_backend.frontend.answering import Answers, unless_gone
from lr_backend.frontend.answers import Choice, Document, Head, counted, counts_document, to_json
from lr_backend.frontend.asked import Asked
from lr_backend.frontend.body import Room, parse_json, read_body
from lr_backend.frontend.call import Call
from lr_backend.frontend.errors import LATER_S, SOON_S, ApiError, ClientGone, internal
from lr_backend.frontend.limits import Gate, Keys, Rate
from lr_backend.frontend.metrics import CONTENT_TYPE, DoorMetrics
from lr_backend.frontend.settings import MAX_REQUEST_S, Deployed, Settings
from lr_backend.frontend.static import INDEX, Page
from lr_backend.frontend.stream import EventStream
from lr_backend.notice import read as read_notice
from lr_backend.telemetry import Telemetry

GRACE_S = 10.0
"""Beyond what a request may take, for its end to be told: the server itself ends it before."""
TARGET_READY_S = 2.0
"""A target elsewhere has so long to say that it is ready: less than whoever asks here waits for the answer."""
_ROUTING = {404: "not_found", 405: "method_not_allowed"}

Handler = Callable[[Call], Awaitable[Response]]


class Frontend:
    """Answers requests; one object for all of them.

    Attributes:
        draining: it is to end: it says that it is not ready, takes no more requests, and finishes those that it has.

    Args:
        client: belongs to the event loop that runs.
        metrics_url: ``host:port`` of Triton's metrics; None: the page has the front end's alone.
        telemetry: makes spans; None: there are none.
        targets: servers of a target that lives elsewhere; one of them has to be ready.
        notice_file: names the models that are loaded anew; None: nobody says so.
    """

    def __init__(
        self,
        settings: Settings,
        deployed: Deployed,
        client: AsyncClient,
        keys: Keys,
        metrics_url: str | None = None,
        telemetry: Telemetry | None = None,
        targets: Sequence[AsyncClient] = (),
        notice_file: Path | None = None,
    ) -> None:
        self._targets, self._notice_file = tuple(targets), notice_file
        self._settings, self._deployed, self._client, self._keys = settings, deployed, client, keys
        self._rate = Rate(settings.max_requests_a_minute, time.monotonic)
        max_in_flight = settings.places(deployed.max_in_flight)
        self._gate = Gate(max_in_flight, settings.kept_for_priority)
        self._room = Room(max_in_flight * settings.max_body_bytes)
        self._metrics, self._telemetry = DoorMetrics(self._gate, metrics_url), telemetry
        self._created = int(time.time())
        self._page = Page(deployed, keyed=keys.wanted)
        self.draining = False

    async def drained(self) -> None:
        """Begin to drain, and wait until nothing is in flight."""
        self.draining = True
        await self._gate.empty.wait()

    def app(self) -> FastAPI:
        """The ASGI application."""
        app = FastAPI(
            openapi_url=None, redirect_slashes=False, exception_handlers={HTTPException: partial(_no_route, self._metrics)}
        )
        routes: tuple[tuple[str, str, Handler], ...] = (
            ("GET", "/health", self._live),
            ("GET", "/ready", self._ready),
            ("GET", "/metrics", self._told),
            ("GET", "/v1/models", self._models),
            ("GET", "/v1/models/{name}", self._models),
            ("POST", "/v1/chat/completions", self._chat),
            ("POST", "/v1/completions", self._completion),
        )
        if self._settings.page:
            routes += (("GET", "/", self._file), ("GET", "/page/{name}", self._file))
        for method, path, handler in routes:
            methods = ["GET", "HEAD"] if method == "GET" else [method]
            app.add_api_route(path, _guarded(handler, self._metrics), methods=methods, response_model=None)
        return app

    async def _live(self, call: Call) -> Response:
        return call.response(to_json({"status": "live"}))

    async def _ready(self, call: Call) -> Response:
        self._refuse_while_draining()
        if not await self._client.is_ready(models=self._deployed.needs):
            # A target that is loaded anew has a limit of its own: a new start of the server would only throw that away.
            dead = read_notice(self._notice_file) if self._notice_file is not None else ()
            waits_for = Role.TARGET.value if Role.TARGET.value in dead else ""
            what = f"{' or '.join(self._deployed.needs)} is not ready"
            raise ApiError("unavailable", what, retry_after_s=SOON_S, waits_for=waits_for)
        if self._targets and not await self._a_target_is_ready():
            raise ApiError("unavailable", "no server of the target is ready", retry_after_s=SOON_S, waits_for=Role.TARGET)
        return call.response(to_json({"status": "ready"}))

    async def _a_target_is_ready(self) -> bool:
        """As soon as one says so: another may be silent until its time is up."""
        asked = [
            asyncio.create_task(each.is_ready(timeout_s=TARGET_READY_S, models=(Role.TARGET.value,))) for each in self._targets
        ]
        try:
            for answer in asyncio.as_completed(asked):
                if await answer:
                    return True
            return False
        finally:
            for each in asked:
                each.cancel()

    async def _file(self, call: Call) -> Response:
        return self._page.answer(call.request.path_params.get("name", INDEX), call.headers)

    async def _told(self, call: Call) -> Response:
        self._admit(call)
        return Response(await self._metrics.page(), headers=call.headers | {"content-type": CONTENT_TYPE})

    async def _models(self, call: Call) -> Response:
        self._admit(call)
        served = self._deployed.name
        model = {"id": served, "object": "model", "created": self._created, "owned_by": "lookahead"}
        model["root"] = served  # vllm bench serve looks for it
        if (name := call.request.path_params.get("name")) not in (None, self._deployed.name):
            raise ApiError("model_not_found", f"this server has {self._deployed.name}")
        call.log(200)
        return call.response(to_json({"object": "list", "data": [model]} if name is None else model))

    async def _chat(self, call: Call) -> Response:
        return await self._answer(call, Asked.chat_of)

    async def _completion(self, call: Call) -> Response:
        return await self._answer(call, Asked.completion_of)

    def _refuse_while_draining(self) -> None:
        if self.draining:
            raise ApiError("draining", "the server is about to end; ask another, or this one later", retry_after_s=LATER_S)

    def _admit(self, call: Call) -> None:
        call.caller = self._keys.caller_of(call.request.headers.get("authorization", ""))

    async def _answer(self, call: Call, read: Callable[[Document, Deployed], Asked]) -> Response:
        call.trace(self._telemetry)
        self._admit(call)
        self._refuse_while_draining()
        counted_s = self._rate.count(call.caller.number)
        try:
            return await self._counted(call, read)
        except ApiError as error:
            if error.code == "overloaded":
                self._rate.give_back(call.caller.number, counted_s)
            raise

    async def _counted(self, call: Call, read: Callable[[Document, Deployed], Asked]) -> Response:
        """The answer to a request that is within the rate."""
        body = await read_body(call.request, self._room, self._settings.max_body_bytes, self._settings.max_body_s)
        call.has_body = True
        self._refuse_while_draining()  # meanwhile
        async with AsyncExitStack() as held:
            held.enter_context(self._gate.places(1, call.caller, are_all=False))
            asked = read(parse_json(body), self._deployed)
            if len(asked.jobs) > (most := self._gate.most(call.caller)):
                param = "n" if asked.chat else "prompt"
                raise ApiError("over_limit", f"{len(asked.jobs)} choices: at most {most} at a time here", param)
            held.enter_context(self._gate.places(len(asked.jobs) - 1, call.caller, own=1))
            timeout_s = min(self._deployed.request_s + GRACE_S, MAX_REQUEST_S)
            try:
                answers = await held.enter_async_context(
                    Answers(self._client, asked.jobs, call.request_id, timeout_s, call.context)
                )
                if not asked.stream:
                    return await unless_gone(call.request.receive, self._whole(call, asked, answers))
                first = await unless_gone(call.request.receive, answers.next())
            except ClientError as error:
                raise call.told_as(error, asked.param_of) from error
            choices, head = self._choices(asked), self._head(call, asked)
            limit_s = timeout_s + GRACE_S
            return EventStream(call, asked, head, choices, answers, first=first, held=held.pop_all(), limit_s=limit_s)

    async def _whole(self, call: Call, asked: Asked, answers: Answers) -> Response:
        choices = self._choices(asked)
        while (heard := await answers.next()) is not None:
            choices[heard[0]].add(heard[1])
        counts = counts_document(asked, choices)
        document = self._head(call, asked).document(chunk=False)
        call.log(200, **counted(counts))
        return call.response(to_json({**document, "choices": [one.whole() for one in choices], **counts}))

    def _head(self, call: Call, asked: Asked) -> Head:
        return Head(call.request_id, int(time.time()), self._deployed.name, asked.chat, lr_backend.__version__)

    def _choices(self, asked: Asked) -> list[Choice]:
        marks, new_calls = self._deployed.marks, asked.new_calls
        return [
            Choice(number, ReasoningSplitter(marks) if asked.chat else None, calls=new_calls() if new_calls else None)
            for number in range(len(asked.jobs))
        ]


def _guarded(handler: Handler, metrics: DoorMetrics) -> Callable[[Request], Awaitable[Response]]:
    """A route that says every failure in one form, and an unforeseen one without its insides."""

    async def respond(request: Request) -> Response:
        call = Call(request, metrics)
        try:
            return await handler(call)
        except ApiError as error:
            return call.failed(error)
        except ClientGone:
            return call.failed(ApiError("client_gone", "the client went away"))
        except asyncio.CancelledError:  # the server ends, and waits no longer
            call.log(503, code="unavailable")
            raise
        except Exception as error:
            call.crashed(error)
            return call.failed(internal())

    return respond


async def _no_route(metrics: DoorMetrics, request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    call = Call(request, metrics)
    told = ApiError(_ROUTING.get(error.status_code, "internal"), str(error.detail))
    told.headers |= {name.lower(): value for name, value in (error.headers or {}).items()}
    return call.failed(told)
