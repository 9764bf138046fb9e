# Everything runs in .venv, made from the pinned envs/requirements.txt.
#   make smoke   the whole workflow on a tiny model, without a GPU
#   make test    the test suite;  make lint  its style checks
#   make test-slurm   jobs of a real Slurm on this machine; needs root and slurm-wlm, munge (Debian)
#   make docs    the parts of the documentation that are made from the program
PYTHON ?= python3.12
VENV := .venv
BIN := $(VENV)/bin

.PHONY: smoke test test-slurm lint format docs requirements clean

smoke: $(VENV)/installed
	$(BIN)/snakemake --profile profiles/smoke
	$(BIN)/snakemake --profile profiles/smoke --report smoke/report.html \
	  --report-stylesheet docs/report/style.css
	@$(BIN)/python -m scripts.report.summary --artifacts smoke/artifacts \
	  --converted smoke/data/converted --train-name smoke --report smoke/report.html

test: $(VENV)/installed
	$(BIN)/pytest $(PYTEST_ARGS)

# The plugin lies apart, so that it is there for this alone.
test-slurm: $(VENV)/installed
	$(BIN)/pip install --quiet --upgrade --no-deps --target $(VENV)/slurm \
	  snakemake-executor-plugin-slurm==2.8.0 snakemake-executor-plugin-slurm-jobstep==0.6.1
	PYTHONPATH=$(CURDIR)/$(VENV)/slurm $(BIN)/pytest -m slurm tests/cluster $(PYTEST_ARGS)

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/snakefmt --check Snakefile rules
	$(BIN)/snakemake --lint
	$(BIN)/snakemake --lint --profile profiles/smoke
	$(BIN)/snakemake --lint --config "recipe={source: hub, tokenizer: hub}"

format: $(VENV)/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/snakefmt Snakefile rules

docs: $(VENV)/installed
	empty=$$(mktemp -d) && \
	  $(BIN)/snakemake --directory $$empty --profile profiles/smoke --rulegraph mermaid-js \
	  | $(BIN)/python -m scripts.report.workflow_graph README.md README.zh.md && rm -r $$empty
	$(BIN)/python -m scripts.report.configuration

$(VENV)/installed: envs/requirements.txt pyproject.toml
	@command -v $(PYTHON) > /dev/null || { echo "There is no $(PYTHON) here: install Python 3.12, \
	or name it: make PYTHON=/path/to/python3.12 …" >&2; exit 1; }
	@$(PYTHON) envs/make_venv.py $(VENV)
	@touch $@

requirements: $(VENV)/installed
	$(BIN)/pip install --quiet uv
	$(BIN)/uv pip compile pyproject.toml --extra dev --python-version 3.12 --quiet \
	  --no-emit-index-url --no-annotate --no-header --output-file envs/requirements.txt

clean:
	rm -rf smoke .snakemake
