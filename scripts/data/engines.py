"""Tokenizer engines: one small interface, the reference and a fast one.

`tokenizers` is the reference: what it says is right. `fastokens` gives the same ids about fifty
times faster; `scripts.data.exactness` checks that it does. Both release the interpreter's lock
while they encode, and both are told to leave threads to us, so that the threads of the caller
scale and nothing ever forks.
"""

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Protocol

import numpy as np

from scripts.common.files import sha256
from scripts.data.megatron_format import token_dtype

# Read when the libraries are loaded, which is why the engines import them late.
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["FASTOKENS_BPE_THREADS"] = "1"


class EngineError(RuntimeError):
    """A fast engine that cannot be used, or that failed."""


class Engine(Protocol):
    """Turns text into token ids, without special tokens of its own."""

    name: str
    version: str

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids, uint32 (tokens,), and the offset at which each text ends, int64 (texts,)."""


class TokenizersEngine:
    """The reference: Hugging Face's tokenizers."""

    name = "tokenizers"

    def __init__(self, file: Path, special_tokens_as_text: bool) -> None:
        from tokenizers import Tokenizer

        self.version = version(self.name)
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises no narrower type
            raise ValueError(f"{file} is not a tokenizer: {error}") from error
        self.tokenizer.encode_special_tokens = special_tokens_as_text
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and ends, see `Engine`."""
        encodings = self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        documents = [np.array(encoding.ids, np.uint32) for encoding in encodings]
        ends = np.cumsum([len(document) for document in documents], dtype=np.int64)
        return np.concatenate([np.empty(0, np.uint32), *documents]), ends


class FastokensEngine:
    """Fastokens, through its flat batch call: no Python object per token."""

    name = "fastokens"

    def __init__(self, file: Path, special_tokens_as_text: bool) -> None:
        self.special_tokens_as_text = special_tokens_as_text
        try:
            import fastokens

            self.version = version(self.name)
            self.tokenizer = fastokens.Tokenizer.from_file(str(file))
            self.tokenizer.no_truncation()
        except Exception as error:  # no wheel for this machine, or a tokenizer it does not support
            raise EngineError(f"fastokens cannot load {file}: {error}") from error

    def encode(self, texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
        """Returns ids and ends, see `Engine`."""
        try:
            ids, offsets = self.tokenizer.encode_batch_flat(
                texts, add_special_tokens=False, split_special_tokens=self.special_tokens_as_text
            )
        except BaseException as error:  # a panic of Rust code is no Exception
            raise EngineError(f"fastokens failed: {error}") from error
        return np.frombuffer(ids, "<u4"), np.frombuffer(offsets, "<u8")[1:].astype(np.int64)


class TokenizerFolder:
    """A tokenizer on the disk: its engines and its vocabulary."""

    def __init__(self, folder: Path, special_tokens_as_text: bool = True) -> None:
        self.file = Path(folder) / "tokenizer.json"
        if not self.file.is_file():
            raise ValueError(
                f"{self.file} is missing; give the folder that holds the tokenizer's four files"
            )
        self.special_tokens_as_text = special_tokens_as_text

    def load(self) -> None:
        """Loads both engines at once: each takes up to a second, and they need no lock."""
        with ThreadPoolExecutor(1) as pool:
            fast = pool.submit(lambda: self.fast)
            self.reference  # noqa: B018
            fast.exception()  # raised again, and handled, where the engine is chosen
        # Both parse 11 MB of JSON; glibc would keep over 100 MB that they have freed.
        with suppress(AttributeError):
            ctypes.CDLL(None).malloc_trim(0)

    @cached_property
    def sha256(self) -> str:
        """The digest of the definition."""
        return sha256(self.file)

    @cached_property
    def reference(self) -> TokenizersEngine:
        """The reference engine."""
        return TokenizersEngine(self.file, self.special_tokens_as_text)

    @cached_property
    def fast(self) -> FastokensEngine:
        """The fast engine; raises EngineError where it cannot be used."""
        return FastokensEngine(self.file, self.special_tokens_as_text)

    @cached_property
    def vocabulary_size(self) -> int:
        """The largest id, added tokens included, plus one."""
        return max(self.reference.tokenizer.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def dtype(self) -> np.dtype:
        """The dtype of the stored ids."""
        size = self.reference.tokenizer.get_vocab_size(with_added_tokens=True)
        if token_dtype(size).itemsize < 4:  # make sure: there may be gaps between the ids
            size = self.vocabulary_size
        return token_dtype(size)

    @cached_property
    def special_tokens(self) -> list[str]:
        """The texts of the special tokens."""
        added = self.reference.tokenizer.get_added_tokens_decoder().values()
        return [token.content for token in added if token.special]

    def token_id(self, token: str) -> int:
        """Returns the id of a token that is given by its text or, in digits, by its id."""
        if token.isdecimal():
            if self.reference.tokenizer.id_to_token(int(token)) is None:
                raise ValueError(f"{self.file} has no id {token}")
            return int(token)
        found = self.reference.tokenizer.token_to_id(token)
        if found is None:
            raise ValueError(
                f"{token!r} is no token of {self.file}; its special tokens are "
                f"{' '.join(self.special_tokens)}"
            )
        return found
