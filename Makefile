# Each target makes .venv when it is missing and is quick when it is there.
PYTHON ?= python3
VENV ?= .venv
OLDEST_TORCH := 2.7.0
OLDEST_VENV ?= .venv-oldest-torch
PY := $(VENV)/bin/python
WORKERS ?= 2

.PHONY: install train test test-torch test-torch-oldest lint bench slow lab clean

install: $(VENV)/.installed

# torch goes first and pinned: a looser request takes a CUDA build of gigabytes.
$(VENV)/.installed: setup.cfg pyproject.toml
	$(PYTHON) -m venv --clear $(VENV)
	$(PY) -m pip install -q --disable-pip-version-check torch==2.13.0
	$(PY) -m pip install -q --disable-pip-version-check -e '.[torch,train,frameworks,lab,sim,crypto,dev]'
	touch $@

train: install
	$(PY) -m dblp.cli.main train $(ARGS)

lint: install
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) -m mypy tests
	$(PY) -m mypy examples
	$(VENV)/bin/lint-imports --no-cache

# Two workers, since most tests are one process in virtual time; those of real ranks use several cores by themselves.
test: lint
	$(PY) -m pytest -m "not slow" -n $(WORKERS) --dist worksteal --durations 30 $(ARGS)

# torch's own tests, then the failure drill.
test-torch: install
	$(PY) -m tests.torch_suite.run --json torch-suite.json $(ARGS)

# The tests of the backend with the oldest torch that setup.cfg promises, in an environment of its own. No extra that asks for torch:
# pip would take that release's CUDA libraries with it.
$(OLDEST_VENV)/.installed: setup.cfg pyproject.toml tests/torch_suite/oldest.py
	$(PYTHON) -m venv --clear $(OLDEST_VENV)
	$(OLDEST_VENV)/bin/python -m pip install -q --disable-pip-version-check -e '.[train,dev]'
	$(OLDEST_VENV)/bin/python tests/torch_suite/oldest.py $(OLDEST_TORCH)
	touch $@

test-torch-oldest: $(OLDEST_VENV)/.installed
	$(OLDEST_VENV)/bin/python -m pytest -m "not slow" tests/torch $(ARGS)

slow: install
	$(PY) -m pytest -m slow $(ARGS)

# Networks of namespaces, as root; netem too, where the kernel or the guest of DBLP_NETEM_RUNNER has it.
lab: install
	$(PY) -m pytest -m "lab and not slow" $(ARGS)

bench: install
	$(PY) -m dblp.cli.main bench allreduce --against gloo $(ARGS)

clean:
	rm -rf $(VENV) $(OLDEST_VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
