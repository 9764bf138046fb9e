"""Generates for many requests at a time: a thread that runs transformers' `generate` on batches.

Requests that wait are put into one batch, each with its own way of sampling and its own end. Those
that come while a batch runs form the next one. What happens to a request is told to it as events.
"""

import asyncio
import logging
import queue
import threading
import time
from dataclasses import dataclass, field

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteria,
    StoppingCriteriaList,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

logger = logging.getLogger(__name__)

GATHER_SECONDS = 0.01  # how long a batch waits for more requests


@dataclass(frozen=True)
class Sampling:
    """How a request is continued.

    Attributes:
        max_new_tokens: 0 only scores the prompt.
        temperature: 0 always takes the most likely token.
        top_k: sample from that many likeliest tokens; 0: from all.
        top_p: sample from the likeliest tokens of that total probability.
        seed: makes the request repeatable; None draws one.
        score_prompt: whether log-probabilities of the prompt's tokens are wanted.
        top_logprobs: how many likeliest tokens are wanted at each position.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    score_prompt: bool = False
    top_logprobs: int = 0


@dataclass(frozen=True)
class Scored:
    """A token, its log-probability (None for the first of a prompt) and the likeliest tokens'."""

    token: int
    logprob: float | None
    top: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Prompt:
    """Event: the prompt's tokens, scored."""

    tokens: list[Scored]


@dataclass(frozen=True)
class Finished:
    """Event: the last one. `reason` is stop (the document ended), length, or error."""

    reason: str


Event = Scored | Prompt | Finished


class OverloadedError(RuntimeError):
    """Too many requests wait."""


class Job:
    """A prompt to continue, to be made in the event loop that awaits its events."""

    def __init__(self, prompt: list[int], sampling: Sampling) -> None:
        self.prompt = prompt
        self.sampling = sampling
        self.cancelled = False
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    def tell(self, event: Event) -> None:
        """Hands an event over from the engine's thread."""
        self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class Engine:
    """Runs batches of jobs, one after the other, in a thread.

    Args:
        model: an exported model.
        max_batch_size: prompts at a time.
        max_waiting: prompts that may wait for a batch.
    """

    def __init__(self, model: PreTrainedModel, max_batch_size: int, max_waiting: int) -> None:
        self.model = model
        self.max_batch_size = max_batch_size
        self.max_waiting = max_waiting
        self.largest_batch = 0
        self._waiting: queue.Queue[Job | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Finishes what was submitted, then ends the thread."""
        self._waiting.put(None)
        self._thread.join()

    def submit(self, jobs: list[Job]) -> None:
        """Queues jobs.

        Raises:
            OverloadedError: they are more than may wait; none is queued.
        """
        if self._waiting.qsize() + len(jobs) > self.max_waiting:
            raise OverloadedError(f"{self._waiting.qsize()} prompts are waiting already")
        for job in jobs:
            self._waiting.put(job)

    def _run(self) -> None:
        while (job := self._waiting.get()) is not None:
            batch, ended = self._gather(job)
            self.largest_batch = max(self.largest_batch, len(batch))
            try:
                self._generate(batch)
            except Exception:  # out of memory, mostly: it must not end the server
                logger.exception("a batch of %d prompts failed", len(batch))
                for job in batch:
                    job.tell(Finished("error"))
            if ended:
                return

    def _gather(self, job: Job) -> tuple[list[Job], bool]:
        batch, deadline = [job], time.monotonic() + GATHER_SECONDS
        while len(batch) < self.max_batch_size:
            try:
                job = self._waiting.get(timeout=max(0, deadline - time.monotonic()))
            except queue.Empty:
                break
            if job is None:
                return batch, True
            batch.append(job)
        return batch, False

    @torch.inference_mode()
    def _generate(self, jobs: list[Job]) -> None:
        jobs = [job for job in jobs if not job.cancelled]
        for job in jobs:
            if job.sampling.score_prompt:
                job.tell(Prompt(self._score(job)))
            if job.sampling.max_new_tokens == 0:
                job.tell(Finished("length"))
        jobs = [job for job in jobs if job.sampling.max_new_tokens > 0]
        if not jobs:
            return
        tokens, mask = self._padded([job.prompt for job in jobs])
        rows = [Row(job, self.model.device) for job in jobs]
        self.model.generate(
            tokens,
            attention_mask=mask,
            do_sample=False,  # Choose has chosen already
            max_new_tokens=max(job.sampling.max_new_tokens for job in jobs),
            logits_processor=LogitsProcessorList([Choose(rows)]),
            stopping_criteria=StoppingCriteriaList([End(rows, self.model.config.eos_token_id)]),
        )

    def _padded(self, prompts: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Aligns prompts at their ends: tokens and mask, int64 [prompts, longest]."""
        longest = max(map(len, prompts))
        pad = self.model.config.pad_token_id
        tokens = [[pad] * (longest - len(prompt)) + prompt for prompt in prompts]
        mask = [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        device = self.model.device
        return torch.tensor(tokens, device=device), torch.tensor(mask, device=device)

    def _score(self, job: Job) -> list[Scored]:
        tokens = torch.tensor([job.prompt], device=self.model.device)
        logprobs = self.model(tokens).logits[0].float().log_softmax(-1)
        scored = [
            score(logprobs[position], token, job.sampling.top_logprobs)
            for position, token in enumerate(job.prompt[1:])
        ]
        return [Scored(job.prompt[0], None), *scored]


class Row:
    """A job in a running batch."""

    def __init__(self, job: Job, device: torch.device) -> None:
        self.job = job
        self.generated = 0
        self.ended = False
        self._random = torch.Generator(device)
        if job.sampling.seed is None:
            self._random.seed()
        else:
            self._random.manual_seed(job.sampling.seed)

    def choose(self, logits: torch.Tensor) -> int:
        """Chooses the next token from logits, fp32 [vocabulary]."""
        sampling = self.job.sampling
        if sampling.temperature == 0:
            return int(logits.argmax())
        logits = logits[None] / sampling.temperature
        if sampling.top_k:
            logits = TopKLogitsWarper(sampling.top_k)(None, logits)
        if sampling.top_p < 1:
            logits = TopPLogitsWarper(sampling.top_p)(None, logits)
        return int(torch.multinomial(logits[0].softmax(-1), 1, generator=self._random))


class Choose(LogitsProcessor):
    """Chooses the next token of each row as its request wants it, and leaves no other choice."""

    def __init__(self, rows: list[Row]) -> None:
        self.rows = rows

    def __call__(self, tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """Returns logits with a single finite one in each row: [rows, vocabulary]."""
        logits = logits.float()
        forced = torch.full_like(logits, -torch.inf)
        for number, row in enumerate(self.rows):
            if row.ended:
                forced[number, 0] = 0
                continue
            token = row.choose(logits[number])
            forced[number, token] = 0
            row.generated += 1
            logprobs = logits[number].log_softmax(-1)
            row.job.tell(score(logprobs, token, row.job.sampling.top_logprobs))
        return forced


class End(StoppingCriteria):
    """Ends each row at its end of document, at its own length, or when nobody waits for it."""

    def __init__(self, rows: list[Row], end_of_document: int) -> None:
        self.rows = rows
        self.end_of_document = end_of_document

    def __call__(self, tokens: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """Returns which rows have ended: bool [rows]."""
        last = tokens[:, -1].tolist()
        for row, token in zip(self.rows, last, strict=True):
            if row.ended:
                continue
            if token == self.end_of_document:
                self._end(row, "stop")
            elif row.job.cancelled or row.generated >= row.job.sampling.max_new_tokens:
                self._end(row, "length")
        return torch.tensor([row.ended for row in self.rows], device=tokens.device)

    def _end(self, row: Row, reason: str) -> None:
        row.ended = True
        row.job.tell(Finished(reason))


def score(logprobs: torch.Tensor, token: int, top: int) -> Scored:
    """Scores a token by log-probabilities, fp32 [vocabulary]; `top` likeliest ones beside it."""
    likeliest = logprobs.topk(top) if top else None
    alternatives = (
        dict(zip(likeliest.indices.tolist(), likeliest.values.tolist(), strict=True))
        if likeliest
        else {}
    )
    return Scored(token, logprobs[token].item(), alternatives)
