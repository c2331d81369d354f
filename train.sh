#!/usr/bin/env bash
# The main job, with all that it needs: trains a dense and a block-sparse LSTM of the same size on real text.
# Arguments go to `python -m experiments.lstm.train`, e.g. `./train.sh --resume` or `./train.sh data=PATH`.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
./setup.sh
exec build/venv/bin/python -m experiments.lstm.train "$@"
