# `make demo` and `make test` do all set-up on a fresh machine with Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup constraints demo test cov soak check format lint types docs bench default-model clean

# Labelled tiles of EuroSAT: a folder for each class, in a zip or not.
TILES ?= ../shared/data/labelled/EuroSAT_RGB.zip

setup: $(READY)

# Reused while the dependencies are unchanged. Files that are not in constraints.txt are not installed.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("tnet needs Python 3.11 or newer: make setup PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

# The newest versions that pyproject.toml allows, for every Python and system, with their hashes.
constraints:
	uv pip compile pyproject.toml --extra test --universal --generate-hashes --python-version 3.11 \
		--no-header --no-annotate --quiet --upgrade --output-file constraints.new
	(head -2 constraints.txt; cat constraints.new) > constraints.made
	mv constraints.made constraints.txt
	rm constraints.new

demo: setup
	$(BIN)/python examples/make_scene.py demo/scene.tif --size 16384
	$(BIN)/tnet info demo/scene.tif --model default
	$(BIN)/tnet predict demo/scene.tif --levels 3
	$(BIN)/tnet predict demo/scene.tif --levels 3 -o demo/scene.jsonl --overwrite -q
	$(BIN)/tnet export demo/scene.jsonl -o demo/scene.geojson --overwrite
	$(BIN)/tnet export demo/scene.jsonl -o demo/scene.png --overwrite
	$(BIN)/tnet export demo/scene.jsonl -o demo/scene.html --overwrite
	@echo "where it looked: demo/scene.geojson (QGIS), demo/scene.png, demo/scene.html (a browser)"

# A file of tests a core at a time: what its tests share is made once.
TOGETHER := --numprocesses auto --dist loadfile
test: setup
	$(BIN)/python -m pytest $(TOGETHER)

# Branches that tests reach: 90 % of all, every one where a wrong answer would go unseen.
WHOLE := tnetcli/geometry.py,tnetcli/traversal/tree.py,tnetcli/traversal/policies.py,tnetcli/prediction/record.py,tnetcli/errors.py,tnetcli/training/recipe.py
cov: setup
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest $(TOGETHER)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report
	$(BIN)/python -m coverage report --fail-under=100 --include=$(WHOLE)

# Tests that take minutes.
soak: setup
	$(BIN)/python -m pytest --run-slow -m slow

check: lint types test

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

types: setup
	$(BIN)/mypy

docs: setup
	$(BIN)/python docs/make_cli.py
	$(BIN)/python docs/make_recipes.py
	$(BIN)/python docs/make_how_it_works.py
	$(BIN)/python docs/make_readme.py
	$(BIN)/python docs/make_schema.py

bench: setup
	$(BIN)/python benchmarks/readers.py --write
	$(BIN)/python benchmarks/traversal.py --write
	$(BIN)/python benchmarks/predict.py --write
	$(BIN)/python benchmarks/heatmap.py --write
	$(BIN)/python benchmarks/training.py --write
	$(BIN)/python benchmarks/learning.py --write
	$(BIN)/python benchmarks/soak.py --write

# About 43 minutes of one core; docs/models/default.md tells what comes out.
default-model: setup
	$(BIN)/tnet train recipes/default.yaml -o runs/default --resume --set data.path=$(abspath $(TILES))
	mkdir -p tnetcli/assets
	cp runs/default/model.safetensors tnetcli/assets/default.safetensors
	$(BIN)/tnet evaluate --model default --data runs/default/recipe.yaml

clean:
	rm -rf .venv demo build dist
