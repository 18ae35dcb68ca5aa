# The server in a container; docs/docker.md says how to run it.
FROM python:3.13-slim AS build
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.13-slim
COPY --from=build /wheels /tmp/wheels
COPY constraints.txt /tmp/wheels/
RUN pip install --no-cache-dir --only-binary :all: --constraint /tmp/wheels/constraints.txt /tmp/wheels/*.whl \
    && rm -r /tmp/wheels \
    && useradd --create-home --uid 1000 localllm \
    && install --directory --owner localllm --group localllm /data /cache
USER 1000
WORKDIR /home/localllm
# Models and chats are in /data, compiled kernels and cached prompts in /cache. Port 11434 is open to other machines, so
# the server refuses to start without a key.
ENV XDG_DATA_HOME=/data XDG_CACHE_HOME=/cache LOCALLLM_HOST=0.0.0.0
VOLUME ["/data", "/cache"]
EXPOSE 11434
HEALTHCHECK --interval=1m --timeout=1m --start-period=5m CMD ["python", "-c", \
    "from localllm.front.local_server import local_server; local_server().ask('GET', '/health/ready?model=builtin')"]
ENTRYPOINT ["localllm"]
CMD ["serve"]
