#!/bin/sh
# On a machine with a GPU: run.sh OUT. Needs the NVIDIA driver, NVRTC and python3; for the peers,
# its torch and triton. Eight minutes.
exec python3 "$(dirname "$0")/run.py" "$@"
