# Images of the trainers, on CPUs and on NVIDIA GPUs, and of the servers of a team:
#   docker build --target cpu -t megacore:cpu .
#   docker build --target cuda -t megacore:cuda .
#   docker build --target servers -t megacore:servers .
# The quickstart in a container: docker run --rm -v megacore:/app/workspace megacore:cpu make pretrain
# On GPUs: docker run --rm --gpus all --ipc host -v megacore:/app/workspace megacore:cuda make pretrain CONF=gpt2-345m
# Several trainers and the servers: docker-compose.yml. Images contain no keys and no passwords.
#
# torch's wheel on PyPI includes CUDA's libraries. For a smaller CPU image, use the CPU wheels of PyTorch's own index:
# --build-arg PIP_EXTRA_INDEX_URL=…
ARG CPU_BASE=python:3.11-slim-bookworm
ARG CUDA_BASE=nvidia/cuda:13.0.1-devel-ubuntu24.04

# Inputs of the installation: a change of other Python code does not trigger a new installation.
FROM scratch AS inputs
COPY pyproject.toml setup.py constraints.txt MANIFEST.in README.md LICENSE Makefile /
COPY scripts/venv.sh /scripts/
COPY megacore/__init__.py megacore/py.typed /megacore/
COPY megacore/data/*.cpp megacore/data/*.h /megacore/data/
COPY megacore/kernels/cpu/*.cpp megacore/kernels/cpu/*.h /megacore/kernels/cpu/

FROM ${CPU_BASE} AS cpu-system
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        build-essential git iproute2 libaio-dev make openssh-client openssh-server rsync \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 10001 --shell /bin/bash --password '*' megacore \
    && install --directory --owner megacore --group megacore /app /app/workspace

FROM ${CUDA_BASE} AS cuda-system
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN apt-get update \
    && apt-get install --yes --no-install-recommends \
        build-essential git iproute2 libaio-dev make openssh-client openssh-server python3 python3-dev python3-venv rsync \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_* \
    && useradd --create-home --uid 10001 --shell /bin/bash --password '*' megacore \
    && install --directory --owner megacore --group megacore /app /app/workspace

# Prefect's and MLflow's servers, in the same versions as the trainers, without torch.
FROM ${CPU_BASE} AS servers
RUN useradd --create-home --uid 10001 --password '*' megacore \
    && install --directory --owner megacore --group megacore /app /artifacts
WORKDIR /app
COPY constraints.txt deploy/mlflow_users.ini deploy/docker/server.sh ./
RUN --mount=type=cache,target=/var/cache/pip \
    PIP_CACHE_DIR=/var/cache/pip python3 -m pip install --root-user-action ignore -c constraints.txt \
        fastapi flask-wtf mlflow prefect 'psycopg[binary]'
USER megacore
ENV DO_NOT_TRACK=true MLFLOW_DISABLE_TELEMETRY=true MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false \
    PREFECT_SERVER_ANALYTICS_ENABLED=false PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT=false
VOLUME /artifacts
ENTRYPOINT ["/app/server.sh"]

FROM cuda-system AS cuda
USER megacore
WORKDIR /app
COPY --from=inputs --chown=megacore:megacore / ./
RUN --mount=type=cache,target=/var/cache/pip,uid=10001,gid=10001 \
    PIP_CACHE_DIR=/var/cache/pip make venv PYTHON=python3
COPY --chown=megacore:megacore . .
# COPY sets new file times; the stamp marks the installation above as up to date.
RUN touch .venv/.installed
# docker build --build-arg GIT_COMMIT=$(git rev-parse HEAD) …: MLflow records the commit, and the image has no .git.
ARG GIT_COMMIT=""
ENV DO_NOT_TRACK=true MEGACORE_GIT_COMMIT=${GIT_COMMIT} MEGACORE_WORKSPACE=/app/workspace
VOLUME /app/workspace
CMD ["make", "pretrain"]

# The default target of a build.
FROM cpu-system AS cpu
ARG PIP_EXTRA_INDEX_URL=""
USER megacore
WORKDIR /app
COPY --from=inputs --chown=megacore:megacore / ./
RUN --mount=type=cache,target=/var/cache/pip,uid=10001,gid=10001 \
    PIP_CACHE_DIR=/var/cache/pip make venv PYTHON=python3
COPY --chown=megacore:megacore . .
RUN touch .venv/.installed
ARG GIT_COMMIT=""
ENV DO_NOT_TRACK=true MEGACORE_GIT_COMMIT=${GIT_COMMIT} MEGACORE_WORKSPACE=/app/workspace
VOLUME /app/workspace
CMD ["make", "pretrain"]
