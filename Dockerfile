# Two images of one server. docs/production.md builds and runs them; `make image-check` does so without a daemon.
#
#   docker build --target trtllm -t lookahead:trtllm-0.2.0 .    # TensorRT-LLM engines, on NVIDIA's Triton image
#   docker build --target cpu -t lookahead:cpu-0.2.0 .          # the demo models, on a CPU
#
# In both the package lies in /opt/lookahead, with the specs, templates and demo models that a wheel carries. It is the working folder
# too: engines/built/ and checkpoints/ are there, and specs of one's own go into engines/. One .pth file makes it importable, for
# Triton's Python stubs too, which read no PYTHONPATH. Nothing outside /tmp and /dev/shm is written while serving.
# HEALTHCHECK needs the Docker image format (buildah and podman: --format docker).

# Both may be given as arguments. The first is by digest, since what a tag names can change. Its tag fixes TensorRT-LLM at 1.2.1, the last release that serves compiled engines.
ARG BASE=nvcr.io/nvidia/tritonserver:26.07-trtllm-python-py3@sha256:b097871d05da2e63178d1b91fd1199bc395f653ade4f05ab227c463ea7437007
ARG PYTHON_IMAGE=docker.io/library/python:3.11-slim-bookworm


# ---------------------------------------------------------------------------------------------------------------- cpu: packages
FROM ${PYTHON_IMAGE} AS cpu-packages
# pip's own settings, where packages come from elsewhere: an index, a certificate, a folder of wheels.
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
# PyPI's torch for Linux is the CUDA build, gigabytes larger. Empty: take torch from where all else comes from.
ARG TORCH_INDEX_URL=https://download.pytorch.org/whl/cpu
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PIP_CONSTRAINT=/src/constraints.txt \
    PIP_BUILD_CONSTRAINT=/src/constraints.txt
WORKDIR /src
# pip stays in an environment of its own, so that the one that is shipped never has it.
RUN python3 -m venv /opt/pip \
    && python3 -m venv --without-pip /opt/venv \
    && echo /opt/lookahead > "$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lookahead.pth"
COPY constraints.txt ./
RUN /opt/pip/bin/pip --python /opt/venv/bin/python install --no-deps ${TORCH_INDEX_URL:+--index-url "${TORCH_INDEX_URL}"} torch
# The dependencies without the package, so that this layer changes only with them and their pins.
COPY pyproject.toml ./
RUN /opt/pip/bin/python -c "import tomllib; file = tomllib.load(open('pyproject.toml', 'rb')); of = file['project']; \
      extras = file['tool']['lookahead']['cpu-image-extras']; \
      print(*of['dependencies'], *(one for extra in extras for one in of['optional-dependencies'][extra]), sep='\n')" > requirements.txt \
    && /opt/pip/bin/pip --python /opt/venv/bin/python install --requirement requirements.txt \
    && packages="$(/opt/venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" \
    && rm -rf "${packages}"/torch/include "${packages}"/torch/test "${packages}"/torch/share \
    && find "${packages}/torch/bin" -type f ! -name torch_shm_manager -delete \
    && find "${packages}" -name '*.a' -delete


# ----------------------------------------------------------------------------------------------------------------- cpu: our own
FROM cpu-packages AS cpu-app
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
# The README is in the package's description alone, so an empty one stands in.
COPY setup.py LICENSE ./
COPY client/pyproject.toml client/README.md client/
COPY client/src client/src
COPY lr_backend lr_backend
COPY model_repository model_repository
COPY engines engines
COPY demo demo
RUN touch README.md \
    && /opt/pip/bin/pip --python /opt/venv/bin/python install --no-deps --target /opt/lookahead . ./client \
    && ls /opt/lookahead/lr_backend/embedded/native/_decoder*.so /opt/lookahead/lr_backend/serve/_arguments*.so
COPY build_engines.py /opt/lookahead/
# Rendered here, so that a server on a read-only file system finds it fresh and writes nothing.
WORKDIR /opt/lookahead
RUN bin/lookahead build --spec demo


# ------------------------------------------------------------------------------------------------------------------- cpu: image
FROM ${PYTHON_IMAGE} AS cpu
ARG VERSION=0.2.0
ARG REVISION=unknown
ARG PYTHON_IMAGE
LABEL org.opencontainers.image.title="lookahead-cpu" \
      org.opencontainers.image.description="Lookahead Reasoning behind Triton: the demo models on a CPU" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${PYTHON_IMAGE}"
# libgomp1: the decoder in C; the others: tritonserver and its stubs.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends libexpat1 libgomp1 libstdc++6 zlib1g \
    && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 1000 --user-group --no-create-home --home-dir /tmp --shell /usr/sbin/nologin lookahead
COPY --from=cpu-packages /opt/venv /opt/venv
COPY --from=cpu-app /opt/lookahead /opt/lookahead
COPY deploy/openai.toml /opt/lookahead/
ENV PATH=/opt/venv/bin:/opt/lookahead/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin \
    HOME=/tmp \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /opt/lookahead
USER 1000:1000
EXPOSE 8000 8001 8002 9000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=6s --start-period=180s --retries=3 \
    CMD ["python3", "-I", "-S", "/opt/lookahead/lr_backend/serve/health.py"]
# Triton's log goes where a container's log belongs; a later option wins over the same one here.
ENTRYPOINT ["lookahead", "serve", "--host", "0.0.0.0", "--openai-host", "0.0.0.0", "--openai-settings", \
            "/opt/lookahead/openai.toml", "--log-file", "/dev/stderr"]
CMD ["--spec", "demo"]


# -------------------------------------------------------------------------------------------------------------- trtllm: our own
FROM ${BASE} AS trtllm-app
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL
ARG PIP_FIND_LINKS
ARG PIP_CERT
# constraints.txt pins the build's setuptools alone here: nothing of it is installed. With no compiler the decoder in C is left
# out; engines here are TensorRT-LLM's.
ENV PIP_NO_CACHE_DIR=1 \
    PIP_DISABLE_PIP_VERSION_CHECK=1 \
    PIP_ROOT_USER_ACTION=ignore \
    PIP_CONSTRAINT= \
    PIP_BUILD_CONSTRAINT=/src/constraints.txt \
    CC=false
WORKDIR /src
# What the image lacks, beside its packages and behind them on the path: where it has one of its own, that one is used.
COPY deploy/requirements-trtllm.txt deploy/
RUN python3 -m pip install --no-deps --target /opt/lookahead/lib --requirement deploy/requirements-trtllm.txt
# What the LLM API needs before the image's own, in a folder that the engines of that runtime alone look into.
COPY deploy/requirements-llmapi.txt deploy/
RUN python3 -m pip install --no-deps --target /opt/lookahead/lib-llmapi --requirement deploy/requirements-llmapi.txt
COPY constraints.txt pyproject.toml setup.py LICENSE ./
COPY client/pyproject.toml client/README.md client/
COPY client/src client/src
COPY lr_backend lr_backend
COPY model_repository model_repository
COPY engines engines
COPY demo demo
RUN touch README.md \
    && PIP_CONSTRAINT=/src/constraints.txt python3 -m pip install --no-deps --target /opt/lookahead . ./client
COPY build_engines.py /opt/lookahead/
# Volumes: compiled engines and rendered repositories, written by a build, read by a server; and the source checkpoints.
RUN mkdir -p /opt/lookahead/engines/built /opt/lookahead/checkpoints && chown 1000:1000 /opt/lookahead/engines/built


# ---------------------------------------------------------------------------------------------------------------- trtllm: image
FROM ${BASE} AS trtllm
ARG VERSION=0.2.0
ARG REVISION=unknown
ARG BASE
LABEL org.opencontainers.image.title="lookahead-trtllm" \
      org.opencontainers.image.description="Lookahead Reasoning behind Triton: TensorRT-LLM engines" \
      org.opencontainers.image.version="${VERSION}" \
      org.opencontainers.image.revision="${REVISION}" \
      org.opencontainers.image.licenses="Apache-2.0" \
      org.opencontainers.image.base.name="${BASE}"
# By ssh mpirun reaches the further nodes of a role that spans several. No ssh server runs unless `lookahead node` starts one, and the
# host keys that the package made would be the same in every container.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends openssh-client openssh-server \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
COPY --from=trtllm-app /opt/lookahead /opt/lookahead
COPY deploy/openai.toml /opt/lookahead/
ENV PATH=${PATH}:/opt/lookahead/bin \
    HOME=/tmp \
    CUDA_MPS_PIPE_DIRECTORY=/tmp/mps \
    CUDA_MPS_LOG_DIRECTORY=/tmp/mps \
    PYTHONDONTWRITEBYTECODE=1 \
    PYTHONUNBUFFERED=1
WORKDIR /opt/lookahead
# `lookahead version` imports all that the command needs: a package that is missing ends the build here.
RUN printf '%s\n' /opt/lookahead /opt/lookahead/lib \
      > "$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/lookahead.pth" \
    && lookahead version
# The Triton image's own user, triton-server.
USER 1000:1000
EXPOSE 8000 8001 8002 9000
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=6s --start-period=1080s --retries=3 \
    CMD ["python3", "-I", "-S", "/opt/lookahead/lr_backend/serve/health.py"]
# Engines that share a card run at once by CUDA MPS, else in turns. Its daemon serves one user of one container, so it needs nothing
# of the host: the container toolkit brings the program. Where there is none, the server says what that costs, and goes on.
ENTRYPOINT ["lookahead", "serve", "--host", "0.0.0.0", "--openai-host", "0.0.0.0", "--openai-settings", \
            "/opt/lookahead/openai.toml", "--log-file", "/dev/stderr", "--start-mps"]
CMD ["--spec", "qwen3-32b"]
