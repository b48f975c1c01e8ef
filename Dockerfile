# The quickstart in a container, on the CPU:
#   docker build -t megacore . && docker run --rm -v megacore:/app/workspace megacore
# On GPUs, from a CUDA image with Python ≥ 3.11 (the plain torch wheel brings CUDA's libraries with it):
#   docker build --build-arg BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04 -t megacore-cuda .
#   docker run --rm --gpus all --ipc host -v megacore:/app/workspace megacore-cuda make pretrain CONF=gpt2-345m
ARG BASE=python:3.11-slim-bookworm
FROM ${BASE}

# A base without Python gets its distribution's; the official Python images have theirs.
RUN apt-get update \
    && apt-get install -y --no-install-recommends build-essential git libaio-dev make openssh-client pdsh \
    && if ! command -v python3 >/dev/null; then \
           apt-get install -y --no-install-recommends python3 python3-dev python3-venv; \
       fi \
    && rm -rf /var/lib/apt/lists/*

RUN useradd --create-home --uid 10001 megacore && mkdir /app && chown megacore /app
USER megacore
WORKDIR /app

# Dependencies first: a change of Python code alone does not install them again.
COPY --chown=megacore pyproject.toml setup.py constraints.txt MANIFEST.in README.md LICENSE Makefile ./
COPY --chown=megacore scripts/venv.sh scripts/venv.sh
COPY --chown=megacore megacore megacore
RUN make venv PYTHON="$(command -v python3)" && rm -rf ~/.cache/pip

COPY --chown=megacore . .
# COPY sets new times: what was installed above is what is here.
RUN touch .venv/.installed && mkdir -p workspace

# docker build --build-arg GIT_COMMIT=$(git rev-parse HEAD) …: the image holds no .git, and MLflow notes the commit.
ARG GIT_COMMIT=""
ENV MEGACORE_WORKSPACE=/app/workspace MEGACORE_GIT_COMMIT=${GIT_COMMIT} DO_NOT_TRACK=true
VOLUME /app/workspace
CMD ["make", "pretrain"]
