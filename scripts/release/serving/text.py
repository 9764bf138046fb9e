"""Turns tokens into text as they come, and ends it at a stop string."""

from tokenizers.decoders import DecodeStream
from transformers import PreTrainedTokenizerFast


class TextStream:
    """The text of a token stream, piece by piece.

    Bytes of an unfinished character are held back, and so is what may become a stop string.

    Args:
        tokenizer: of the model.
        stop: strings that end the text; they are not part of it.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast, stop: list[str] | None = None) -> None:
        self.stopped = False
        self._tokenizer = tokenizer.backend_tokenizer
        self._decoder = DecodeStream(skip_special_tokens=True)
        self._stop = stop or []
        self._held = ""

    def push(self, token: int) -> str:
        """Takes a token and returns the text that is certain now; "" after a stop string."""
        if self.stopped:
            return ""
        self._held += self._decoder.step(self._tokenizer, token) or ""
        found = [self._held.find(stop) for stop in self._stop if stop in self._held]
        if found:
            self.stopped = True
            text, self._held = self._held[: min(found)], ""
            return text
        return self._release(len(self._held) - self._length_of_possible_stop())

    def finish(self) -> str:
        """Returns what was held back, when no token follows."""
        return self._release(len(self._held))

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

    def _length_of_possible_stop(self) -> int:
        """Counts the last characters that may be the beginning of a stop string."""
        return max(
            (
                length
                for stop in self._stop
                for length in range(1, min(len(stop), len(self._held) + 1))
                if self._held.endswith(stop[:length])
            ),
            default=0,
        )
