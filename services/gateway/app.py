"""The HTTP surface: routes, and one error format for whatever goes wrong on the way to them."""

from __future__ import annotations

import re
import secrets
from http import HTTPStatus
from typing import Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.telemetry import TelemetryConfig
from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.gateway.answers import Generation, JsonBody, error_response
from services.gateway.errors import INVALID, SERVER, ApiError, internal, invalid, unknown_model
from services.gateway.gateway import Gateway
from services.gateway.lookup import cancel, look_up
from services.gateway.openai_schema import ChatBody, CompletionBody
from shared.protocol.records import Api
from shared.telemetry import render_metrics

_SANE_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_PATHS: Final[dict[Api, str]] = {"chat": "/v1/chat/completions", "completion": "/v1/completions"}
_BODIES: Final[dict[Api, type[ChatBody] | type[CompletionBody]]] = {"chat": ChatBody, "completion": CompletionBody}

# Ours is made by hand: the framework's would add spans for every probe, and exception texts, to each trace.
_NO_TELEMETRY: Final[TelemetryConfig] = {
    "tracing": False,
    "metrics": False,
    "logs": False,
    "operation_spans": False,
    "auto_configure": False,
}

log = structlog.get_logger(__name__)


def create_app(gateway: Gateway) -> ASGIApp:
    """The ASGI application of one gateway."""
    app = FastAPI(
        title="Headrace gateway", docs_url=None, redoc_url=None, redirect_slashes=False, telemetry=_NO_TELEMETRY
    )
    for api in _PATHS:
        _add_generation_routes(app, gateway, api)
    _add_model_routes(app, gateway)
    _add_probe_routes(app, gateway)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    return Outermost(app)


def _add_generation_routes(app: FastAPI, gateway: Gateway, api: Api) -> None:
    path = _PATHS[api]
    schema = _BODIES[api].model_json_schema(ref_template=f"#/components/schemas/{api}-{{model}}")
    body = {"required": True, "content": {"application/json": {"schema": schema}}}

    @app.post(path, name=f"create_{api}", openapi_extra={"requestBody": body})
    async def create() -> Response:
        return Generation(gateway, api)

    @app.get(path + "/{request_id}", name=f"get_{api}")
    async def get(request: Request, request_id: str) -> Response:
        return await look_up(gateway, request, api, request_id)

    @app.delete(path + "/{request_id}", name=f"delete_{api}")
    @app.post(path + "/{request_id}/cancel", name=f"cancel_{api}")
    async def end(request: Request, request_id: str) -> Response:
        return await cancel(gateway, request, api, request_id)


def _add_model_routes(app: FastAPI, gateway: Gateway) -> None:
    def described() -> dict[str, Any]:
        return {
            "id": gateway.model.name,
            "object": "model",
            "created": gateway.model_created_unix_s,
            "owned_by": "headrace",
            "max_model_len": gateway.prompter.context_length,
        }

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        gateway.keyring.tenant(request.headers.get("authorization"))
        return JsonBody({"object": "list", "data": [described()]})

    @app.get("/v1/models/{name:path}")  # names of hub models hold a slash
    async def model(request: Request, name: str) -> Response:
        gateway.keyring.tenant(request.headers.get("authorization"))
        if name != gateway.model.name:
            raise unknown_model(name, gateway.model.name)
        return JsonBody(described())


def _add_probe_routes(app: FastAPI, gateway: Gateway) -> None:
    @app.get("/healthz")
    @app.head("/healthz", include_in_schema=False)
    async def health() -> Response:
        return JsonBody({"status": "ok"})

    @app.get("/readyz")
    @app.head("/readyz", include_in_schema=False)
    async def ready() -> Response:
        missing = gateway.readiness.missing()
        body = {"status": "waiting" if missing else "ready", "model": gateway.model.name, "missing": missing}
        if not missing:
            return JsonBody(body)
        return JsonBody(body, 503, {"Retry-After": str(gateway.settings.retry_after_s)})

    @app.get("/metrics")
    async def metrics(request: Request) -> Response:
        body, content_type = render_metrics(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})


async def _on_api_error(_: Request, error: Exception) -> Response:
    return error_response(error if isinstance(error, ApiError) else internal())


async def _on_http_error(request: Request, error: Exception) -> Response:
    """The framework's own refusals: no such route, or not with this method."""
    if not isinstance(error, HTTPException):
        return error_response(internal())
    status, headers = error.status_code, dict(error.headers or {})
    if status == 404:
        text = f"There is nothing at {request.url.path[:256]!r}."
        return error_response(ApiError(status, text, code="not_found", headers=headers))
    if status == 405:
        text = f"{request.method} is not allowed here."
        return error_response(ApiError(status, text, code="method_not_allowed", headers=headers))
    kind = INVALID if status < 500 else SERVER
    return error_response(ApiError(status, HTTPStatus(status).phrase, type=kind, headers=headers))


async def _on_validation_error(_: Request, error: Exception) -> Response:
    if not isinstance(error, RequestValidationError):
        return error_response(internal())
    first = error.errors()[0]
    return error_response(invalid(str(first["msg"]), ".".join(str(part) for part in first["loc"][1:]) or None))


class Outermost:
    """Gives every response an `x-request-id`, and turns what nobody caught into a plain 500."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _request_id(scope)
        started = False

        async def send_with_id(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                MutableHeaders(scope=message)["x-request-id"] = request_id
            await send(message)

        with structlog.contextvars.bound_contextvars(http_request_id=request_id):
            try:
                await self._app(scope, receive, send_with_id)
            except Exception:
                log.exception("request_failed", path=scope["path"])
                if not started:
                    await error_response(internal())(scope, receive, send_with_id)


def _request_id(scope: Scope) -> str:
    """The client's own id if it is fit for a header and a log, else a new one."""
    for name, value in scope["headers"]:
        text: str = value.decode("latin-1")
        if name == b"x-request-id" and _SANE_ID.fullmatch(text):
            return text
    return f"req_{secrets.token_hex(12)}"
