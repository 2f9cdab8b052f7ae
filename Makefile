# Everything runs in .venv, which every target that needs it makes or brings up to date.
BIN := .venv/bin
SEED ?=
ONLY ?=
REHEARSE ?=
COMMIT ?=
KEEP ?=
UPGRADE ?=
PART ?= 1/1
ENGINE_DIR ?= /var/tmp/dialoop-engine

.PHONY: setup demo real learn models up test nightly compose-test silent-bugs chaos gpu-smoke gpu-parts gpu-evidence check proto console bench lock bom

setup:  ## make or update .venv
	@infra/setup.sh

demo: setup  ## the main job: a tiny model learns to use a calculator; SEED=1 for another seed
	@SEED=$(SEED) $(BIN)/python -m dialoop_ops.stack train infra/configs/demo.toml --fresh

real: setup  ## a real chat model learns to follow instructions, in minutes on a CPU; SEED=1, TASK=reasoning
	@SEED=$(SEED) $(BIN)/python -m benchmarks.real --task "$(or $(TASK),instructions)"

learn: setup  ## every algorithm learns from the demo's warm start; ONLY=grpo,lora takes some
	@SEED=$(SEED) $(BIN)/python -m benchmarks.learn infra/configs/demo.toml \
	  infra/configs/learn --only "$(ONLY)"

models: setup  ## tiny random checkpoints of the model families, in runs/models
	@$(BIN)/python -m benchmarks.servers.families runs/models

up: setup  ## every service on this machine, until Ctrl-C
	@$(BIN)/python -m dialoop_ops.stack up

test: setup  ## all tests but the heavy ones, which are listed at the end, in two processes
	$(BIN)/python -m pytest -m "not heavy" -n 2 --dist loadfile --no-loadscope-reorder --durations=20 --durations-min=1

nightly: setup  ## the heavy tests and a tiny run of each benchmark; PART=2/3 takes every third file
	$(BIN)/python -m pytest -m heavy --part "$(PART)" --durations=20 --durations-min=10

compose-test: setup  ## docker-compose.yml on a real engine: root, Debian, 10 GB; KEEP=1 keeps the engine
	@trap '[ -n "$(KEEP)" ] || infra/docker/local_images.sh stop $(ENGINE_DIR)' EXIT; \
	  infra/docker/local_images.sh $(ENGINE_DIR) && . $(ENGINE_DIR)/env && \
	  COMPOSE_TEST=1 $(BIN)/python -m pytest -v tests/compose --durations=0 --durations-min=1

silent-bugs: setup  ## six published bugs in a small job: no error without checks, a stop with them
	@$(BIN)/python -m benchmarks.silent_bugs $(ONLY)

chaos: setup  ## a job under kills, stops, cuts and a lost second; SEED=3, ENGINE=vllm
	CHAOS_SEED=$(or $(SEED),0) CHAOS_ENGINE=$(or $(ENGINE),transformers) \
	  $(BIN)/python -m pytest -m heavy tests/chaos

gpu-parts: setup  ## pack vLLM and a real model for a GPU machine without a package index
	@$(BIN)/python -m benchmarks.gpu.pack

gpu-evidence: $(if $(REHEARSE),setup)  ## what a GPU shows, line by line; REHEARSE=1 on a CPU; ONLY=job,rates
	@$(or $(wildcard $(BIN)/python),python3) -m benchmarks.gpu.evidence $(if $(REHEARSE),--rehearse) \
	  --only "$(ONLY)" --commit "$(COMMIT)"

gpu-smoke: setup  ## what only a GPU can show, in 15 minutes; exit code 2 where there is none
	@$(BIN)/python -m benchmarks.gpu.smoke

check: setup  ## format, lint, types, layers, protos, generated code, the console's page, rooms, private names
	$(BIN)/ruff format --check --exclude '*.md' .  # snippets align their comments by hand
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/buf lint proto
	$(BIN)/buf format proto --diff --exit-code
	infra/check_generated.sh
	infra/check_console.sh
	$(BIN)/python infra/check_rooms.py
	$(BIN)/python infra/check_private.py
	$(BIN)/check-jsonschema --builtin-schema vendor.compose-spec docker-compose.yml infra/docker/gpu.yml

proto: setup  ## generate client/dialoop/v1 from proto/, and the types of blocking clients
	infra/generate_protos.sh
	$(BIN)/python infra/generate_blocking.py

lock:  ## infra/requirements/locked/ anew after a change of a dependency; UPGRADE=redis,rich or all
	UPGRADE=$(UPGRADE) infra/lock.sh

bom: setup  ## CycloneDX bills of materials, of .venv and of each locked list, in runs/bom
	@mkdir -p runs/bom
	@$(BIN)/cyclonedx-py environment --output-file runs/bom/venv.json $(BIN)/python
	@for list in infra/requirements/locked/*.txt; do \
	  $(BIN)/cyclonedx-py requirements --output-file runs/bom/$$(basename $$list .txt).json $$list || exit 1; \
	done

console:  ## build the console's page from console/ (needs npm; its result is committed)
	cd console && npm ci --no-audit --no-fund && npm run build

bench: setup  ## every benchmark; the figures go to runs/bench/<name>.json
	@mkdir -p runs/bench
	@for script in benchmarks/*.py; do \
	  name=$$(basename "$$script" .py); echo "$$name"; \
	  $(BIN)/python -m "benchmarks.$$name" > "runs/bench/$$name.json" || exit 1; \
	done
