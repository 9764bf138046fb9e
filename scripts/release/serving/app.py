"""The web application: both protocols, their errors and limits, and a page to try prompts."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from scripts.release.serving import megatron_api, openai_api
from scripts.release.serving.engine import OverloadedError
from scripts.release.serving.service import RequestError, Service

PAGE = Path(__file__).with_name("page.html")
MAX_BODY_BYTES = 4_000_000


def create_app(service: Service) -> FastAPI:
    """Returns the application; it starts the engine and, when it ends, lets it finish."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        service.engine.start()
        yield
        await asyncio.to_thread(service.engine.stop)

    app = FastAPI(title=service.name, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(LimitBody, max_bytes=MAX_BODY_BYTES)
    app.include_router(megatron_api.router)
    app.include_router(openai_api.router)

    @app.get("/", include_in_schema=False)
    async def page() -> FileResponse:
        return FileResponse(PAGE)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Says that the server answers."""
        return {"status": "ok"}

    @app.exception_handler(RequestError)
    async def refuse(request: Request, error: RequestError) -> Response:
        return explained(request, str(error), error.status)

    @app.exception_handler(OverloadedError)
    async def put_off(request: Request, error: OverloadedError) -> Response:
        response = explained(request, str(error), 503)
        response.headers["Retry-After"] = "1"
        return response

    @app.exception_handler(RequestValidationError)
    async def refuse_body(request: Request, error: RequestValidationError) -> Response:
        return explained(request, first_fault(error), 400)

    @app.exception_handler(HTTPException)
    async def refuse_path(request: Request, error: HTTPException) -> Response:
        return explained(request, f"{request.url.path}: {error.detail}", error.status_code)

    return app


def explained(request: Request, message: str, status: int) -> Response:
    """Returns an error as the protocol of the request has it."""
    if not request.url.path.startswith("/v1"):
        return JSONResponse(message, status)
    kind = "invalid_request_error" if status < 500 else "server_error"
    return JSONResponse(
        {"error": {"message": message, "type": kind, "param": None, "code": status}}, status
    )


def first_fault(error: RequestValidationError) -> str:
    """Says in a line what is wrong with a body."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"][1:])
    message = fault["msg"].removeprefix("Value error, ")
    if fault["type"] == "json_invalid":
        return f"the body is not valid JSON: {fault['ctx']['error']}"
    if fault["type"] == "missing":
        return f"{where or 'a JSON body'} is required"
    if fault["type"] == "extra_forbidden":
        return f"{where} is not an argument of this server"
    return f"{where}: {message}" if where else message


class LimitBody:
    """Refuses bodies that are too large before they are read into memory."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app = app
        self.max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Counts the bytes of a request's body as they come."""
        received = 0

        async def counted() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            if received > self.max_bytes:
                raise HTTPException(413, f"the body is larger than {self.max_bytes} bytes")
            return message

        await self.app(scope, counted if scope["type"] == "http" else receive, send)
