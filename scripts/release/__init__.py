"""From a checkpoint to a model: average, export, verify, import, generate, serve."""
