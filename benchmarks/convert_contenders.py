"""What benchmarks/convert.py measures: each contender converts the same files in its own process.

    python -m benchmarks.convert_contenders NAME JOB.json

JOB.json: files, tokenizer (folder), output (folder), workers, megatron (checkout or null). A
contender writes one .bin/.idx pair per file; their sorted names are in the order of the files.
"""

import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from scripts.common.files import sha256

END_OF_DOCUMENT = "<|endoftext|>"


def megatron(job: dict) -> None:
    """Megatron's own way: Parquet to JSONL, then tools/preprocess_data.py for each file."""
    for path in job["files"]:
        lines = Path(job["output"], f"{path.stem}.jsonl")
        with lines.open("w", encoding="utf-8") as file:
            for batch in pq.ParquetFile(path).iter_batches(1000, columns=["text"]):
                for text in batch["text"].to_pylist():
                    file.write(json.dumps({"text": text}, ensure_ascii=False) + "\n")
        subprocess.run(
            [
                *(sys.executable, f"{job['megatron']}/tools/preprocess_data.py"),
                *("--input", lines, "--output-prefix", Path(job["output"], path.stem)),
                *("--tokenizer-type", "HuggingFaceTokenizer", "--append-eod"),
                *("--tokenizer-model", job["tokenizer"], "--workers", str(job["workers"])),
            ],
            env={**os.environ, "PYTHONPATH": str(job["megatron"])},
            check=True,
        )
        lines.unlink()


def datatrove(job: dict) -> None:
    """Datatrove's reader and Megatron writer, one task a file."""
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import ParquetReader
    from datatrove.pipeline.tokens.megatron_tokenizer import MegatronDocumentTokenizer

    LocalPipelineExecutor(
        pipeline=[
            ParquetReader(str(job["files"][0].parent), glob_pattern="*.parquet"),
            MegatronDocumentTokenizer(
                output_folder=str(job["output"]),
                tokenizer_name_or_path=f"{job['tokenizer']}/tokenizer.json",
                eos_token=END_OF_DOCUMENT,
                batch_size=1000,
            ),
        ],
        tasks=len(job["files"]),
        workers=job["workers"],
        logging_dir=str(Path(job["output"], "logs")),
    ).run()


def datasets(job: dict) -> None:
    """datasets.map over batches with transformers' tokenizer, then numpy."""
    from datasets import disable_caching, load_dataset
    from transformers import AutoTokenizer

    from scripts.data.megatron_format import index_bytes

    disable_caching()
    tokenizer = AutoTokenizer.from_pretrained(job["tokenizer"])
    end = tokenizer.convert_tokens_to_ids(END_OF_DOCUMENT)

    def tokenize(batch: dict) -> dict:
        ids = tokenizer(batch["text"], add_special_tokens=False).input_ids
        return {"ids": [[*document, end] for document in ids]}

    for path in job["files"]:
        rows = load_dataset(
            "parquet", data_files=str(path), split="train", cache_dir=str(job["output"] / "cache")
        )
        rows = rows.map(
            tokenize, batched=True, num_proc=job["workers"], remove_columns=rows.column_names
        )
        lengths = []
        with Path(job["output"], f"{path.stem}.bin").open("wb") as file:
            for batch in rows.with_format("arrow").iter(1000):
                ids = batch["ids"].combine_chunks()
                lengths.append(np.diff(ids.offsets))
                file.write(ids.flatten().to_numpy().astype(np.int32).data)
        index = index_bytes(np.concatenate(lengths), np.dtype(np.int32))
        Path(job["output"], f"{path.stem}.idx").write_bytes(index)


def ours(job: dict, engine: str = "auto") -> None:
    """This project's converter: all files in one job."""
    from scripts.data.convert_phase_to_megatron import main

    main(
        [
            *("--input", *map(str, job["files"]), "--output-dir", str(job["output"])),
            *("--output-prefix-prefix", "phase1", "--tokenizer-model", str(job["tokenizer"])),
            *("--workers-per-shard", str(job["workers"]), "--tokenizer-engine", engine),
            *("--end-of-document", END_OF_DOCUMENT, "--special-tokens-in-text", "as_special"),
        ]
    )


def ours_reference(job: dict) -> None:
    """This project's converter with the reference engine."""
    ours(job, "tokenizers")


def ours_each(job: dict) -> None:
    """This project's converter: a process for each file, `workers` of them at a time."""
    waiting = list(job["files"])
    running: list[subprocess.Popen] = []
    while waiting or running:
        while waiting and len(running) < job["workers"]:
            alone = {**job, "files": [waiting.pop(0)], "workers": 1}
            running.append(
                subprocess.Popen([sys.executable, "-m", __spec__.name, "ours", _write(alone)])
            )
        if running.pop(0).wait():
            sys.exit("a conversion failed")


def share(job: dict) -> None:
    """This project's converter: prints the CPU seconds of its start, its engine and all as JSON."""
    from scripts.data import convert_phase_to_megatron
    from scripts.data.engines import FastokensEngine

    begun, spent = [], []
    start, encode = convert_phase_to_megatron.tokenization, FastokensEngine.encode

    def timed_start(*arguments: object) -> object:
        how = start(*arguments)
        begun.append(time.process_time())
        spent.clear()
        return how

    def timed_encode(*arguments: object) -> object:
        started = time.thread_time()
        result = encode(*arguments)
        spent.append(time.thread_time() - started)
        return result

    convert_phase_to_megatron.tokenization = timed_start
    FastokensEngine.encode = timed_encode
    ours(job)
    print(json.dumps({"start": begun[0], "engine": sum(spent), "all": time.process_time()}))


def floor(job: dict) -> None:
    """The parts alone, on one thread: prints their CPU seconds as JSON."""
    import pyarrow as pa

    from scripts.data.conversion import occurrences
    from scripts.data.engines import TokenizerFolder
    from scripts.data.exactness import audit
    from scripts.data.parquet_text import ParquetTexts

    pa.set_memory_pool(pa.system_memory_pool())
    tokenizer = TokenizerFolder(job["tokenizer"], special_tokens_as_text=False)
    tokenizer.load()
    end = tokenizer.token_id(END_OF_DOCUMENT)
    spent, size, digest = Counter(), 0, hashlib.sha256()

    def part(name: str, function: Callable, *arguments: object) -> Any:
        started = time.thread_time()
        result = function(*arguments)
        spent[name] += time.thread_time() - started
        return result

    for path in job["files"]:
        part("digest of Parquet", sha256, path)
        source = ParquetTexts(path, "text")
        batches = source.batches(1000)
        with Path(job["output"], f"{path.stem}.bin").open("wb") as file:
            while batch := part("decode", next, batches, None):
                documents = part("strings for Python", source.documents, *batch)
                ids, ends = part("engine", tokenizer.fast.encode, documents.texts)
                part(
                    *("audit by the reference", audit, tokenizer.fast, tokenizer.reference),
                    *(documents, ids, ends, str(path)),
                )
                ids = part("ends of documents", np.insert, ids, ends, end)
                part("special tokens", occurrences, tokenizer.special_tokens, documents.texts)
                part("write", file.write, ids.data)
                part("digest of .bin", digest.update, ids.data)
                size += batch[1].nbytes
    print(json.dumps({"seconds": spent, "bytes": size}))


CONTENDERS = {
    function.__name__: function
    for function in (megatron, datatrove, datasets, ours, ours_each, ours_reference, share, floor)
}


def _write(job: dict) -> Path:
    path = Path(job["output"], f"job-{os.getpid()}-{job['files'][0].stem}.json")
    path.write_text(json.dumps(job, default=str))
    return path


def main() -> None:
    """Runs one contender."""
    job = json.loads(Path(sys.argv[2]).read_text())
    job["files"] = [Path(file) for file in job["files"]]
    job["output"] = Path(job["output"])
    CONTENDERS[sys.argv[1]](job)


if __name__ == "__main__":
    main()
