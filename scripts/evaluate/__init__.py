"""How good a model is: held-out loss and benchmarks."""
