#!/bin/sh
# Writes the Python stubs beside the .proto files: proto/generate.sh [python]
set -eu
cd "$(dirname "$0")/.."
"${1:-python3}" -m grpc_tools.protoc -Idraftd/proto=proto \
    --python_out=src --pyi_out=src --grpc_python_out=src --mypy_grpc_out=quiet:src \
    draftd/proto/draftd/v1/draftd.proto
