"""What both protocols need: the model with its limits, and the way from a prompt to its text."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

from fastapi import Request
from transformers import PreTrainedTokenizerFast

from scripts.release.serving.engine import Engine, Event, Job, Prompt, Sampling, Scored
from scripts.release.serving.text import TextStream

MAX_PROMPTS = 128  # of one request
DISCONNECT_SECONDS = 0.5  # how often a waiting request looks whether its client is still there


class RequestError(Exception):
    """A request that cannot be served: HTTP status, message and, perhaps, the argument's name."""

    def __init__(self, message: str, status: int = 400, argument: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.argument = argument


@dataclass(frozen=True)
class Piece:
    """What is new of a completion.

    Attributes:
        text: that became certain.
        token: that was generated.
        prompt: the scored prompt, which comes first if it was asked for.
        finish_reason: stop or length, with the last piece.
    """

    text: str = ""
    token: Scored | None = None
    prompt: list[Scored] | None = None
    finish_reason: str | None = None


@dataclass(frozen=True)
class Completion:
    """All pieces of what followed a prompt."""

    pieces: list[Piece]

    @property
    def text(self) -> str:
        """The generated text."""
        return "".join(piece.text for piece in self.pieces)

    @property
    def tokens(self) -> list[Scored]:
        """The generated tokens."""
        return [piece.token for piece in self.pieces if piece.token]

    @property
    def prompt(self) -> list[Scored]:
        """The scored prompt, if it was asked for."""
        return next((piece.prompt for piece in self.pieces if piece.prompt), [])

    @property
    def finish_reason(self) -> str | None:
        """stop or length."""
        return self.pieces[-1].finish_reason


@dataclass(frozen=True)
class Service:
    """A model that is served.

    Attributes:
        name: by which clients know it.
        engine: generates.
        tokenizer: of the model.
        context: tokens that prompt and continuation may have together.
        end_of_document: the token that ends a document.
    """

    name: str
    engine: Engine
    tokenizer: PreTrainedTokenizerFast
    context: int
    end_of_document: int

    def encode(self, text: str) -> list[int]:
        """Tokenizes a prompt."""
        return self.tokenizer.encode(text, add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        """Returns the text of tokens, special ones included."""
        return self.tokenizer.decode(tokens)

    def job(self, prompt: list[int], sampling: Sampling) -> Job:
        """Makes a job of a prompt, if the model can take it."""
        if not prompt:
            raise RequestError("the prompt is empty")
        vocabulary = self.engine.model.config.vocab_size
        if not all(0 <= token < vocabulary for token in prompt):
            raise RequestError(f"the prompt holds tokens outside 0 … {vocabulary - 1}")
        if len(prompt) + sampling.max_new_tokens > self.context:
            raise RequestError(
                f"{len(prompt)} tokens of prompt and {sampling.max_new_tokens} to generate are "
                f"more than the model's context of {self.context}"
            )
        return Job(prompt, sampling)

    async def pieces(self, job: Job, stop: list[str], request: Request) -> AsyncIterator[Piece]:
        """Yields what becomes of a submitted job, up to one of the stop strings.

        The job is cancelled when its text has ended, and when the client has left.
        """
        text = TextStream(self.tokenizer, stop)
        try:
            while not text.stopped:
                event = await next_event(job, request)
                if isinstance(event, Prompt):
                    yield Piece(prompt=event.tokens)
                elif isinstance(event, Scored):
                    yield Piece(text.push(event.token), event)
                elif event.reason == "error":
                    raise RequestError("the model failed; its log says why", 500)
                else:
                    yield Piece(text.finish(), finish_reason=event.reason)
                    return
            yield Piece(finish_reason="stop")
        finally:
            job.cancelled = True

    async def complete(
        self, jobs: list[Job], stop: list[str], request: Request
    ) -> list[Completion]:
        """Runs jobs to their ends."""

        async def run(job: Job) -> Completion:
            return Completion([piece async for piece in self.pieces(job, stop, request)])

        self.engine.submit(jobs)
        return await asyncio.gather(*map(run, jobs))


async def next_event(job: Job, request: Request) -> Event:
    """Waits for a job's next event, as long as the client waits, too."""
    while True:
        try:
            return await asyncio.wait_for(job.events.get(), DISCONNECT_SECONDS)
        except TimeoutError:
            if await request.is_disconnected():
                raise RequestError("the client has left", 499) from None
