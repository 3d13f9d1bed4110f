"""Every figure draws what its rows say, and says what it leaves out."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from analysis import style, units
from analysis.figures import FIGURES, kernels, latency, memory, order, throughput, timeline
from analysis.figures.base import NoData, Prepared, Spec, render, write
from llmlab.bench.schema import TABLES
from tests.analysis import synthetic_rows as rows

CASES: tuple[tuple[Spec, Callable[[], rows.Dataset]], ...] = (
    (throughput.SPEC, rows.batching),
    (latency.SPEC, rows.quickstart),
    (memory.SPEC, rows.kv_layout),
    (timeline.SPEC, rows.quickstart),
    (kernels.SPEC, rows.kernel_choice),
    (order.SPEC, rows.batching),
)
cases = pytest.mark.parametrize(("spec", "data"), CASES, ids=[spec.name for spec, _ in CASES])


def prepared(spec: Spec, data: rows.Dataset) -> Prepared:
    result = spec.prepare(rows.as_tables(data))
    assert isinstance(result, Prepared)
    return result


def svg(fig: Figure) -> bytes:
    buffer = io.BytesIO()
    with style.applied():
        fig.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def test_each_figure_has_a_case() -> None:
    assert [spec for spec, _ in CASES] == list(FIGURES)


@cases
def test_no_panel_is_empty(spec: Spec, data: Callable[[], rows.Dataset]) -> None:
    fig = render(spec, prepared(spec, data()))
    for ax in fig.axes:
        assert ax.has_data()
        assert ax.get_ylabel() or ax.get_xlabel()


@cases
def test_two_renderings_are_the_same_bytes(spec: Spec, data: Callable[[], rows.Dataset]) -> None:
    first, second = (render(spec, prepared(spec, data())) for _ in range(2))
    assert svg(first) == svg(second)


@cases
def test_no_text_is_smaller_than_8_points(spec: Spec, data: Callable[[], rows.Dataset]) -> None:
    fig = render(spec, prepared(spec, data()))
    texts = [t for t in fig.findobj(lambda a: hasattr(a, "get_fontsize")) if t.get_text()]  # type: ignore[attr-defined]
    assert min(t.get_fontsize() for t in texts) >= 8  # type: ignore[attr-defined]


@cases
def test_nothing_is_drawn_without_rows(spec: Spec, data: Callable[[], rows.Dataset]) -> None:
    lost = data()
    for row in lost["runs"]:
        row |= {"status": "crash", "valid": None, "output_tok_per_s": None}
        row |= {"kv_held_peak_bytes": None}
    result = spec.prepare(rows.as_tables(lost))
    assert isinstance(result, NoData)
    assert result.reason


def test_files_lie_side_by_side(tmp_path: Path) -> None:
    ready = prepared(kernels.SPEC, rows.kernel_choice())
    stem = write(kernels.SPEC, ready, tmp_path)
    assert pd.read_csv(stem.with_suffix(".csv"))["config"].tolist() == ["numpy", "sdpa", "torch"]
    ids = stem.with_suffix(".runs.txt").read_text().split()
    assert ids == sorted(ready.runs["run_id"])
    assert stem.with_suffix(".png").stat().st_size > 1000
    assert b"<svg" in stem.with_suffix(".svg").read_bytes()


def test_labels_follow_the_units_of_the_schema(monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepared(throughput.SPEC, rows.batching(1))
    assert render(throughput.SPEC, ready).axes[0].get_ylabel().endswith("(tok/s)")
    runs = TABLES["runs"]
    at = runs.get_field_index("output_tok_per_s")
    other = runs.set(at, pa.field("output_tok_per_s", pa.float64(), metadata={"unit": "furlong"}))
    monkeypatch.setattr(units, "TABLES", TABLES | {"runs": other})
    assert render(throughput.SPEC, ready).axes[0].get_ylabel().endswith("(furlong)")


def test_caption_and_footer_say_what_made_it() -> None:
    ready = prepared(throughput.SPEC, rows.batching(3))
    words = ("Example CPU 9000", "0123456", "2026-03-02", "30 runs", "3 failed", "1 invalid")
    footer = render(throughput.SPEC, ready).texts[0].get_text().replace("\u00a0", " ")
    footer = footer.replace("\n", " ")
    for word in words:
        assert word in ready.caption()
        assert word in footer
    assert "python 3.12.4" in ready.caption()
    assert "Student t" in ready.caption()


def test_single_runs_get_no_interval() -> None:
    ready = prepared(throughput.SPEC, rows.batching(1))
    assert ready.data["output_tok_per_s_low"].isna().all()
    assert "Student" not in ready.caption()


def test_failed_and_invalid_runs_stay_visible() -> None:
    data = prepared(throughput.SPEC, rows.batching(3)).data
    assert (data["kind"] == "failed").sum() == 3
    invalid = data[data["kind"] == "invalid"]
    assert invalid["output_tok_per_s"].tolist() == [40.0]
    point = data[data["kind"] == "point"].set_index(["config", "max_batch"]).loc[("static", 2)]
    assert point["n"] == 2
    assert point["output_tok_per_s"] > 50  # the invalid 40 tok/s is not in the mean


def test_ecdf_counts_requests_that_never_got_a_token() -> None:
    data = prepared(latency.SPEC, rows.quickstart()).data
    ttft = data[data["metric"] == "ttft_s"]
    assert ttft["n"].unique().tolist() == [120]
    assert ttft["share"].max() == pytest.approx(119 / 120)
    gaps = data[data["metric"] == "itl_s"]
    assert gaps["share"].max() == 1
    assert gaps["n"].iloc[0] > 256 >= len(gaps)  # thinned, all counted
    assert data["slo_s"].unique().tolist() == [0.5, 0.05]


def test_ecdf_reads_right_at_every_kept_point() -> None:
    source = rows.quickstart()
    data = prepared(latency.SPEC, source).data
    gaps = np.concatenate([r["itl_s"] for r in source["requests"] if r["itl_s"]]).astype("f4")
    curve = data[data["metric"] == "itl_s"]
    for at, share in zip(curve["value_s"], curve["share"], strict=True):
        assert (gaps <= np.float32(at)).mean() == pytest.approx(share, abs=2e-3)


def test_a_config_without_a_valid_run_is_drawn_and_says_so() -> None:
    source = rows.batching(2, (1, 2))
    for row in source["runs"]:
        if row["batching"] == "static":
            row["valid"] = False
    ready = prepared(latency.SPEC, source)
    assert ready.data.groupby("config")["valid"].all().to_dict() == {
        "continuous max_batch=1": True,
        "continuous max_batch=2": True,
        "static max_batch=1": False,
    }
    legend = render(latency.SPEC, ready).legends[0]
    doubted = [t.get_text() for t in legend.get_texts() if "(invalid)" in t.get_text()]
    assert [text.split()[0] for text in doubted] == ["static"]


def test_largest_batch_follows_from_capacity_and_tokens_held() -> None:
    data = prepared(memory.SPEC, rows.kv_layout()).data.set_index(["config", "max_seq_tokens"])
    assert data.loc[("contiguous", 1024), "largest_batch"] == 32768 // 1024
    assert data.loc[("paged", 1024), "largest_batch"] == 32768 // 288
    assert data.loc[("contiguous", 8192), "status"] == "oom_host"
    bars = render(memory.SPEC, prepared(memory.SPEC, rows.kv_layout())).axes[0]
    assert bars.get_ylim()[0] == 0


def test_timeline_keeps_peaks_and_preemptions_of_a_long_run() -> None:
    source = rows.quickstart(5000)
    data = prepared(timeline.SPEC, source).data
    steps = pd.DataFrame(source["steps"])
    assert len(data) <= 600
    assert data["kv_tokens_live"].max() == steps["kv_tokens_live"].max()
    assert data["kv_held_tokens"].max() == steps["kv_blocks_used"].max() * 16
    assert data["preemptions"].sum() == steps["preemptions"].sum() > 0


def test_timeline_is_of_traced_traffic_or_a_single_point() -> None:
    source = rows.batching(1)
    steps = rows.step_rows(source["runs"][0]["run_id"], 50, np.random.default_rng(0))
    assert isinstance(timeline.SPEC.prepare(rows.as_tables(source | {"steps": steps})), NoData)


def test_bars_start_at_zero() -> None:
    for ax in render(kernels.SPEC, prepared(kernels.SPEC, rows.kernel_choice())).axes:
        assert ax.get_xlim()[0] == 0


@pytest.mark.parametrize("batches", [(4, 8), (1, 2, 3, 5, 6, 7, 9, 12, 100, 4096)])
def test_few_and_many_batch_sizes_draw(batches: tuple[int, ...]) -> None:
    fig = render(throughput.SPEC, prepared(throughput.SPEC, rows.batching(1, batches)))
    low, high = fig.axes[0].get_xlim()
    assert low < batches[0] < batches[-1] < high
    assert len(fig.axes[0].get_xticks()) <= 16


def test_a_config_looks_the_same_in_every_figure_and_no_two_look_alike() -> None:
    names = ["x", "paged", "y", "contiguous", "z", "sdpa"]
    found = style.looks(names)
    assert found["paged"] == style.looks(["paged"])["paged"]
    unregistered = style.looks(["paged", "a", "b", "c", "d", "e", "f", "g"])
    assert len(set(unregistered.values())) == 8


def test_end_labels_do_not_overlap_and_stay_inside() -> None:
    fig, (ax,) = style.canvas()
    ends = [style.End(1, y, f"config {y}", "black") for y in (0.5, 0.501, 0.502, 0.99, 1.0)]
    style.label_ends(ax, ends)
    fig.draw_without_rendering()
    boxes = sorted((Text.get_window_extent(t) for t in ax.texts), key=lambda b: b.y0)
    for lower, upper in itertools.pairwise(boxes):
        assert lower.y1 <= upper.y0 + 1
