# A server of runs, or the node of a site, without a GPU and without root:
#
#   docker build -t hyperfed .
#   docker run --rm hyperfed list methods
#   docker run --rm -v /srv/clinic:/data:ro -v hyperfed-state:/state hyperfed \
#     node --data /data/clinic.parquet --state /state
#   docker run --rm -v hyperfed-runs:/federation hyperfed run pefll   # /federation/runs/pefll/...
#
# Another PyTorch: docker build --build-arg TORCH_ARGS="--index-url ..." -t hyperfed .
FROM python:3.11-slim

ARG TORCH_ARGS="--index-url https://download.pytorch.org/whl/cpu"
ENV PYTHONDONTWRITEBYTECODE=1 PIP_NO_CACHE_DIR=1 FLWR_TELEMETRY_ENABLED=0
RUN useradd --uid 10001 --create-home hyperfed && install -d -o hyperfed -m 0700 /state /federation

COPY constraints.txt pyproject.toml README.md LICENSE /build/
COPY src /build/src
COPY experiments /build/experiments
RUN pip install -c /build/constraints.txt ${TORCH_ARGS} torch \
 && pip install -c /build/constraints.txt "/build[flower]" \
 && rm -r /build

USER hyperfed
WORKDIR /federation
VOLUME ["/state", "/federation"]
ENTRYPOINT ["hyperfed"]
CMD ["--help"]
