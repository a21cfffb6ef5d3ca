"""Flags that vLLM's users give out of habit and that we do not have: what to do instead.

Used by `option_groups`, in place of click's "no such option". A test walks the list of all flags of
vLLM (`tests/data/vllm_flags.json`): each is a flag of ours, or has its advice here, and not both.
"""

from collections.abc import Collection, Sequence

_ADVICE = {
    "--additional-config": "does not exist: there are no plugins that could read it",
    "--aggregate-engine-logging": "is not needed: /metrics has each engine",
    "--anthropic-disabled-thinking-effort": "does not exist; the chat template decides",
    "--attention-config": "does not exist; --attention-backend chooses among those there are",
    "--aux-output-config": "does not exist: answers are text",
    "--chat-template-content-format": "is not needed: contents reach the template as texts or"
    " parts, as they came",
    "--code-revision": "does not exist, on purpose: code of a model's repository is not run",
    "--config": "does not exist; flags and environment are all there is",
    "--custom-histogram-buckets": "does not exist: the buckets are fixed",
    "--default-chat-template-kwargs": "does not exist yet; requests have chat_template_kwargs",
    "--device-ids": "does not exist; CUDA_VISIBLE_DEVICES chooses devices",
    "--disable-access-log-for-endpoints": "is not needed: probes and /metrics have no lines in the"
    " log",
    "--disable-log-requests": "is not needed: requests are one line each, without their text",
    "--disable-log-stats": "is not needed: statistics are at /metrics, not in the log",
    "--disable-uvicorn-access-log": "does not exist; --log-level warning leaves requests out",
    "--distributed-executor-backend": "does not exist: workers are processes beside their engine,"
    " and --data-parallel-backend says where engines run (mp or ray)",
    "--download-dir": "does not exist; HF_HOME moves downloads, RAYWIRE_CACHE_DIR conversions",
    "--enable-force-include-usage": "does not exist; requests have stream_options.include_usage",
    "--enable-log-requests": "is not needed: requests are one line each, without their text",
    "--enable-logging-iteration-details": "does not exist; /metrics counts tokens and requests",
    "--enable-lora": "does not exist yet",
    "--enable-offline-docs": "is not needed: /docs loads nothing from elsewhere",
    "--enable-per-request-metrics": "does not exist; /metrics has what all requests took",
    "--enable-prompt-embeds": "does not exist: prompts are texts or token ids",
    "--enable-prompt-tokens-details": "is not needed: usage always has prompt_tokens_details",
    "--enable-request-id-headers": "is not needed: x-request-id is on every answer",
    "--enable-scale-out": "does not exist: prompts are rendered and answered by one server; its"
    " routes that end in /render are always there",
    "--enable-server-load-tracking": "is not needed: /load always counts",
    "--enable-ssl-refresh": "does not exist: a new certificate is read at the next start",
    "--enable-tokenizer-info-endpoint": "does not exist: the tokenizer is in the model's folder",
    "--exclude-tools-when-tool-choice-none": "is not needed: the model does not see them then",
    "--fail-on-environ-validation": "is not needed: a wrong variable of ours ends the start",
    "--fingerprint-mode": "does not exist: answers have no fingerprint of the server",
    "--gpu-memory-utilization": "does not exist; --kv-cache-memory-bytes says what the KV cache may"
    " take (unless given, 90% of the memory that is free after loading)",
    "--guided-decoding-backend": "does not exist: structured output has one back end, llguidance",
    "--hf-token": "does not exist; HF_TOKEN in the environment is used for downloads",
    "--kv-cache-dtype": "does not exist: the KV cache has the numbers of --dtype",
    "--kv-events-config": "does not exist: no cache events are published",
    "--load-format": "is not needed: safetensors and GGUF are told apart by their files",
    "--log-error-stack": "is not needed: the log has the traceback of what nobody foresaw",
    "--logprobs-mode": "does not exist: log probabilities are the model's own, before anything that"
    " a request changes (vLLM's raw_logprobs)",
    "--max-log-len": "is not needed: no text of a request is logged",
    "--max-logprobs": "does not exist; requests may ask for 20, or for 128 tokens by their ids"
    " (logprob_token_ids)",
    "--max-num-scheduled-tokens": "does not exist; --max-num-batched-tokens bounds a step",
    "--middleware": "does not exist, on purpose: no code of others runs in the server; put a proxy"
    " in front",
    "--optimization-level": "does not exist: nothing is compiled but our own kernels, once",
    "--performance-mode": "does not exist; --max-num-seqs and --max-num-batched-tokens are what"
    " trades one request's speed for that of all",
    "--prefix-caching-hash-algo": "does not exist: blocks have one kind of hash",
    "--profiler-config": "does not exist; `raywire bench` measures",
    "--quantization-config": "does not exist; --quantization int8 needs none",
    "--reasoning-config": "does not exist; --reasoning-parser knows a family's markers",
    "--renderer-num-workers": "does not exist; --api-server-count is what makes text faster",
    "--response-role": "does not exist: answers are the assistant's",
    "--return-sampling-mask": "does not exist; logprobs say what a token was chosen among",
    "--revision": "does not exist yet; download that revision and give its folder",
    "--show-hidden-metrics-for-version": "does not exist: no metrics are hidden",
    "--ssl-ciphers": "does not exist: TLS 1.2 and newer, with OpenSSL's own choice of ciphers",
    "--sse-keep-alive-interval": "does not exist: streams hold nothing but events",
    "--stream-interval": "does not exist; requests have a stream_interval",
    "--structured-outputs-config": "does not exist: structured output has one back end, llguidance,"
    " and requests say how JSON is written",
    "--swap-space": "does not exist: what is preempted is computed again",
    "--tokenizer": "does not exist; the tokenizer comes from the model's folder",
    "--tokenizer-mode": "does not exist: tokenizers are always the fast ones",
    "--tokenizer-revision": "does not exist; the tokenizer comes from the model's folder",
    "--tokens-only": "does not exist: every server speaks text; prompts may be token ids",
    "--tool-parser-plugin": "does not exist; --tool-call-parser has the parsers that there are",
    "--tool-server": "does not exist: the server calls no tools, its clients do",
    "--tool-strict-level": "does not exist: a tool is bound where it says strict",
    "--trust-remote-code": "does not exist, on purpose: code of a model's repository is not run",
    "--uds": "does not exist; --host and --port say where to listen",
    "--uvicorn-log-level": "does not exist; --log-level is for all",
}

_ALIKE = {
    "does not exist yet: there is no speculative decoding": """
        --num-speculative-tokens --per-request-spec-decode-metrics --spec-method --spec-model
        --spec-tokens --speculative-config --speculative-model""",
    "does not exist: prompts and answers are text": """
        --allowed-local-media-path --allowed-media-domains --default-mm-loras
        --disable-chunked-mm-input --ec-manager-config --ec-transfer-config --enable-mm-embeds
        --interleave-mm-strings --language-model-only --limit-mm-per-prompt --media-io-kwargs
        --mm-device-do-normalize --mm-encoder-attn-backend --mm-encoder-attn-dtype
        --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-margin
        --mm-encoder-fp8-scale-save-path --mm-encoder-only --mm-encoder-tp-mode
        --mm-hasher-algorithm --mm-ipc-gpu-memory-gb --mm-processor-cache-gb
        --mm-processor-cache-type --mm-processor-device --mm-processor-kwargs
        --mm-shm-cache-max-object-size-mb --mm-tensor-ipc --skip-mm-profiling
        --trust-request-mm-kwargs --video-pruning-method --video-pruning-rate""",
    "does not exist: there are no LoRA adapters yet": """
        --enable-mixed-moe-lora-format --enable-moe-shared-loras --enable-tower-connector-lora
        --fully-sharded-loras --lora-dtype --lora-modules --lora-target-modules --max-cpu-loras
        --max-lora-cls-labels --max-lora-rank --max-loras --specialize-active-lora""",
    "does not exist: no models with experts are served": """
        --all2all-backend --dbo-decode-token-threshold --dbo-prefill-token-threshold --enable-dbo
        --enable-ep-weight-filter --enable-eplb --enable-expert-parallel
        --enable-return-routed-experts --eplb-config --expert-placement-strategy --moe-backend
        --ubatch-size""",
    "does not exist: no models of that kind are served": """
        --diffusion-config --enable-mamba-cache-stochastic-rounding
        --enable-mamba-shared-prefix-checkpoint --engram-config --gdn-prefill-backend
        --kda-decode-backend --kda-prefill-backend --kv-sharing-fast-prefill --mamba-backend
        --mamba-block-size --mamba-cache-dtype --mamba-cache-mode --mamba-cache-philox-rounds
        --mamba-ssm-cache-dtype --mamba-ssu-algorithm --replayssm-buffer-len
        --sparse-indexer-topk-backend --swa-bounded-replay --use-replayssm""",
    "does not exist: models here generate text": """
        --convert --enable-flash-late-interaction --io-processor-plugin --pooler-config --runner
        --task""",
    "does not exist: models run as they are written, with kernels of ours; nothing is compiled": """
        --compilation-config --enable-flashinfer-autotune --ir-op-priority --jit-monitor-mode
        --jit-monitor-verbose --kernel-config""",
    "does not exist: decodes of up to 512 requests are captured; --enforce-eager captures none": """
        --cudagraph-capture-sizes --cudagraph-metrics --max-cudagraph-capture-size""",
    "does not exist: weights and KV cache stay in the memory that they are computed in": """
        --cpu-offload-gb --cpu-offload-params --enable-cumem-allocator --enable-sleep-mode
        --kv-offloading-backend --kv-offloading-size --offload-backend --offload-group-size
        --offload-num-in-group --offload-params --offload-prefetch-step
        --sleep-mode-offload-cudagraph --sleep-preserve-parameter-names""",
    "does not exist: prompt and answer are computed in one place": "--kv-transfer-config",
    "does not exist: Ray places ranks on other nodes (--data-parallel-backend ray)": """
        --data-parallel-address --data-parallel-rpc-port --headless --master-addr --master-port
        --nnodes --node-rank""",
    "does not exist: --data-parallel-rank makes a server of one rank, to be balanced outside": """
        --data-parallel-external-lb --data-parallel-multi-port-external-lb
        --data-parallel-supervisor-port --dp-supervisor-probe-failure-threshold
        --dp-supervisor-probe-interval-s --dp-supervisor-probe-timeout-s""",
    "does not exist: the number of ranks is that of the start, and the death of one ends all": """
        --elastic-ep-max-dp-size --enable-elastic-ep --enable-fault-tolerance
        --fault-tolerance-config""",
    "does not exist: the ranks of a model are -tp, -pp and -dp": """
        --cp-kv-cache-interleave-size --dcp-comm-backend --dcp-kv-cache-interleave-size
        --dcp-q-replicate --decode-context-parallel-size --enable-batch-sharded-sampling
        --enable-hc-sp --prefill-context-parallel-size""",
    "does not exist: how processes talk to each other is not for choosing": """
        --cpu-distributed-timeout-seconds --disable-custom-all-reduce
        --disable-nccl-for-dp-synchronization --distributed-timeout-seconds --dp-sync-interval
        --enable-nccl-comm-suspend --enable-shm-tensor-arena""",
    "does not exist, on purpose: no code of others runs in the server": """
        --logits-processors --model-class-overrides --reasoning-parser-plugin --scheduler-cls
        --worker-cls --worker-extension-cls""",
    "does not exist: a model is what its folder says": """
        --allow-deprecated-quantization --config-format --disable-sliding-window
        --hf-config-path --hf-overrides --model-impl""",
    "does not exist: weights are read in one way": """
        --ignore-patterns --max-parallel-loading-workers --model-loader-extra-config
        --pt-load-map-location --safetensors-load-strategy --safetensors-prefetch-block-size
        --safetensors-prefetch-num-threads --use-tqdm-on-load""",
    "does not exist: the KV cache has one kind of block, freed by age": """
        --disable-cascade-attn --disable-hybrid-kv-cache-manager --kv-cache-dtype-skip-layers
        --prefix-cache-retention-interval --prefix-match-unit""",
    "does not exist: a request waits for its turn, and how many run is --max-num-seqs": """
        --long-prefill-token-threshold-adaptive --max-num-active-seqs --prefill-schedule-interval
        --scheduler-reserve-full-isl --watermark""",
    "does not exist; /metrics and `raywire bench` say where time goes": """
        --collect-detailed-traces --enable-layerwise-nvtx-tracing --enable-mfu-metrics
        --kv-cache-metrics --kv-cache-metrics-sample --otlp-traces-endpoint
        --ray-workers-use-nsight""",
    "does not exist; --log-level says how much is logged": """
        --log-config-file --logging-config""",
    "does not exist: no text of a request or an answer is logged": """
        --enable-log-deltas --enable-log-outputs""",
    "does not exist: limits of HTTP are fixed": """
        --h11-max-header-count --h11-max-incomplete-event-size""",
    "does not exist: there is HTTP only": "--grpc --grpc-port",
    "does not exist: Cohere's API is not served": "--cohere-format --cohere-is-reasoning-model",
    "does not exist: no route takes weights": "--weight-transfer-config",
    "does not exist: answers have no watermark": "--watermark-config",
    "does not exist; `taskset` and `numactl` bind a command and all its processes": """
        --numa-bind --numa-bind-cpus --numa-bind-nodes""",
    "does not exist: every server has its model's tokenizer": "--skip-tokenizer-init",
    "does not exist: noise is drawn in one way": "--enable-trace-replay --use-fp64-gumbel",
}
"""The same advice for many."""

_SAME = {
    "--device-memory-utilization": "--gpu-memory-utilization",
    "--fingerprint-value": "--fingerprint-mode",
    "-O": "--optimization-level",
    "-ac": "--attention-config",
    "-asc": "--api-server-count",
    "-cc": "--compilation-config",
    "-dc": "--diffusion-config",
    "-dcp": "--decode-context-parallel-size",
    "-dpa": "--data-parallel-address",
    "-dpb": "--data-parallel-backend",
    "-dpe": "--data-parallel-external-lb",
    "-dph": "--data-parallel-hybrid-lb",
    "-dpl": "--data-parallel-size-local",
    "-dpm": "--data-parallel-multi-port-external-lb",
    "-dpn": "--data-parallel-rank",
    "-dpp": "--data-parallel-rpc-port",
    "-dpr": "--data-parallel-start-rank",
    "-ep": "--enable-expert-parallel",
    "-n": "--nnodes",
    "-pcp": "--prefill-context-parallel-size",
    "-q": "--quantization",
    "-r": "--node-rank",
    "-sc": "--speculative-config",
}
"""Other names of one flag."""

KNOWN = _ADVICE | {flag: text for text, flags in _ALIKE.items() for flag in flags.split()}
"""What to say of each flag, after its name."""


def advice(flag: str, args: Sequence[str], ours: Collection[str]) -> str | None:
    """What to tell somebody who gave a flag that we lack, None if we know nothing better.

    Args:
        flag: as click names it: without its value; of what begins with one dash, the first letter.
        args: the whole command line.
        ours: the flags that there are.
    """
    given = flag if flag.startswith("--") else _short(flag, args)
    dashed = given.replace("_", "-")
    if dashed in ours:
        return f"{given} is written {dashed}"
    if dashed == "--model":
        return f"MODEL is the argument: raywire serve {_value(flag, args)}"
    name = dashed.partition(".")[0]  # --compilation-config.level is a part of that one
    name = _SAME.get(name, name)
    if name in ours:
        return f"{given} is written {name}"
    name = name if name in KNOWN else name.replace("--no-", "--", 1)
    return f"{given} {KNOWN[name]}" if name in KNOWN else None


def _short(letter: str, args: Sequence[str]) -> str:
    """The whole of a flag with one dash, as vLLM's users may have written it."""
    for arg in args:
        if arg.startswith(letter):
            name = arg.partition("=")[0].partition(".")[0]
            return name if name in _SAME else letter
    return letter


def _value(flag: str, args: Sequence[str]) -> str:
    """What follows `flag`, or the word MODEL."""
    for arg, following in zip(args, [*args[1:], "MODEL"], strict=True):
        name, sign, value = arg.partition("=")
        if name == flag:
            return value if sign else following
    return "MODEL"
