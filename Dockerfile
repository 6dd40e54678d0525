# howdah with its engine inside, and without a compiler (docs/how-to/containers.md)
FROM python:3.11-slim AS build
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev
WORKDIR /source
COPY constraints.txt pyproject.toml README.md LICENSE ./
COPY tools/wheel.py tools/
COPY howdah howdah/
RUN pip install --no-cache-dir -c constraints.txt setuptools wheel && python tools/wheel.py /wheels

FROM python:3.11-slim
# What pip is given to install a torch of your choice first; empty: the package index chooses.
ARG TORCH=""
COPY --from=build /source/constraints.txt /wheels/ /wheels/
RUN if [ -n "$TORCH" ]; then pip install --no-cache-dir -c /wheels/constraints.txt $TORCH; fi \
    && pip install --no-cache-dir -c /wheels/constraints.txt /wheels/*.whl
ENV HOWDAH_CACHE=/data/cache TORCHINDUCTOR_CACHE_DIR=/tmp/inductor
USER 1000:1000
WORKDIR /data
CMD ["howdah", "--help"]
