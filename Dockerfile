# virnuc in a container. docs/how-to/container.md says how to build and run it.
#
#   docker build --target cpu  --tag virnuc:cpu  --build-arg TORCH_INDEX=ADDRESS-OF-PYTORCHS-CPU-WHEELS .
#   docker build --target cuda --tag virnuc:cuda .

# The wheel, from the sources in this folder alone.
FROM python:3.12.12-slim-bookworm AS wheel
WORKDIR /source
COPY pyproject.toml README.md LICENSE ./
COPY virnuc_core ./virnuc_core
COPY tasks ./tasks
COPY flows ./flows
COPY deployments ./deployments
COPY virnuc_cli ./virnuc_cli
RUN python -m pip wheel --no-cache-dir --no-deps --wheel-dir /wheel .

# What both targets have but for torch: a user without rights, and places for data and for what outlives a run.
FROM python:3.12.12-slim-bookworm AS base
RUN useradd --create-home --home-dir /var/lib/virnuc --uid 10001 virnuc \
 && mkdir /data \
 && chmod 1777 /var/lib/virnuc /data
ENV VIRNUC_HOME=/var/lib/virnuc \
    HF_HOME=/var/lib/virnuc/huggingface \
    HOME=/var/lib/virnuc \
    PYTHONUNBUFFERED=1
# As Ctrl-C: the run ends in order.
STOPSIGNAL SIGINT
COPY constraints.txt /tmp/constraints.txt
COPY --from=wheel /wheel /tmp/wheel

FROM base AS cpu
# PyTorch's index of wheels without CUDA; empty takes what pip finds by itself, which runs on the CPU as well.
ARG TORCH_INDEX=""
RUN python -m pip install --no-cache-dir --constraint /tmp/constraints.txt ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} /tmp/wheel/*.whl \
 && rm -r /tmp/wheel /tmp/constraints.txt
USER virnuc
WORKDIR /data
VOLUME ["/var/lib/virnuc"]
ENTRYPOINT ["virnuc"]
CMD ["--help"]

FROM base AS cuda
# Triton compiles its launchers with gcc when a kernel is first used.
RUN apt-get update \
 && apt-get install --yes --no-install-recommends gcc libc6-dev \
 && rm -rf /var/lib/apt/lists/*
RUN python -m pip install --no-cache-dir --constraint /tmp/constraints.txt "$(echo /tmp/wheel/*.whl)[gpu]" \
 && rm -r /tmp/wheel /tmp/constraints.txt
ENV NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER virnuc
WORKDIR /data
VOLUME ["/var/lib/virnuc"]
ENTRYPOINT ["virnuc"]
CMD ["--help"]
