# Each target makes .venv when it is missing and is quick when it is there.
PYTHON ?= python3
VENV ?= .venv
PY := $(VENV)/bin/python
WORKERS ?= 2

.PHONY: install train test test-torch lint bench slow lab clean

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
	$(PY) -m pytest -m "not slow" -n $(WORKERS) --dist worksteal $(ARGS)

# torch's own tests, then the failure drill.
test-torch: install
	$(PY) -m tests.torch_suite.run --json torch-suite.json $(ARGS)

slow: install
	$(PY) -m pytest -m slow $(ARGS)

# Networks of namespaces, as root; netem too, where the kernel or the guest of DBLP_NETEM_RUNNER has it.
lab: install
	$(PY) -m pytest -m "lab and not slow" $(ARGS)

bench: install
	$(PY) -m dblp.cli.main bench allreduce --against gloo $(ARGS)

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache
