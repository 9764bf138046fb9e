"""Serves an exported model over HTTP, for tests and for trying it out.

    python scripts/release/serve.py --export artifacts/hf/kaiyuan2b
    curl 'http://localhost:5000/api' -X 'PUT' -H 'Content-Type: application/json; charset=UTF-8' \\
        -d '{"prompts":["Hello world"], "tokens_to_generate":1}'

`PUT /api` is Megatron's text generation server's, `POST /v1/completions` and `GET /v1/models` are
OpenAI's, `/` is a page to try prompts by hand. Requests that come together are batched. SIGTERM
and Ctrl-C let running requests finish. It listens on this machine only unless --host says so, and
knows no users. For production serve the same folder with vLLM or SGLang (docs/release.md).
"""

import sys
from pathlib import Path

import uvicorn
from transformers import AutoTokenizer

from scripts.release.arguments import EXPORT, parser_of
from scripts.release.checkpoint import CheckpointError
from scripts.release.export import read_export
from scripts.release.hf_model import load_model
from scripts.release.serving.app import create_app
from scripts.release.serving.engine import Engine
from scripts.release.serving.service import Service

SECONDS_TO_FINISH = 60  # what running requests have when the server is stopped


def load_service(export: Path, name: str, max_batch_size: int, max_waiting: int) -> Service:
    """Loads an exported model.

    Raises:
        CheckpointError: the folder is no export.
    """
    provenance = read_export(export)
    model = load_model(export)
    return Service(
        name,
        Engine(model, max_batch_size, max_waiting),
        AutoTokenizer.from_pretrained(export),
        model.config.max_position_embeddings,
        provenance["end_of_document_id"],
    )


def main(argv: list[str] | None = None) -> None:
    """Command line."""
    parser = parser_of(__doc__)
    parser.add_argument("--export", type=Path, required=True, help=EXPORT)
    parser.add_argument("--name", help="the model's name (default: the folder's)")
    parser.add_argument("--host", default="127.0.0.1", help="default: %(default)s")
    parser.add_argument("--port", type=int, default=5000, help="default: %(default)s")
    parser.add_argument("--max-batch-size", type=int, default=32, help="default: %(default)s")
    parser.add_argument("--max-waiting", type=int, default=256, help="default: %(default)s")
    arguments = parser.parse_args(argv)
    name = arguments.name or arguments.export.resolve().name
    try:
        service = load_service(
            arguments.export, name, arguments.max_batch_size, arguments.max_waiting
        )
    except CheckpointError as error:
        sys.exit(f"serve: {error}")
    uvicorn.run(
        create_app(service),
        host=arguments.host,
        port=arguments.port,
        timeout_graceful_shutdown=SECONDS_TO_FINISH,
    )


if __name__ == "__main__":
    main()
