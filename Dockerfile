# One image for head and workers, so that Python, Ray and raywire are the same on all nodes.
#
#   docker build --build-arg EXTRAS=demo --tag raywire:demo .
#   docker run --rm -p 8000:8000 --shm-size 1g raywire:demo serve demo
#
# For GPUs let TORCH_INDEX be PyTorch's index of your CUDA version: its wheels bring the libraries, the node the driver.

ARG PYTHON=3.11
# What the manifests call rayVersion: `raywire render k8s --ray-version`.
ARG RAY=2.60.0

FROM python:${PYTHON}-slim-bookworm AS build
ARG RAY
ARG EXTRAS=""
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
WORKDIR /src
# The heavy half first: it changes least.
RUN pip install --extra-index-url "${TORCH_INDEX}" "torch==2.13.*" "ray[default]==${RAY}"
COPY pyproject.toml README.md LICENSE ./
COPY api api
COPY cluster cluster
COPY engine engine
COPY workers workers
# Its name is a folder, and its versions are in pyproject.toml.
# hadolint ignore=DL3013
RUN pip install ".${EXTRAS:+[${EXTRAS}]}"

FROM python:${PYTHON}-slim-bookworm
# A compiler builds the CPU kernels once, on the processor that they run on; curl and procps are what probes and hooks
# call; tini collects processes whose parents are gone. Debian keeps no versions but the newest of a release.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends curl g++ procps tini \
    && rm -rf /var/lib/apt/lists/* \
    && groupadd --gid 1000 raywire \
    && useradd --uid 1000 --gid 1000 --create-home raywire \
    && install -d -o 1000 -g 1000 /var/cache/raywire /tmp/ray
# Into the system's own folders: a login shell, which the operator may start Ray by, knows no other.
COPY --from=build /usr/local /usr/local
ENV RAYWIRE_CACHE_DIR=/var/cache/raywire \
    HF_HOME=/var/cache/raywire/huggingface \
    RAY_USAGE_STATS_ENABLED=0 \
    PYTHONUNBUFFERED=1
USER 1000:1000
WORKDIR /home/raywire
EXPOSE 8000
HEALTHCHECK --interval=10s --timeout=5s --start-period=10m --retries=6 \
    CMD ["curl", "-sf", "http://127.0.0.1:8000/live"]
ENTRYPOINT ["tini", "-g", "--", "raywire"]
CMD ["--help"]
