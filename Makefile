# SPDX-License-Identifier: Apache-2.0
# Thin: every recipe calls a script with the variables that were given.
.DEFAULT_GOAL := help
.SILENT:
MAKEFLAGS += --no-print-directory --no-builtin-rules

HOST_PYTHON ?= python3
TOOLS := build/tools
# -E: a PYTHONPATH, PYTHONHOME or PYTHONSAFEPATH of the user's is for other programs.
RUN := $(TOOLS)/bin/python -E
SERIES := $(RUN) scripts/series.py
RELEASE_TESTS := $(RUN) scripts/release_tests.py
LAWS := $(RUN) scripts/laws.py
# What only the pictures need.
PLOTS := $(TOOLS)/.plots
IMAGE = $(RUN) scripts/image.py

# Only what stands on make's command line counts (a PYTHON or RELEASE in the environment
# means something else), and it reaches the script as it was written.
quoted = '$(subst ','\'',$(value $(1)))'
option = $(if $(filter command,$(firstword $(origin $(2)))),--$(1)=$(call quoted,$(2)))
RELEASE_ARG = $(call option,release,RELEASE)
# Exporting them would expand what is written in them.
unexport RELEASE VLLM PYTHON STOCK SECONDS SEED PROFILE MTP PORT URL \
	FROM TO BACK A B TABLE BASE TAG CONTAINER COMPILED SINCE TESTS
# A misspelt variable would have no effect and nobody would notice.
KNOWN := RELEASE VLLM PYTHON STOCK SECONDS SEED PROFILE MTP PORT URL \
	FROM TO BACK A B TABLE BASE TAG CONTAINER COMPILED SINCE TESTS HOST_PYTHON
given := $(foreach v,$(.VARIABLES),$(if $(filter command,$(firstword $(origin $(v)))),$(v)))
unknown := $(firstword $(filter-out $(KNOWN) SHELL MAKEFLAGS,$(given)))
$(if $(unknown),$(error unknown variable $(unknown)=; known: $(KNOWN)))
# A script's unset variable would mean the default, or every release.
empty := $(firstword $(foreach v,$(filter $(KNOWN),$(given)),$(if $(strip $(value $(v))),,$(v))))
$(if $(empty),$(error $(empty)= is empty: give it a value or leave it out))
takes = $(foreach v,$(filter-out $(1) HOST_PYTHON,$(filter $(KNOWN),$(given))),$(error make $@ takes no $(v)=: leave it out))
IMAGE_ARGS = $(RELEASE_ARG) $(call option,container,CONTAINER)
ARGS = $(call takes,RELEASE VLLM PYTHON)$(RELEASE_ARG) $(call option,vllm,VLLM) $(call option,python,PYTHON)

.PHONY: help apply fetch status unapply edit export check port range-diff upstream \
	test proof lint each-commit parity fuzz sweep bench mutants matrix e2e \
	probe serve-sim experiment \
	image image-test image-probe image-status image-stand-in \
	clean distclean

help: ## List the targets (default)
	echo "usage: make TARGET [RELEASE=0.33.0] [VLLM=path to a git checkout] [PYTHON=interpreter with vllm installed]"
	sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  \1	\2/p' $(firstword $(MAKEFILE_LIST)) | expand -t 17

apply: $(TOOLS)/.ready ## Apply the series to a built tree, or to VLLM= or PYTHON=
	$(SERIES) apply $(ARGS)

fetch: $(TOOLS)/.ready ## Download a release's source into the cache
	$(SERIES) fetch $(ARGS)

status: $(TOOLS)/.ready ## Say which patches are applied, and what has drifted
	$(SERIES) status $(ARGS)

unapply: $(TOOLS)/.ready ## Take the series back: built tree, VLLM= or PYTHON=
	$(SERIES) unapply $(ARGS)

edit: $(TOOLS)/.ready ## Show where to edit a series as commits
	$(SERIES) edit $(ARGS)

export: $(TOOLS)/.ready ## Write the commits back to patches/<release>
	$(SERIES) export $(ARGS)

check: $(TOOLS)/.ready ## Check that patches/ and the series files agree
	$(SERIES) check $(ARGS)

port: $(TOOLS)/.ready ## Carry a series to another release: FROM=0.33.0 TO=0.34.0
	$(call takes,FROM TO BACK)$(RUN) scripts/port.py $(call option,from,FROM) $(call option,to,TO) $(call option,back,BACK)

range-diff: $(TOOLS)/.ready ## Show how two series differ: A=0.33.0 B=0.25.1
	$(call takes,A B)$(SERIES) range-diff $(call option,a,A) $(call option,b,B)

upstream: $(TOOLS)/.ready ## Write the series as pull requests for vLLM, nothing is sent: RELEASE= TESTS=0
	$(call takes,RELEASE TESTS)$(RUN) scripts/upstream.py $(RELEASE_ARG) $(call option,tests,TESTS)

test: $(PLOTS) ## Run vLLM's own tests and this project's on each release
	$(call takes,RELEASE)$(RELEASE_TESTS) test $(RELEASE_ARG)

proof: $(TOOLS)/.ready ## Show each new test failing on stock and passing patched
	$(call takes,RELEASE)$(RELEASE_TESTS) proof $(RELEASE_ARG)

lint: $(TOOLS)/.ready ## Lint this project and what the patches add to vLLM
	$(call takes,RELEASE)$(RELEASE_TESTS) lint $(RELEASE_ARG)

each-commit: $(TOOLS)/.ready ## Lint and test each patch at its own commit, of what a change touches: RELEASE= SINCE=
	$(call takes,RELEASE SINCE)$(RELEASE_TESTS) each-commit $(RELEASE_ARG) $(call option,since,SINCE)

parity: $(TOOLS)/.ready ## Judge the laws L1 to L8, stock beside patched; STOCK=1: what stock breaks
	$(call takes,RELEASE STOCK)$(LAWS) laws $(RELEASE_ARG) $(call option,only-stock,STOCK)

fuzz: $(TOOLS)/.ready ## Play random histories, SECONDS=60 SEED=0 RELEASE=0.33.0
	$(call takes,RELEASE SECONDS SEED)$(LAWS) fuzz $(RELEASE_ARG) $(call option,seconds,SECONDS) $(call option,seed,SEED)

sweep: $(TOOLS)/.ready ## Compare the hits of resent prompts of all lengths with dense retention's
	$(call takes,RELEASE)$(RUN) scripts/sweep.py $(RELEASE_ARG)

bench: $(TOOLS)/.ready ## Measure what the host tier costs, stock and patched
	$(call takes,RELEASE)$(RUN) scripts/bench.py $(RELEASE_ARG)

mutants: $(TOOLS)/.ready ## Plant defects in the patched trees: each must break a law
	$(call takes,RELEASE)$(RUN) scripts/mutants.py $(RELEASE_ARG)

matrix: $(TOOLS)/.ready ## Measure what holds on each release, for README's table; TABLE=1: write that alone
	$(call takes,RELEASE TABLE)$(RUN) scripts/matrix.py $(RELEASE_ARG) $(call option,table,TABLE)

e2e: $(TOOLS)/.ready ## Restore real KV of tiny models on a CPU, stock and patched
	$(call takes,RELEASE)$(RUN) scripts/e2e.py $(RELEASE_ARG)

probe: $(TOOLS)/.ready ## Does offload restore on your server? URL=http://localhost:8000
	$(call takes,URL)$(RUN) scripts/probe_boundaries.py $(call option,url,URL)

serve-sim: $(TOOLS)/.ready ## Serve a simulated model, no GPU: RELEASE= STOCK=1 PROFILE= MTP= PORT=
	$(call takes,RELEASE STOCK PROFILE MTP PORT)$(RUN) scripts/serve_sim.py $(RELEASE_ARG) $(call option,stock,STOCK) $(call option,profile,PROFILE) $(call option,mtp,MTP) $(call option,port,PORT)

experiment: $(PLOTS) ## Run all probes on simulated servers, stock beside patched
	$(call takes,RELEASE)$(RUN) scripts/experiment.py $(RELEASE_ARG)

image: $(TOOLS)/.ready ## Build the patched serving image: RELEASE= BASE= CONTAINER=podman TAG= COMPILED=1
	$(call takes,RELEASE BASE CONTAINER TAG COMPILED)$(IMAGE) build $(IMAGE_ARGS) $(call option,base,BASE) $(call option,tag,TAG) $(call option,compiled,COMPILED)

image-test: $(TOOLS)/.ready ## Test what the image serves, on the CPU: RELEASE= BASE= CONTAINER= COMPILED=1
	$(call takes,RELEASE BASE CONTAINER COMPILED)$(IMAGE) test $(IMAGE_ARGS) $(call option,base,BASE) $(call option,compiled,COMPILED)

image-probe: $(TOOLS)/.ready ## Run the probes in the image: URL= RELEASE= CONTAINER= TAG=
	$(call takes,URL RELEASE CONTAINER TAG)$(IMAGE) probe $(IMAGE_ARGS) $(call option,url,URL) $(call option,tag,TAG)

image-status: $(TOOLS)/.ready ## Say what an image's labels and its record say: RELEASE= CONTAINER= TAG=
	$(call takes,RELEASE CONTAINER TAG)$(IMAGE) status $(IMAGE_ARGS) $(call option,tag,TAG)

image-stand-in: $(TOOLS)/.ready ## Build and check every target on a stand-in for vLLM's image (root, Buildah)
	$(call takes,RELEASE)$(RUN) scripts/image_stand_in.py $(RELEASE_ARG)

clean: ## Remove the built trees and reports, keep the tools and the downloads
	$(call takes,)$(HOST_PYTHON) scripts/clean.py

distclean: ## Remove everything that was built or downloaded
	$(call takes,)$(HOST_PYTHON) scripts/clean.py --all

$(PLOTS): $(TOOLS)/.ready
	$(HOST_PYTHON) scripts/tools_venv.py $(TOOLS) plots

$(TOOLS)/.ready: pyproject.toml scripts/tools_venv.py
	command -v $(HOST_PYTHON) >/dev/null || { echo "make: $(HOST_PYTHON) is not there: install Python 3.11 or newer, or name it with HOST_PYTHON=" >&2; exit 1; }
	$(HOST_PYTHON) scripts/tools_venv.py $(TOOLS)
