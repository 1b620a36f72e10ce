#!/bin/sh
# make demo: deploy one prefill and one decode replica on this machine, send one prompt, take everything down.
set -eu
cd "$(dirname "$0")/.."
trap 'cluster down --name demo' EXIT
cluster deploy deploy/topologies/1P1D.yaml --name demo
echo
echo "> What is the capital of France? Answer in one word."
cluster generate --name demo --chat --temperature 0 --account "What is the capital of France? Answer in one word."
echo
