# make demo     the main job on a real model: prints the result and the path of the picture
# make test     the suite on TransformerLens 4.x and on 3.9, without its slow cases
# make test-all everything: slow cases, all releases, the Space, Ray, the wheel
# make test-oldest   a smoke test with the oldest release of every dependency that pyproject.toml allows
# make test-newest   the same and a call of every public name, with the newest releases that pyproject.toml allows
# make docs     the site in outputs/site, with the generated reference and the recorded courses
# make courses  runs the courses and records their outputs (COURSES="norms traces" for some of them)
# make test-space    tests of the app of lens-mix serve and the Space, with gradio in an environment of its own
# make test-ray      tests of a corpus on a Ray cluster, with Ray in an environment of its own
# make test-wheel    the wheel and each extra in clean environments (PYTHON=python3.12 for another Python)
# make bench    benchmarks on this machine: tables in benchmarks/RESULTS.md (BENCH=--full for all of them)
# Each target makes the environment that it needs; see docs/development/index.md.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
ENVIRONMENTS := .environments
TL4 := $(ENVIRONMENTS)/tl4
TL3 := $(ENVIRONMENTS)/tl3
TL2 := $(ENVIRONMENTS)/tl2
OLDEST := $(ENVIRONMENTS)/oldest
NEWEST := $(ENVIRONMENTS)/newest
SPACE := $(ENVIRONMENTS)/space
RAY := $(ENVIRONMENTS)/ray
DOCS := $(ENVIRONMENTS)/docs
# Arguments for pytest: make test-tl4 PYTEST="tests/view -x"
PYTEST ?=
# Which tests: CASES= for all of them, slow ones included.
CASES ?= -m "not slow"
# Processes side by side; each takes about 1 GB. A worker that is done takes over tests of another.
WORKERS ?= 2
# Compiled tests are kept: to collect them anew takes 15 s more.
export PYTHONDONTWRITEBYTECODE =
# One thread each: the tests' tensors are too small to gain from more.
RUN_TESTS = OMP_NUM_THREADS=1 $(1)/bin/python -m pytest --numprocesses $(WORKERS) --dist worksteal $(CASES) $(PYTEST)
# On one release the shape checks find what there is to find.
UNCHECKED = JAXTYPING_DISABLE=1
# Nor is anything found twice by the tests marked `once` (tests/conftest.py); CASES= runs these too.
test-tl3 test-tl2: CASES = -m "not slow and not once"

.PHONY: help demo docs courses environments test test-all test-tl4 test-tl3 test-tl2 test-oldest test-newest test-space test-ray \
	test-wheel look-for-newer browser lint format types stub wheel clean bench peers

help:
	@sed -n 's/^# \(make .*\)/\1/p' Makefile
	@echo 'make test-tl4 | test-tl3 | test-tl2   the suite on one release; PYTEST="..." passes arguments to pytest,'
	@echo '    CASES= adds the slow cases, WORKERS=8 runs eight processes'
	@echo 'make lint | format | types | stub | wheel | clean'

demo: $(TL4)/.ready
	@$(TL4)/bin/python demos/main.py

test: test-tl4 test-tl3

test-tl4: $(TL4)/.ready browser
	@echo "== tests on TransformerLens 4.3"
	@$(call RUN_TESTS,$(TL4))

test-tl3: $(TL3)/.ready browser
	@echo "== tests on TransformerLens 3.9"
	@$(UNCHECKED) $(call RUN_TESTS,$(TL3))

test-tl2: $(TL2)/.ready
	@echo "== tests on TransformerLens 2.18"
	@$(UNCHECKED) $(call RUN_TESTS,$(TL2))

# Everything: unusual models, all releases, the Space, a Ray cluster, the wheel. Most slow
# cases repeat a check on one more model; on older releases only the tests of the matrix do so.
IN_MATRIX = -m "(not slow or matrix) and not once"
test-all: browser
	@$(MAKE) --no-print-directory test-tl4 CASES=
	@$(MAKE) --no-print-directory test-tl3 CASES='$(IN_MATRIX)'
	@$(MAKE) --no-print-directory test-tl2 CASES='$(IN_MATRIX)'
	@$(MAKE) --no-print-directory test-oldest
	@$(MAKE) --no-print-directory test-newest
	@$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-space test-ray test-wheel

# What old releases can break: imports, a run, a method of each kind, tables, graphs, figures, files, commands.
SMOKE = tests/test_oldest.py tests/test_package.py tests/test_cli.py tests/test_files.py tests/maps/test_record.py \
	tests/graphs/test_routes.py tests/hooks/test_cookbook.py tests/experiments/test_head_probe.py \
	tests/aggregation/test_flow.py tests/view/test_figures.py \
	tests/demos/test_models.py::test_an_8_bit_encoder_decoder_becomes_the_model_that_it_was

test-oldest: $(OLDEST)/.ready
	@echo "== smoke test with the oldest dependencies"
	@$(UNCHECKED) $(call RUN_TESTS,$(OLDEST)) $(SMOKE)

# What new releases can break: the same, encoders of transformers, and a call of every public name.
test-newest: $(NEWEST)/.ready
	@echo "== smoke test with the newest dependencies"
	@$(NEWEST)/bin/python -m pip list --disable-pip-version-check --format freeze | \
		grep -E '^(torch|transformers|transformer-lens|numpy|pandas|pyarrow)=='
	@$(call RUN_TESTS,$(NEWEST)) $(SMOKE) tests/test_public_calls.py tests/_model/test_wrap.py tests/_model/test_adapters.py

# gradio is large, and few serve the app.
test-space: $(SPACE)/.ready browser
	@echo "== tests of the app, and of the Hugging Face Space"
	@OMP_NUM_THREADS=1 $(SPACE)/bin/python -m pytest tests/test_app.py tests/demos/test_space.py $(PYTEST)

# Ray is large, and few need a cluster.
test-ray: $(RAY)/.ready
	@echo "== tests of a corpus on a Ray cluster"
	@OMP_NUM_THREADS=1 $(RAY)/bin/python -m pytest tests/corpus/test_on_ray.py $(PYTEST)

# CONSTRAINTS= installs the newest releases, as users get them; WHEEL=FILE tries a wheel that was built before.
CONSTRAINTS ?= constraints/tl4.txt
WHEEL ?=
test-wheel:
	@$(PYTHON) -m tests.wheel $(CONSTRAINTS:%=--constraints %) $(WHEEL:%=--wheel %)

# The page's tests want a browser; where none can be installed (no Debian, no rights) they are skipped.
browser:
	@command -v chromedriver >/dev/null 2>&1 || { command -v apt-get >/dev/null 2>&1 && [ "$$(id -u)" = 0 ] && \
		echo "Installing a browser for the page's tests" && \
		(timeout 120 apt-get update && timeout 300 apt-get install --yes --no-install-recommends \
		chromium chromium-driver) >/dev/null 2>&1; } || echo "no chromium here: the page's browser tests are skipped"

# The pages are collected in outputs/pages where lens_mix can be imported, and built where mkdocs and Zensical are.
# Both build the same pages from mkdocs.yml, and both stop at a broken link. With `--quiet`, mkdocs would not count
# warnings.
docs: $(TL4)/.ready $(DOCS)/.ready
	@echo "== pages, in outputs/pages"
	@$(TL4)/bin/python -m docs.make
	@echo "== site by mkdocs, in outputs/site"
	@NO_MKDOCS_2_WARNING=1 $(call SHOW_IF_FAILED,$(DOCS)/bin/mkdocs build --strict)
	@echo "== site by Zensical, in outputs/zensical"
	@SITE=outputs/zensical $(call SHOW_IF_FAILED,$(DOCS)/bin/zensical build --strict)
	@$(DOCS)/bin/python -m docs.make.check

courses: $(TL4)/.ready
	@OMP_NUM_THREADS=1 $(TL4)/bin/python -m docs.make.courses $(COURSES)

SHOW_IF_FAILED = $(1) >outputs/docs.log 2>&1 || { sed 's/\x1b\[[0-9;]*m//g' outputs/docs.log; exit 1; }

# One thread, so that ratios say something about the code and not about the machine's cores.
bench: $(TL4)/.ready
	@OMP_NUM_THREADS=1 $(TL4)/bin/python -m benchmarks.run $(BENCH)

# Other libraries to compare with, in an environment of their own.
peers:
	@$(PYTHON) -m venv $(ENVIRONMENTS)/peers
	@$(ENVIRONMENTS)/peers/bin/python -m pip install -qq --no-compile --disable-pip-version-check \
		--constraint constraints/torch.txt 'inseq==0.7.1' 'transformers==4.57.6' captum networkx

lint: $(TL4)/.ready
	@$(TL4)/bin/ruff check --quiet --output-format concise .
	@$(TL4)/bin/ruff format --check --quiet . || { echo "not formatted: run 'make format'"; exit 1; }

format: $(TL4)/.ready
	@$(TL4)/bin/ruff check --quiet --fix .
	@$(TL4)/bin/ruff format .

types: $(TL4)/.ready
	@$(TL4)/bin/mypy --no-error-summary lens_mix

# Methods are found by their files; the stub names them for type checkers, and mkdocs.yml for the site. Each has a
# page in docs/methods.
stub: $(TL4)/.ready
	@$(TL4)/bin/python -m tests.stub

wheel: $(TL4)/.ready
	@$(TL4)/bin/python -m pip wheel -qq --no-deps --wheel-dir dist .

clean:
	rm -rf $(ENVIRONMENTS) dist outputs .mypy_cache .ruff_cache

# What `.ci/run` needs. Each is mostly one process: `make --jobs=2 environments` makes two at a time.
environments: $(foreach name,tl4 docs tl3 oldest,$(ENVIRONMENTS)/$(name)/.ready)

# The site needs no torch, and the library is read there without being imported.
$(DOCS)/.ready: PACKAGES = --requirement constraints/docs.txt

# `-qq` leaves errors on the screen and keeps warnings about the machine's own pip settings off it. Meanwhile, a
# line every ten seconds says how far it is.
# Compiling every file of torch and transformers would take half of the time; what is imported compiles itself.
# The stamp is written last: an interrupted build starts again.
PROGRESS = while sleep 10 >/dev/null; do echo "  $(@D) has $$(du -sm $(@D) | cut -f1) MB"; done & trap "kill $$!" EXIT
$(ENVIRONMENTS)/%/.ready: constraints/%.txt constraints/common.txt constraints/torch.txt pyproject.toml
	@echo "Preparing $(@D) (the first time takes minutes)"
	@$(@D)/bin/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(@D)
	@$(PROGRESS); $(@D)/bin/python -m pip install -qq --no-compile --disable-pip-version-check \
		--constraint constraints/$*.txt $(or $(PACKAGES),--editable '.[dev]')
	@touch $@

# Newer releases may have appeared since the last time.
$(NEWEST)/.ready: PACKAGES = --upgrade --upgrade-strategy eager --editable '.[dev]'
$(NEWEST)/.ready: look-for-newer

# Added to the packages of TransformerLens 4.x, instead of installing these a second time.
$(SPACE)/.ready: ADDED = --constraint constraints/space.txt gradio
$(SPACE)/.ready: constraints/space.txt
$(RAY)/.ready: ADDED = --constraint constraints/tl4.txt 'ray[data]'
$(SPACE)/.ready $(RAY)/.ready: $(TL4)/.ready
	@$(PYTHON) -m venv $(@D)
	@$(TL4)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> $$($(@D)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/tl4.pth
	@$(PROGRESS); $(@D)/bin/python -m pip install -qq --no-compile --disable-pip-version-check $(ADDED)
	@touch $@
