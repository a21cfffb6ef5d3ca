#!/usr/bin/env bash
# Makes everything in this folder but this file and the README. Run it in the root of a checkout, in an environment
# with raywire: `make manifests`. A test runs the same lines and compares.
set -euo pipefail

ray=2.60.0 # of the image: the Dockerfile has the same

for kind in rayjob raycluster; do
  # One engine on a laptop's kind or minikube: 4 vCPUs, 8 GiB.
  raywire render k8s demo --kind $kind -o k8s --overlay cpu-demo --image raywire:demo --ray-version $ray \
    --kv-cache-memory-bytes 256M --max-model-len 8192 --head-cpu 1.5 --worker-cpu 2 \
    --accept "cpu: a demo for one laptop; its processes wait for each other"
  # Four engines of two GPUs each, on two nodes.
  raywire render k8s Qwen/Qwen3-8B --kind $kind -o k8s --overlay gpu --ray-version $ray \
    --gpu -dp 4 -tp 2 --data-parallel-size-local 2
done
