"""`PUT /api`, as Megatron's text generation server has it.

    curl 'http://localhost:5000/api' -X 'PUT' -H 'Content-Type: application/json; charset=UTF-8' \\
        -d '{"prompts":["Hello world"], "tokens_to_generate":1}'

In: `prompts` and how to continue them. Out: `text` (prompts with their continuations), `tokens`,
`segments` (the text of each token) and, if asked for, `logprobs` (of all tokens but the first). An
error is a JSON string. Arguments that Megatron's server accepts without using them (top_p_decay,
top_p_bound, length_penalty, prevent_newline_after_colon, stop_token) are refused here.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field, model_validator

from scripts.release.serving.engine import Sampling
from scripts.release.serving.service import MAX_PROMPTS, Completion, Service
from scripts.release.serving.text import TextStream

router = APIRouter()

REMOVED = {  # of earlier versions of Megatron's server
    "max_len": "max_len is not used any more: give tokens_to_generate",
    "sentences": "sentences is not used any more: give prompts",
    "beam_width": "beam search is not supported",
}


class Generate(BaseModel):
    """The body of a request."""

    model_config = ConfigDict(strict=True, extra="forbid")

    prompts: Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS)]
    tokens_to_generate: Annotated[int, Field(ge=0)] = 64
    temperature: Annotated[float, Field(gt=0, le=100)] = 1.0
    top_k: Annotated[int, Field(ge=0, le=1000)] = 0
    top_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    logprobs: bool = False
    random_seed: Annotated[int, Field(ge=0)] | None = None
    add_BOS: bool = False  # noqa: N815  Megatron's name
    stop_on_eol: bool = False
    stop_on_double_eol: bool = False

    @model_validator(mode="before")
    @classmethod
    def refuse_removed(cls, body: Any) -> Any:
        """Says what has taken the place of an argument."""
        for name in REMOVED.keys() & (body.keys() if isinstance(body, dict) else {}):
            raise ValueError(REMOVED[name])
        return body

    @model_validator(mode="after")
    def agree(self) -> "Generate":
        """Refuses combinations that mean nothing."""
        if self.tokens_to_generate == 0 and not self.logprobs:
            raise ValueError("tokens_to_generate=0 needs logprobs=true: nothing would be returned")
        if self.top_k and self.top_p:
            raise ValueError("top_k and top_p cannot both be set")
        if not self.add_BOS and not all(self.prompts):
            raise ValueError("an empty prompt needs add_BOS=true")
        return self

    def sampling(self, number: int) -> Sampling:
        """Returns how the prompt of that number is continued."""
        return Sampling(
            max_new_tokens=self.tokens_to_generate,
            temperature=0 if self.top_k == 1 else self.temperature,
            top_k=self.top_k,
            top_p=self.top_p or 1.0,
            seed=None if self.random_seed is None else self.random_seed + number,
            score_prompt=self.logprobs,
        )

    def stop(self) -> list[str]:
        """Returns the strings that end a continuation."""
        return ["\n"] * self.stop_on_eol + ["\n\n"] * self.stop_on_double_eol


@router.put("/api")
async def generate(body: Generate, request: Request) -> dict[str, Any]:
    """Continues each prompt."""
    service: Service = request.app.state.service
    start = [service.end_of_document] if body.add_BOS else []
    jobs = [
        service.job(start + service.encode(prompt), body.sampling(number))
        for number, prompt in enumerate(body.prompts)
    ]
    completions = await service.complete(jobs, body.stop(), request)
    tokens = [
        job.prompt + [scored.token for scored in completion.tokens]
        for job, completion in zip(jobs, completions, strict=True)
    ]
    response: dict[str, Any] = {
        "text": [
            prompt + completion.text
            for prompt, completion in zip(body.prompts, completions, strict=True)
        ],
        "tokens": tokens,
        "segments": [segments(service, ids) for ids in tokens],
    }
    if body.logprobs:
        response["logprobs"] = [logprobs(completion) for completion in completions]
    return response


def segments(service: Service, tokens: list[int]) -> list[str]:
    """Returns the text of each token; a character of several tokens belongs to the last."""
    text = TextStream(service.tokenizer)
    return [text.push(token) for token in tokens]


def logprobs(completion: Completion) -> list[float]:
    """Returns the log-probabilities of all tokens but the first."""
    return [scored.logprob for scored in completion.prompt[1:] + completion.tokens]
