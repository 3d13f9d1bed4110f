"""The result tables: every column with its type, unit, direction and meaning. One place.

Missing is null, never 0, NaN or -1. SI base units, named in the column suffix and in the field
metadata. Readers pass these schemas explicitly, so that files of older versions read as null.
"""

from __future__ import annotations

import pyarrow as pa

SCHEMA_VERSION = 1

_UNITS = {
    "_tok_per_s": "tok/s",
    "_req_per_s": "req/s",
    "_bytes_per_s": "B/s",
    "_rps": "req/s",
    "_s": "s",
    "_bytes": "B",
    "_w": "W",
    "_j": "J",
    "_c": "°C",
    "_hz": "Hz",
    "_ratio": "1",
    "_tokens": "tokens",
}

S, I16, I32, I64 = pa.string(), pa.int16(), pa.int32(), pa.int64()
F32, F64, B = pa.float32(), pa.float64(), pa.bool_()
DICT = pa.dictionary(pa.int32(), pa.string())
STRINGS = pa.list_(pa.string())
TIME = pa.timestamp("us", tz="UTC")


def unit_of(name: str) -> str:
    """The unit a column name's suffix stands for, or an empty string."""
    return next((unit for suffix, unit in _UNITS.items() if name.endswith(suffix)), "")


def _col(name: str, kind: pa.DataType, desc: str, better: str = "") -> pa.Field:
    meta = {"unit": unit_of(name), "better": better, "desc": desc}
    return pa.field(name, kind, metadata={k: v for k, v in meta.items() if v})


def _schema(*fields: pa.Field) -> pa.Schema:
    return pa.schema(list(fields), metadata={"llmlab_schema": str(SCHEMA_VERSION)})


LATENCIES = {
    "ttft": "time to first token from the scheduled arrival",
    "ttft_send": "time to first token from the hand-over to the backend",
    "queue": "hand-over until first scheduled",
    "itl": "inter-token gap, pooled over requests",
    "tpot": "time per output token after the first, per request",
    "max_stall": "longest inter-token gap of a request",
    "e2e": "scheduled arrival until last token",
    "dispatch_lag": "hand-over to the backend after the scheduled arrival",
    "step_decode": "wall time of pure decode steps",
    "step_prefill": "wall time of steps that carry prompt tokens",
}
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")


def _latency_columns() -> list[pa.Field]:
    return [
        column
        for key, desc in LATENCIES.items()
        for column in (
            *(_col(f"{key}_{stat}_s", F64, f"{stat} of: {desc}", "lower") for stat in STATISTICS),
            _col(f"{key}_n", I32, f"samples of: {desc}"),
        )
    ]


RUNS = _schema(
    # identity
    _col("run_id", S, "this attempt"),
    _col("run_key", S, "hash of config, code, hardware and repeat"),
    _col("config_hash", S, "hash of what is measured"),
    _col("code_hash", S, "hash of the code"),
    _col("hw_key", S, "hash of the device"),
    _col("experiment", S, "named set of runs"),
    _col("point_id", S, "config without repeat"),
    _col("repeat", I16, "which repeat of the whole process"),
    _col("attempt", I16, "how many earlier attempts had this run_key"),
    _col("order_in_block", I16, "place in the order of execution"),
    _col("block_id", S, "runs executed together"),
    _col("schema_version", I16, "of these tables"),
    # status
    _col("status", DICT, "ok, oom_gpu, oom_host, timeout, invalid_config, unsupported, ..."),
    _col("failed_phase", DICT, "phase in which it failed"),
    _col("error_type", S, "exception class"),
    _col("error_msg", S, "first 2,000 characters"),
    _col("exit_code", I32, "of the worker"),
    _col("signal", I32, "that ended the worker"),
    _col("log_path", S, "of the worker's output"),
    _col("valid", B, "no reason against believing the row"),
    _col("invalid_reasons", STRINGS, "why not"),
    _col("warnings", STRINGS, "what a reader should know"),
    # time
    _col("started_at", TIME, "start of the worker"),
    _col("finished_at", TIME, "end of the worker"),
    _col("load_s", F64, "weights and cache", "lower"),
    _col("cold_start_s", F64, "process start to ready", "lower"),
    _col("warmup_s", F64, "warm-up, outside every sample"),
    _col("warmup_requests", I32, "requests in the warm-up"),
    _col("measure_s", F64, "the window"),
    _col("total_s", F64, "the whole worker"),
    # config
    _col("cfg_json", S, "full resolved config"),
    _col("overrides", STRINGS, "as typed"),
    _col("model", S, "model config name"),
    _col("weights", S, "checkpoint or random"),
    _col("model_revision", S, "revision or content hash of the weights"),
    _col("n_params", I64, "parameters"),
    _col("n_layers", I32, ""),
    _col("n_heads", I32, ""),
    _col("n_kv_heads", I32, ""),
    _col("head_dim", I32, ""),
    _col("backend", S, "system under test"),
    _col("precision", S, "of the weights"),
    _col("weight_bits", F32, "per weight"),
    _col("act_dtype", S, "of the activations"),
    _col("kv_dtype", S, "of keys and values"),
    _col("kv_layout", S, "contiguous or paged"),
    _col("kv_block_tokens", I32, "tokens per block"),
    _col("kv_capacity_tokens", I64, "tokens in the pool"),
    _col("kv_bytes_per_token", I64, "keys and values of one token, all layers"),
    _col("max_seq_tokens", I32, "longest sequence the pool admits"),
    _col("prefix_cache", B, "blocks of ended requests are kept for prompts that begin alike"),
    _col("batching", S, "static or continuous"),
    _col("max_batch", I32, "most sequences in one step"),
    _col("chunk_tokens", I32, "token budget of a step"),
    _col("kernel", S, "operators"),
    _col("device", S, "cpu, cuda or mps"),
    _col("threads", I32, "CPU threads"),
    _col("workload", S, ""),
    _col("arrival", S, "arrival process"),
    _col("rate_rps", F64, "asked rate"),
    _col("concurrency", I32, "places of a closed loop"),
    _col("n_requests", I32, ""),
    _col("isl_mean_tokens", F64, "mean prompt length"),
    _col("osl_mean_tokens", F64, "mean output limit"),
    _col("schedule_hash", S, "of arrivals and lengths"),
    _col("prompts_hash", S, "of all prompt ids"),
    _col("lengths_note", S, "how lengths were scaled or dropped to fit the context"),
    _col("seed", I64, ""),
    _col("slo", S, ""),
    _col("protocol", S, ""),
    _col("temperature", F64, ""),
    # latency
    *_latency_columns(),
    # throughput
    _col("output_tok_per_s", F64, "output tokens in the window over the window", "higher"),
    _col("prompt_tok_per_s", F64, "prompt tokens of finished prefills over the window", "higher"),
    _col("prefill_tok_per_s", F64, "prompt tokens over time in prefill steps", "higher"),
    _col("decode_tok_per_s", F64, "decode tokens over time in decode steps", "higher"),
    _col("req_per_s", F64, "finished requests over the window", "higher"),
    _col("offered_rps", F64, "scheduled requests over the schedule"),
    _col("achieved_rps", F64, "handed-over requests over the window"),
    _col("goodput_req_per_s", F64, "requests that met every SLO over the window", "higher"),
    _col("slo_attainment_ratio", F64, "good requests over arrived ones", "higher"),
    _col("prompt_tokens", I64, "in the window"),
    _col("output_tokens", I64, "in the window"),
    _col("cached_tokens", I64, "prompt tokens found in the prefix cache, of the same requests"),
    _col("requests_ok", I32, ""),
    _col("requests_failed", I32, "", "lower"),
    _col("requests_censored", I32, "still running at the hard stop", "lower"),
    _col("batch_mean", F64, "sequences per step"),
    _col("batch_max", I32, "sequences per step"),
    _col("steps_n", I32, "steps in the window"),
    _col("preemptions", I32, "", "lower"),
    # memory
    _col("weights_bytes", I64, "", "lower"),
    _col("kv_reserved_bytes", I64, "the whole pool", "lower"),
    _col("kv_held_peak_bytes", I64, "blocks handed out, at their peak", "lower"),
    _col("kv_peak_live_bytes", I64, "tokens written and still needed, at their peak"),
    _col("kv_waste_ratio", F64, "1 - live / handed out, mean over steps", "lower"),
    _col("act_peak_bytes", I64, "allocator peak less weights and pool", "lower"),
    _col("torch_peak_allocated_bytes", I64, "", "lower"),
    _col("torch_peak_reserved_bytes", I64, "", "lower"),
    _col("nvml_baseline_used_bytes", I64, "whole device, before the worker"),
    _col("nvml_peak_used_bytes", I64, "whole device", "lower"),
    _col("host_rss_peak_bytes", I64, "of the worker", "lower"),
    # roofline
    _col("bytes_per_token_bytes", F64, "that must be read per output token at this batch"),
    _col("read_bw_bytes_per_s", F64, "measured from memory on this device"),
    _col("working_set_bw_bytes_per_s", F64, "measured on a buffer the size of the weights"),
    _col("bound_tok_per_s", F64, "decode ceiling: working-set bandwidth over bytes per token"),
    _col("mbu_ratio", F64, "bytes per token x decode tok/s over read_bw", "higher"),
    # power and clocks
    _col("energy_j", F64, "device energy over the window", "lower"),
    _col("energy_method", DICT, "nvml_counter"),
    _col("power_mean_w", F64, "", "lower"),
    _col("j_per_output_token_j", F64, "energy per output token", "lower"),
    _col("sm_clock_p50_hz", F64, ""),
    _col("sm_clock_min_hz", F64, ""),
    _col("mem_clock_hz", F64, ""),
    _col("temp_max_c", F64, ""),
    _col("throttle_ratio", F64, "share of samples with a throttle reason"),
    _col("throttle_reasons", STRINGS, ""),
    _col("host_idle_ratio", F64, "share of the host's CPU time idle in the window"),
    _col("host_other_cpu_ratio", F64, "share of the host's CPU time used by other processes"),
    # quality link
    _col("output_hash", S, "of all output ids in request order"),
    # provenance
    _col("git_sha", S, ""),
    _col("git_dirty", B, ""),
    _col("diff_hash", S, "of uncommitted changes"),
    _col("versions_json", S, "of the libraries in use"),
    _col("python", S, ""),
    _col("torch", S, ""),
    _col("cuda_runtime", S, ""),
    _col("driver", S, ""),
    _col("hostname_hash", S, "which machine, without its name"),
    _col("platform", S, ""),
    _col("cpu_model", S, ""),
    _col("cpu_cores", I32, "physical cores usable"),
    _col("host_mem_bytes", I64, ""),
    _col("gpu_name", S, ""),
    _col("gpu_uuid", S, ""),
    _col("gpu_count", I32, ""),
    _col("gpu_mem_bytes", I64, ""),
    _col("power_limit_w", F64, ""),
    _col("slurm_job_id", S, ""),
    _col("slurm_array_job_id", S, ""),
    _col("slurm_array_task_id", S, ""),
    _col("slurm_partition", S, ""),
)

REQUESTS = _schema(
    _col("run_id", S, ""),
    _col("request", I32, "index in the workload"),
    _col("status", DICT, "ok, failed, refused or censored"),
    _col("error", S, ""),
    _col("t_sched_s", F64, "scheduled arrival after the window's start"),
    _col("t_send_s", F64, "hand-over to the backend"),
    _col("t_first_sched_s", F64, "first scheduled by the engine"),
    _col("t1_s", F64, "first token available"),
    _col("tn_s", F64, "last token available"),
    _col("prompt_tokens", I32, ""),
    _col("output_tokens", I32, ""),
    _col("output_limit_tokens", I32, ""),
    _col("cached_tokens", I32, "prompt tokens found in the prefix cache"),
    _col("finish_reason", DICT, ""),
    _col("preemptions", I16, ""),
    _col("ttft_s", F64, LATENCIES["ttft"], "lower"),
    _col("ttft_send_s", F64, LATENCIES["ttft_send"], "lower"),
    _col("queue_s", F64, LATENCIES["queue"], "lower"),
    _col("dispatch_lag_s", F64, LATENCIES["dispatch_lag"], "lower"),
    _col("tpot_s", F64, LATENCIES["tpot"], "lower"),
    _col("e2e_s", F64, LATENCIES["e2e"], "lower"),
    _col("max_stall_s", F64, LATENCIES["max_stall"], "lower"),
    _col("itl_s", pa.list_(F32), "gaps between token events"),
    _col("itl_k", pa.list_(pa.uint8()), "tokens each gap delivered; null when all are 1"),
    _col("in_window", B, "scheduled inside the window"),
    _col("slo_met", B, "null when nothing is judged"),
    _col("output_hash", S, "of the output ids"),
)

STEPS = _schema(
    _col("run_id", S, ""),
    _col("step", I32, ""),
    _col("t_s", F64, "start, after the window's start"),
    _col("wall_s", F64, "", "lower"),
    _col("gpu_s", F32, "", "lower"),
    _col("kind", DICT, "prefill, decode or mixed"),
    _col("n_prefill_tokens", I32, ""),
    _col("n_decode", I32, "sequences that decode"),
    _col("batch", I32, "sequences in the step"),
    _col("queue_len", I32, "waiting requests"),
    _col("running", I32, ""),
    _col("kv_tokens_live", I64, "tokens in the cache"),
    _col("kv_blocks_used", I64, ""),
    _col("kv_blocks_free", I64, ""),
    _col("ctx_max", I32, "longest sequence in the step"),
    _col("preemptions", I16, "in this step"),
    _col("in_window", B, ""),
)

SAMPLES = _schema(
    _col("run_id", S, ""),
    _col("t_s", F64, "after the window's start"),
    _col("gpu_index", I32, "null for host samples"),
    _col("host_rss_bytes", I64, "of the worker"),
    _col("worker_cpu_ratio", F64, "CPU time of the worker over all cores"),
    _col("host_idle_ratio", F64, "idle CPU time over all cores"),
    _col("power_w", F64, ""),
    _col("energy_j", F64, "counter since the first sample"),
    _col("sm_clock_hz", F64, ""),
    _col("mem_clock_hz", F64, ""),
    _col("temp_c", F64, ""),
    _col("gpu_util_ratio", F64, ""),
    _col("mem_used_bytes", I64, ""),
    _col("throttle_bits", I64, ""),
    _col("foreign_pids", I16, "other processes on the device"),
)

TABLES: dict[str, pa.Schema] = {
    "runs": RUNS,
    "requests": REQUESTS,
    "steps": STEPS,
    "samples": SAMPLES,
}

STATUSES = (
    "ok",
    "oom_gpu",
    "oom_host",
    "timeout",
    "invalid_config",
    "unsupported",
    "numerics",
    "crash",
    "preempted",
    "lost",
)
