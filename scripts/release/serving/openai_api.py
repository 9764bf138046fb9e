"""`POST /v1/completions`, also streamed, and `GET /v1/models`, as OpenAI's clients know them."""

import json
import time
import uuid
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field, model_validator

from scripts.release.serving.engine import Job, Sampling, Scored
from scripts.release.serving.service import MAX_PROMPTS, Completion, RequestError, Service

router = APIRouter(prefix="/v1")

MAX_TOP_LOGPROBS = 5
NotEmpty = Field(min_length=1)
Tokens = Annotated[list[int], NotEmpty]
NoPenalty = Annotated[float, Field(ge=0, le=0)]


class StreamOptions(BaseModel):
    """What a stream holds besides text."""

    model_config = ConfigDict(strict=True, extra="forbid")

    include_usage: bool = False


class CompletionRequest(BaseModel):
    """The body of a request; `top_k` is vLLM's addition, penalties are accepted as 0."""

    model_config = ConfigDict(strict=True, extra="forbid")

    model: str | None = None
    prompt: str | Tokens | Annotated[list[str], NotEmpty] | Annotated[list[Tokens], NotEmpty]
    max_tokens: Annotated[int, Field(ge=0)] | None = 16
    temperature: Annotated[float, Field(ge=0, le=100)] | None = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] | None = 1.0
    top_k: Annotated[int, Field(ge=-1)] | None = 0
    n: Annotated[int, Field(ge=1, le=MAX_PROMPTS)] | None = 1
    best_of: Annotated[int, Field(ge=1)] | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    echo: bool | None = False
    stop: str | Annotated[list[str], Field(max_length=4)] | None = None
    seed: Annotated[int, Field(ge=0)] | None = None
    presence_penalty: NoPenalty | None = 0
    frequency_penalty: NoPenalty | None = 0
    user: str | None = None

    @model_validator(mode="after")
    def agree(self) -> "CompletionRequest":
        """Refuses combinations that cannot be served."""
        if self.best_of not in (None, self.n):
            raise ValueError("best_of other than n is not supported")
        if len(self.prompts()) * (self.n or 1) > MAX_PROMPTS:
            raise ValueError(f"more than {MAX_PROMPTS} completions in one request")
        return self

    def prompts(self) -> list[str | list[int]]:
        """Returns the prompts, as texts or as tokens."""
        alone = isinstance(self.prompt, str) or isinstance(self.prompt[0], int)
        return [self.prompt] if alone else self.prompt

    def stops(self) -> list[str]:
        """Returns the strings that end a completion."""
        stops = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [stop for stop in stops if stop]

    def sampling(self, number: int) -> Sampling:
        """Returns how the choice of that number is generated."""
        return Sampling(
            max_new_tokens=16 if self.max_tokens is None else self.max_tokens,
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=max(self.top_k or 0, 0),
            top_p=self.top_p or 1.0,
            seed=None if self.seed is None else self.seed + number,
            score_prompt=bool(self.echo and self.logprobs is not None),
            top_logprobs=self.logprobs or 0,
        )


@router.get("/models")
async def models(request: Request) -> dict[str, Any]:
    """Lists the one model."""
    service: Service = request.app.state.service
    entry = {"id": service.name, "object": "model", "created": 0, "owned_by": "pretrain_kaiyuan2b"}
    return {"object": "list", "data": [entry]}


@router.post("/completions")
async def completions(body: CompletionRequest, request: Request) -> Response:
    """Continues each prompt n times."""
    service: Service = request.app.state.service
    if body.model not in (None, service.name):
        raise RequestError(f"there is no model {body.model!r}; this is {service.name!r}", 404)
    jobs, echoes = [], []
    for prompt in body.prompts():
        tokens = service.encode(prompt) if isinstance(prompt, str) else prompt
        text = prompt if isinstance(prompt, str) else service.decode(prompt)
        for _ in range(body.n or 1):
            jobs.append(service.job(tokens, body.sampling(len(jobs))))
            echoes.append(text if body.echo else "")
    envelope = {
        "id": f"cmpl-{uuid.uuid4().hex}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.name,
    }
    if body.stream:
        service.engine.submit(jobs)
        events = stream(service, body, request, jobs, echoes, envelope)
        return StreamingResponse(events, media_type="text/event-stream")
    results = await service.complete(jobs, body.stops(), request)
    choices = [
        choice(service, body, number, echo, result)
        for number, (echo, result) in enumerate(zip(echoes, results, strict=True))
    ]
    generated = sum(len(result.tokens) for result in results)
    return JSONResponse(envelope | {"choices": choices, "usage": usage(body, jobs, generated)})


async def stream(
    service: Service,
    body: CompletionRequest,
    request: Request,
    jobs: list[Job],
    echoes: list[str],
    envelope: dict[str, Any],
) -> AsyncIterator[str]:
    """Yields server-sent events: choice after choice, piece by piece."""
    generated = 0
    try:
        for number, (job, echo) in enumerate(zip(jobs, echoes, strict=True)):
            async for piece in service.pieces(job, body.stops(), request):
                generated += piece.token is not None
                part = choice(service, body, number, echo, Completion([piece]))
                echo = ""
                yield event(envelope | {"choices": [part]})
    except RequestError as error:  # too late for a status
        yield event({"error": {"message": str(error), "code": error.status}})
        return
    finally:  # also when the client has left
        for job in jobs:
            job.cancelled = True
    if body.stream_options and body.stream_options.include_usage:
        yield event(envelope | {"choices": [], "usage": usage(body, jobs, generated)})
    yield "data: [DONE]\n\n"


def event(content: dict[str, Any]) -> str:
    """Returns a server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n"


def choice(
    service: Service, body: CompletionRequest, number: int, echo: str, completion: Completion
) -> dict[str, Any]:
    """Returns a choice, or the part of it that a stream's piece is."""
    scored = completion.prompt + completion.tokens
    return {
        "index": number,
        "text": echo + completion.text,
        "logprobs": None if body.logprobs is None else logprobs(service, scored),
        "finish_reason": completion.finish_reason,
    }


def logprobs(service: Service, tokens: list[Scored]) -> dict[str, list]:
    """Returns OpenAI's four lists, one entry a token."""
    texts = [service.decode([scored.token]) for scored in tokens]
    return {
        "tokens": texts,
        "token_logprobs": [scored.logprob for scored in tokens],
        "top_logprobs": [
            {service.decode([token]): logprob for token, logprob in scored.top.items()} or None
            for scored in tokens
        ],
        "text_offset": [len("".join(texts[:number])) for number in range(len(texts))],
    }


def usage(body: CompletionRequest, jobs: list[Job], generated: int) -> dict[str, int]:
    """Counts tokens; a prompt with n completions counts once."""
    prompts = sum(len(job.prompt) for job in jobs[:: body.n or 1])
    return {
        "prompt_tokens": prompts,
        "completion_tokens": generated,
        "total_tokens": prompts + generated,
    }
