# Every target installs what it needs first; a fresh machine needs Python 3.11 or newer.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.ready

.PHONY: setup constraints demo test test-all cov check format lint types docs bench default-model clean

# Labelled EuroSAT tiles: a folder or a zip with one folder for each class.
TILES ?= ../shared/data/labelled/EuroSAT_RGB.zip

setup: $(READY)

# Runs again when the dependencies change. Installs only the files listed in constraints.txt.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("tnet needs Python 3.11 or newer: make setup PYTHON=python3.12" if sys.version_info < (3, 11) else 0)'
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $(READY)

# Pin the newest versions that pyproject.toml allows, for every Python and system, with hashes.
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
	@echo "regions: demo/scene.geojson (QGIS), demo/scene.png, demo/scene.html (browser)"

# Compiled modules are kept, whatever the environment says: the tests start hundreds of processes.
export PYTHONDONTWRITEBYTECODE :=

# Each process takes a run of neighbouring files, so that fixtures are created once; an idle one
# steals from the end of another's.
PARALLEL := --numprocesses auto --dist worksteal
test: setup
	$(BIN)/python -m pytest $(PARALLEL)

# With the slow tests: Dask cluster, torchrun, soak, wheel, documentation pages.
test-all: setup
	$(BIN)/python -m pytest $(PARALLEL) --run-slow

# Branch coverage: 90 % of the package, 100 % of the modules where an error would stay unnoticed.
WHOLE := tnetcli/geometry.py,tnetcli/traversal/tree.py,tnetcli/traversal/policies.py,tnetcli/prediction/record.py,tnetcli/errors.py,tnetcli/training/recipe.py
cov: setup
	$(BIN)/python -m coverage erase
	$(BIN)/python -m coverage run -m pytest $(PARALLEL)
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage report
	$(BIN)/python -m coverage report --fail-under=100 --include=$(WHOLE)

check: lint types test

format: setup
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

lint: setup
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/lint-imports --no-logo

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

# Takes about 43 minutes on one core; docs/models/default.md describes the result.
default-model: setup
	$(BIN)/tnet train recipes/default.yaml -o runs/default --resume --set data.path=$(abspath $(TILES))
	mkdir -p tnetcli/assets
	cp runs/default/model.safetensors tnetcli/assets/default.safetensors
	$(BIN)/tnet evaluate --model default --data runs/default/recipe.yaml

clean:
	rm -rf .venv demo build dist
