"""Replaying recorded traffic: the three formats, shared prefixes, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from llmlab.bench.traces import read_trace
from llmlab.bench.workloads import build
from llmlab.settings import Arrival, ConfigError, Overlong, WorkloadKind, WorkloadSettings

CONTEXT, VOCAB = 4096, 1000

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens\r
2023-11-16 18:17:03.9799600,100,10\r
2023-11-16 18:17:04.0319600,200,8\r
2023-11-16 18:17:05.9799600,300,27"""


def replayed(path: Path, **changes: object) -> WorkloadSettings:
    base = WorkloadSettings(
        kind=WorkloadKind.trace, path=str(path), n_requests=None, arrival=Arrival.trace
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def azure(tmp_path: Path) -> Path:
    path = tmp_path / "azure.csv"
    path.write_bytes(CSV.encode())
    return path


def test_azure_csv_is_replayed_row_by_row(azure: Path) -> None:
    w = build(replayed(azure), 0, CONTEXT, VOCAB)
    assert [len(r.prompt_ids) for r in w.requests] == [100, 200, 300]
    assert [r.output_tokens for r in w.requests] == [10, 8, 27]
    assert [r.arrival_s for r in w.requests] == [0.0, 0.052, 2.0]
    assert w.offered_rps == 1.0
    assert w.warnings == []


def test_time_scale_stretches_and_n_requests_cuts(azure: Path) -> None:
    w = build(replayed(azure, time_scale=4.0, n_requests=2), 0, CONTEXT, VOCAB)
    assert [r.arrival_s for r in w.requests] == [0.0, 0.208]
    more = build(replayed(azure, n_requests=9), 0, CONTEXT, VOCAB)
    assert len(more.requests) == 3
    assert "n_requests=9" in more.warnings[0]


def test_the_same_traffic_in_three_formats_is_the_same_workload(
    azure: Path, tmp_path: Path
) -> None:
    parquet, jsonl = tmp_path / "t.parquet", tmp_path / "t.jsonl"
    columns = {
        "arrival_s": [5.0, 5.052, 7.0],
        "prompt_tokens": pa.array([100, 200, 300], pa.int32()),
        "output_tokens": pa.array([10, 8, 27], pa.int32()),
    }
    pq.write_table(pa.table(columns), parquet)
    write_jsonl(
        jsonl,
        [
            {"timestamp": t, "input_length": p, "output_length": o}
            for t, p, o in ((0, 100, 10), (52, 200, 8), (2000, 300, 27))
        ],
    )
    built = [build(replayed(p), 3, CONTEXT, VOCAB) for p in (azure, parquet, jsonl)]
    assert len({w.schedule_hash for w in built}) == 1
    assert len({w.prompts_hash for w in built}) == 1


def test_lengths_of_a_trace_can_arrive_otherwise(tmp_path: Path) -> None:
    path = tmp_path / "lengths.parquet"
    pq.write_table(pa.table({"prompt_tokens": [5, 6], "output_tokens": [1, 2]}), path)
    w = build(replayed(path, arrival=Arrival.offline), 0, CONTEXT, VOCAB)
    assert [len(r.prompt_ids) for r in w.requests] == [5, 6]
    with pytest.raises(ConfigError, match="no column arrival_s"):
        build(replayed(path), 0, CONTEXT, VOCAB)


def test_rows_out_of_order_are_sorted_and_said_so(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "t.jsonl",
        [
            {"timestamp": t, "input_length": p, "output_length": 1}
            for t, p in ((500, 5), (0, 7), (500, 6))
        ],
    )
    w = build(replayed(path), 0, CONTEXT, VOCAB)
    assert [len(r.prompt_ids) for r in w.requests] == [7, 5, 6]
    assert [r.arrival_s for r in w.requests] == [0.0, 0.5, 0.5]
    assert "sorted" in w.warnings[0]


# ---------------------------------------------------------------------------------------------
# Shared prefixes


@pytest.fixture
def mooncake(tmp_path: Path) -> Path:
    rows: list[dict[str, object]] = [
        {"timestamp": 0, "input_length": 1200, "output_length": 3, "hash_ids": [0, 1, 2]},
        {"timestamp": 27, "input_length": 1500, "output_length": 3, "hash_ids": [0, 1, 3]},
        {"timestamp": 30, "input_length": 900, "output_length": 3, "hash_ids": [0, 4]},
        {"timestamp": 31, "input_length": 600, "output_length": 3, "hash_ids": [5, 6]},
    ]
    return write_jsonl(tmp_path / "mooncake.jsonl", rows)


def shared_prefix(a: list[int], b: list[int]) -> int:
    return next((k for k, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), 0)


def test_equal_block_hashes_mean_equal_tokens(mooncake: Path) -> None:
    ids = [list(r.prompt_ids) for r in build(replayed(mooncake), 0, CONTEXT, 10**6).requests]
    assert [len(i) for i in ids] == [1200, 1500, 900, 600]
    assert shared_prefix(ids[0], ids[1]) == 1024
    assert shared_prefix(ids[0], ids[2]) == 512
    assert shared_prefix(ids[0], ids[3]) == 0


def test_scaled_prompts_still_share_their_scaled_prefix(mooncake: Path) -> None:
    w = build(replayed(mooncake, overlong=Overlong.scale), 0, 501, 10**6)
    ids = [list(r.prompt_ids) for r in w.requests]
    assert [len(i) for i in ids] == [400, 500, 300, 200]  # a third of 1200, 1500, 900, 600
    assert shared_prefix(ids[0], ids[1]) == 341
    assert shared_prefix(ids[0], ids[2]) == 170


def test_a_prompt_scaled_to_nothing_keeps_one_token(tmp_path: Path) -> None:
    path = write_jsonl(
        tmp_path / "t.jsonl",
        [
            {"timestamp": 0, "input_length": 1, "output_length": 1, "hash_ids": [3]},
            {"timestamp": 0, "input_length": 51200, "output_length": 1, "hash_ids": [*range(100)]},
        ],
    )
    w = build(replayed(path, overlong=Overlong.scale), 0, 20, VOCAB)
    assert [len(r.prompt_ids) for r in w.requests] == [1, 19]


def test_dropping_keeps_each_prompt_with_its_own_blocks(mooncake: Path) -> None:
    whole = build(replayed(mooncake), 0, CONTEXT, VOCAB)
    w = build(replayed(mooncake, overlong=Overlong.drop), 0, 1000, VOCAB)
    assert [r.prompt_ids for r in w.requests] == [r.prompt_ids for r in whole.requests[2:]]
    assert [r.arrival_s for r in w.requests] == [0.0, 0.001]
    assert w.lengths_note == (
        "dropped 2 of 4 requests longer than the context of 1000 tokens (longest 1503)"
    )


def test_an_overlong_row_is_named(mooncake: Path) -> None:
    with pytest.raises(ConfigError, match=r"mooncake\.jsonl, line 2: prompt_tokens=1500"):
        build(replayed(mooncake), 0, 1300, VOCAB)


# ---------------------------------------------------------------------------------------------
# What is refused

GOOD = '{"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 1]}\n'


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("t.csv", "", "t.csv, line 1: empty (expected the columns TIMESTAMP,"),
        ("t.csv", "a,b,c\n1,2,3\n", "t.csv, line 1: a,b,c (expected the columns TIMESTAMP,"),
        ("t.csv", CSV.splitlines()[0], "t.csv: has no requests"),
        ("t.csv", CSV + "\r\nnow,1,1", "t.csv, line 5: TIMESTAMP='now' (expected a time"),
        ("t.csv", CSV + "\r\n2023-11-16 18:17:06,x,1", "line 5: ContextTokens='x' (expected a"),
        ("t.csv", CSV + "\r\n2023-11-16 18:17:06,4,0", "line 5: GeneratedTokens='0' (expected"),
        ("t.csv", CSV + "\r\n2023-11-16 18:17:06,4", "t.csv, line 5: 2 cells (expected 3)"),
        ("t.jsonl", "", "t.jsonl: has no requests"),
        ("t.jsonl", GOOD + "{", "t.jsonl, line 2: not JSON"),
        ("t.jsonl", GOOD + "[1]", "t.jsonl, line 2: expected a JSON object"),
        ("t.jsonl", GOOD + '{"timestamp": 1}', "t.jsonl, line 2: expected the key input_length"),
        ("t.jsonl", GOOD.replace("600", "6.5"), "t.jsonl, line 1: input_length=6.5 (expected"),
        ("t.jsonl", GOOD.replace("600", "true"), "t.jsonl, line 1: input_length=True (expected"),
        ("t.jsonl", GOOD.replace("600", "1025"), "2 hash_ids for 1025 prompt tokens (expected 3"),
        ("t.jsonl", GOOD.replace("[0, 1]", "[0, -1]"), "line 1: hash_ids (expected a list of"),
        ("t.jsonl", GOOD.replace('p": 0', 'p": NaN'), "line 1: timestamp=nan (expected a finite"),
        ("t.jsonl", GOOD + GOOD.replace("[0, 1]", "null"), "line 2: expected hash_ids in every"),
        ("t.parquet", "not parquet", "t.parquet: not a readable parquet file"),
        ("t.txt", "1 2 3", "t.txt: unknown kind of trace (allowed: .csv, .jsonl, .parquet)"),
        ("t.csv", b"\xff\xfe\x00", "t.csv: not UTF-8"),
    ],
)
def test_a_malformed_trace_names_file_line_and_what_was_expected(
    tmp_path: Path, name: str, content: str | bytes, expected: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError) as error:
        read_trace(path)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)


def test_a_parquet_without_the_columns_or_with_nulls_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"prompt_tokens": [1], "tokens": [1]}), path)
    with pytest.raises(ConfigError, match=r"no column output_tokens .*found prompt_tokens, tokens"):
        read_trace(path)
    pq.write_table(pa.table({"prompt_tokens": [1, None], "output_tokens": [1, 1]}), path)
    with pytest.raises(ConfigError, match=r"row 2: prompt_tokens=None"):
        read_trace(path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"workload\.path=.*gone\.csv: no such file"):
        build(replayed(tmp_path / "gone.csv"), 0, CONTEXT, VOCAB)
