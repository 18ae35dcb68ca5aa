# Everything happens inside .venv; nothing is installed outside of it.
#
#   make run         install what running needs, then let the built-in model tell a story
#   make test        install everything, check the code, run every test
#   make test-fast   the tests without the slow ones
#   make check       format, lint, types, import directions, documentation
#   make docs        the documentation as a site in build/docs, and man/localllm.1
#   make bench       compare speed with llama.cpp's on BENCH_MODEL, and measure the chat
#   make test-clients  install real coding agents into CLIENTS, outside this folder, and let each do a task
#   make test-page     install playwright and axe-core into PAGE, outside this folder, and try the page in BROWSER
#   make test-windows  set up Windows' Python under Wine in WINDOWS (needs root on Debian), and run fast tests there
#   make test-arm64  some tests on 64-bit ARM, in Debian for arm64 under qemu in ARM64; needs root on Debian
#   make lock        renew constraints.txt from the newest releases that pyproject.toml allows
#   make clean       remove .venv and all caches inside this folder

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet

# Three processes on two cores, a file's tests in one of them: many tests wait, the others keep one core busy. In the
# order of tests/conftest.py, slow files first.
PYTEST := $(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder

# Where real coding agents are installed, in the versions that were tried, with the Node that the newest of them need.
CLIENTS ?= /tmp/localllm-clients
AGENTS := node@26.10.0 @anthropic-ai/claude-code@2.1.332 @openai/codex@0.171.0 opencode-ai@1.18.33 @continuedev/cli@1.5.47 \
	cline@3.0.65 @earendil-works/pi-coding-agent@1.6.0 @qwen-code/qwen-code@0.24.4 @github/copilot@1.0.102 \
	@kilocode/cli@7.7.7 openclaw@2026.9.6 @moonshot-ai/kimi-code@2.1.0 @factory/cli@0.225.1 acpx@0.19.1 \
	@factory/cli-linux-x64@0.225.2 @aaif/goose-binary-linux-x64@1.52.0
# Each in an environment of its own, with Python 3.12 if there is one, since vibe needs that.
PYTHON_AGENTS := aider:aider-chat==0.86.2 vibe:mistral-vibe==3.0.2 hermes:hermes-agent==0.19.0 \
	semantic-kernel:semantic-kernel==1.45.0 google-adk:google-adk==2.13.0,litellm==1.110.2 crewai:crewai==1.15.30 \
	smolagents:smolagents[openai]==1.26.0

# The browser in which the page is tried, and where what that needs is installed.
BROWSER ?= /usr/bin/chromium
PAGE ?= /tmp/localllm-page
PLAYWRIGHT := playwright==1.65.2
AXE := axe-core@4.14.1

# Where Windows' Python is set up under Wine, and the tests that run there.
WINDOWS ?= /tmp/localllm-windows
WINDOWS_UNTRIED := $(patsubst %,tests/localllm/engine/test_%.py,engine_on_models engine_on_runners \
	engine_random_on_runners images_in_engine images_in_layers self_drafts windows_in_engine)
WINDOWS_TESTS ?= tests/gguf_io \
	$(patsubst %,tests/localllm/test_%.py,doctor extraction remedies settings stored text text_files) \
	$(patsubst %,tests/localllm/packed/test_%.py,packed packed_names) \
	$(patsubst %,tests/localllm/library/test_%.py,create go_translation listed_names lookup names own_store preview pull_faults) \
	$(patsubst %,tests/localllm/cli/test_%.py,bench_command cost_command examples launch loadtest_command plan_command) \
	$(patsubst %,tests/localllm/cli/test_%.py,plan_remote prompt reference show simulate_command terminal) \
	$(patsubst %,tests/localllm/cli/test_%.py,run_remote unwritable_output) \
	$(patsubst %,tests/localllm/wings/tools/test_%.py,command confinement journal) \
	$(filter-out $(WINDOWS_UNTRIED),$(wildcard tests/localllm/engine/test_*.py)) \
	$(patsubst %,tests/cpu_kernels/test_%.py,activations arguments compile_children isa) \
	$(patsubst %,tests/models/test_%.py,golden memory) \
	$(patsubst %,tests/tui/test_%.py,acp attachments damaged_chats editor files folder inspector keys late_results loading) \
	$(patsubst %,tests/tui/test_%.py,markdown openai_backend pictures_terminal program queue saved saving_models) \
	$(patsubst %,tests/tui/test_%.py,sending server_backend sessions_flow store streams tools two_chats unwritable_home)

# Where Debian for arm64 is set up.
ARM64 ?= /tmp/localllm-arm64

.PHONY: run install test test-fast test-clients test-page test-windows test-arm64 check docs bench lock clean

run: install
	@echo "The first answer waits, once, for kernels to be compiled for this processor." >&2
	$(BIN)/localllm run builtin "Tell me a story about the moon" --stats </dev/null

install: $(VENV)/.installed

test: check
	$(PYTEST) --durations 40

test-fast: $(VENV)/.installed-dev
	$(PYTEST) -m "not slow"

test-clients: $(VENV)/.installed-dev
	@if ! command -v npm >/dev/null; then echo "Skipped: there is no npm, which installs coding agents."; exit 0; fi; set -e; \
	mkdir -p $(CLIENTS); cd $(CLIENTS); [ -f package.json ] || echo '{"private": true}' >package.json; \
	export TEST_CLIENTS="$$PWD" PATH="$$PWD/node_modules/.bin:$$PATH"; \
	for agent in $(AGENTS); do \
		npm install --loglevel error --no-audit --no-fund --save-exact $$agent || echo "not installed: $$agent" >&2; \
	done; \
	[ ! -e node_modules/.bin/goose-binary-linux-x64 ] || ln -sf goose-binary-linux-x64 node_modules/.bin/goose; \
	python=$(abspath $(BIN))/python; if python3.12 -c "" 2>/dev/null; then python=python3.12; fi; \
	for agent in $(PYTHON_AGENTS); do \
		folder=$${agent%%:*}; [ "$$(cat $$folder/.installed 2>/dev/null)" = "$$agent" ] || { \
		$$python -m venv --clear $$folder; \
		$$folder/bin/pip install --quiet $$(echo $${agent#*:} | tr , ' ') && echo "$$agent" >$$folder/.installed || \
		{ rm -r $$folder; echo "not installed: $$agent" >&2; }; }; \
	done; \
	cd $(CURDIR); $(BIN)/pytest tests/clients

test-page: $(VENV)/.installed-dev
	@[ -x "$(BROWSER)" ] || { echo "Skipped: there is no $(BROWSER). Install a Chromium (Debian: apt install chromium)," \
		"or name one: make test-page BROWSER=/path/to/chrome"; exit 0; }; set -e; \
	[ -d $(PAGE)/python/$(subst ==,-,$(PLAYWRIGHT)).dist-info ] || { \
		echo "Installing $(PLAYWRIGHT), which drives the browser, into $(PAGE) (170 MB)."; \
		$(PIP) install --upgrade --target $(PAGE)/python $(PLAYWRIGHT); }; \
	cd $(PAGE); [ -f package.json ] || echo '{"private": true}' >package.json; \
	if command -v npm >/dev/null; then \
		echo "Installing $(AXE), which finds faults of accessibility, into $(PAGE)."; \
		npm install --silent --no-audit --no-fund $(AXE); \
	else echo "Without npm there is no axe-core: the tests of accessibility are skipped."; fi; cd $(CURDIR); \
	export PYTHONPATH=$(PAGE)/python TEST_BROWSER=$(BROWSER); \
	[ ! -f $(PAGE)/node_modules/axe-core/axe.min.js ] || export TEST_AXE=$(PAGE)/node_modules/axe-core/axe.min.js; \
	$(BIN)/pytest tests/page

# Standard streams have to be pipes there.
test-windows: $(BIN)/python
	$(BIN)/python tests/platforms/windows.py $(WINDOWS)
	bash -o pipefail -c '$(WINDOWS)/wpython -m localllm run builtin "Once upon a time" </dev/null 2>&1 | cat'
	$(BIN)/python tests/platforms/windows.py $(WINDOWS) $(WINDOWS_TESTS)

test-arm64: $(VENV)/.installed-dev
	$(BIN)/python tests/platforms/arm64.py $(ARM64)

check: $(VENV)/.installed-dev docs
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	for system in linux darwin win32; do $(BIN)/mypy --platform $$system --cache-dir .mypy_cache/$$system || exit 1; done
	$(BIN)/lint-imports

# Fails for a broken link or anchor.
docs: $(VENV)/.installed-dev
	@mkdir -p man
	$(BIN)/localllm man >man/localllm.1
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

bench: $(VENV)/.installed-dev
	@test -n "$(BENCH_MODEL)" || { echo "Say which models: make bench BENCH_MODEL='one.gguf other.gguf'" >&2; exit 1; }
	$(BIN)/python -m benchmarks.compare_llama_cpp $(BENCH_MODEL)
	$(BIN)/python -m benchmarks.tui
	$(BIN)/python -m benchmarks.formats --floors

# Resolves without installing; the versions in use move only when somebody runs this.
lock: $(BIN)/python
	@mkdir -p .cache
	$(PIP) install --dry-run --ignore-installed --report .cache/resolution.json --editable '.[dev,llama,train]'
	$(BIN)/python -c 'import json; \
	    names = [(item["metadata"]["name"].lower(), item["metadata"]["version"]) \
	             for item in json.load(open(".cache/resolution.json"))["install"]]; \
	    print("# Written by make lock: the versions that every install of this project uses."); \
	    intel, arm = ("darwin", "x86_64"), ("win32", "ARM64"); \
	    older_there = dict.fromkeys(["llvmlite", "numba", "numpy", "sentencepiece"], [intel]) | {"cryptography": [intel, arm]}; \
	    elsewhere = "(sys_platform != \"{}\" or platform_machine != \"{}\")"; \
	    marker = lambda name: "; " + " and ".join(elsewhere.format(*one) for one in older_there[name]); \
	    print(*(f"{name}=={version}{marker(name) if name in older_there else str()}" \
	            for name, version in sorted(names) if name != "localllm"), sep="\n")' > .cache/constraints.txt
	mv .cache/constraints.txt constraints.txt

clean:
	rm -rf $(VENV) .cache build dist man *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	    { echo "localllm needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) --version 2>&1). Try: make PYTHON=python3.12 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	    { echo "$(PYTHON) cannot make virtual environments; install its venv package (Debian: apt install python3-venv)." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# Wheels only: what people run needs no compiler. Two stamps, so that repeated calls cost nothing.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install --only-binary :all: --constraint constraints.txt --editable .
	$(BIN)/python -m compileall -q cpu_kernels gguf_io gpu_offload localllm models tui
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "Installing the test tools; llama.cpp, our oracle, is compiled once (about 5 minutes on 2 cores)."
	CMAKE_BUILD_PARALLEL_LEVEL=$$($(BIN)/python -c "import os; print(os.cpu_count())") \
	    $(PIP) install --constraint constraints.txt --editable '.[dev,llama]'
	@touch $@
