# Two commands do everything, set-up included: `make demo` and `make test`.

VENV ?= .venv
PYTHON ?= python3
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

# The demo model is so small that a second thread only gets in the way.
export OMP_NUM_THREADS ?= 1

.PHONY: env demo demo-embeddings fleet-demo test test-fast test-nightly lint types \
	compile compile-planner compile-fields unit unit-fast format constraints clean

env: $(STAMP)

$(STAMP): pyproject.toml constraints.txt .ci/make-env .ci/overrides.txt
	PYTHON=$(PYTHON) VENV=$(VENV) .ci/make-env
	touch $@

demo: env
	$(BIN)/python benchmark/demo.py

demo-embeddings: env
	$(BIN)/python benchmark/demo_embeddings.py

# Two engines on a Ray cluster of this machine, one of which is killed.
fleet-demo: env
	$(BIN)/python benchmark/fleet_demo.py

# Types are checked beside the tests.
test: lint
	$(MAKE) -j 2 types unit

# All but test/srt, the tests that import or start SGLang, and those marked as slow.
test-fast: lint
	$(MAKE) -j 2 types unit-fast

unit-fast: compile
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder --ignore=test/srt -m "not slow"

# Properties are tried on four times as many examples, and cases in all combinations.
test-nightly:
	SGLANG_BATCH_TEST_EXAMPLES=1 $(MAKE) test

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: env
	$(BIN)/mypy

# Once for all tests. Otherwise each of their processes would compile the planner.
compile: compile-planner compile-fields

# With the tests' sitecustomize.py, which looks for garbage less often.
compile-planner: env
	PYTHONPATH=test/helpers $(BIN)/python -c "from sglang_batch.config import OfflineBatchConfig as Config; \
	from sglang_batch.job.job_planner import compile_planner; \
	compile_planner(Config(policy='auto')); compile_planner(Config(policy='auto'), dense=True)"

compile-fields: env
	$(BIN)/python -c "from sglang_batch.inputs.field_sample import compile_field_orders; \
	compile_field_orders()"

# Two at a time; by test/conftest.py, files that share a server share a process.
unit: compile
	$(BIN)/pytest -n 2 --dist loadfile --no-loadscope-reorder

format: env
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pin what an unconstrained install gives today.
constraints:
	PYTHON=$(PYTHON) .ci/make-constraints > constraints.txt.new
	mv constraints.txt.new constraints.txt

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache
