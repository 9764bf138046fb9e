"""The model is that of the release tests."""

from tests.release.conftest import (  # noqa: F401
    architecture,
    checkpoint,
    exported,
    make_checkpoint,
    model_file,
    process_group,
    run_export,
    tokenizer_folder,
)
