# The command alone: no torch, no GPU. docker build -t memfit . && docker run memfit gpus
FROM python:3.12-slim
COPY pyproject.toml README.md LICENSE /memfit/
COPY src /memfit/src
RUN pip install --no-cache-dir /memfit && useradd --create-home memfit
USER memfit
WORKDIR /home/memfit
ENTRYPOINT ["memfit"]
CMD ["--help"]
