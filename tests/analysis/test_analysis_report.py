"""Loading, README sections, collecting evidence and the report as a user runs them."""

from __future__ import annotations

import html.parser
from datetime import timedelta
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from analysis import collect, report, sections
from analysis.load import load
from llmlab.bench.schema import TABLES
from tests.analysis import synthetic_rows as rows

README = """# Title
before
<!-- llmlab:begin kernel_choice.headline -->
old
<!-- llmlab:end kernel_choice.headline -->
between
<!-- llmlab:begin kernel_choice.kernel_choice -->
<!-- llmlab:end kernel_choice.kernel_choice -->
<!-- llmlab:begin batching.headline -->
<!-- llmlab:end batching.headline -->
after
"""


class Place:
    """A checkout: results, evidence, README."""

    def __init__(self, root: Path) -> None:
        self.results, self.experiments = root / "outputs/results/v1", root / "experiments"
        self.out, self.readme = root / "outputs/report", root / "README.md"
        self.experiments.mkdir(parents=True)

    def report(self, *more: str) -> int:
        args = ("results", "experiments", "out", "readme")
        return report.main([*(f"--{a}={getattr(self, a)}" for a in args), *more])

    def collect(self, *args: str) -> int:
        return collect.main(
            [*args, f"--results={self.results}", f"--experiments={self.experiments}"]
        )


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# ---------------------------------------------------------------------------------------------
# Loading


def test_committed_rows_win_over_rows_of_the_same_run(place: Place) -> None:
    data = rows.kernel_choice(1)
    rows.write_results(place.results, data)
    data["runs"] = [data["runs"][0] | {"decode_tok_per_s": 1.0}]
    rows.write_evidence(place.experiments, data)
    runs = load(place.results, place.experiments).runs.set_index("run_id")
    assert len(runs) == 3
    assert runs.loc[data["runs"][0]["run_id"], "decode_tok_per_s"] == 1.0


def test_the_last_attempt_and_the_newest_code_count(place: Place) -> None:
    first = rows.run_row("kernel_choice", 0, kernel="sdpa")
    later = first["started_at"] + timedelta(hours=1)
    second = first | {"run_id": "second", "attempt": 1, "started_at": later}
    first["status"] = "crash"
    newer = second | {"run_id": "newer", "run_key": "k2", "code_hash": "beef"}
    newer["started_at"] = later + timedelta(hours=1)
    rows.write_results(place.results, {"runs": [first, second]})
    assert load(place.results, None).runs["run_id"].tolist() == ["second"]
    rows.write_results(place.results, {"runs": [newer]})
    assert load(place.results, None).runs["run_id"].tolist() == ["newer"]


def test_runs_that_failed_before_they_had_a_key_are_all_kept(place: Place) -> None:
    early = [
        rows.run_row("kernel_choice", i, status="crash", run_key=None, point_id=None, hw_key=None)
        for i in range(3)
    ]
    rows.write_results(place.results, {"runs": early})
    assert len(load(place.results, None).runs) == 3


def test_files_of_other_versions_read_as_null(place: Place) -> None:
    row = rows.run_row("kernel_choice", 0)
    columns = [n for n in TABLES["runs"].names if n not in ("mbu_ratio", "max_batch")]
    schema = pa.schema([TABLES["runs"].field(n) for n in columns])
    schema = schema.append(pa.field("max_batch", pa.int64())).append(pa.field("new", pa.string()))
    path = place.results / "runs" / "exp=kernel_choice" / "a.parquet"
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist([row], schema=schema), path)
    runs = load(place.results, None).runs
    assert runs["max_batch"].tolist() == [16]
    assert runs["mbu_ratio"].isna().all()


def test_an_unreadable_file_is_named_and_the_others_are_drawn(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.write_results(place.results, rows.kernel_choice(1))
    bad = place.results / "runs" / "exp=kernel_choice" / "bad.parquet"
    bad.write_bytes(b"PAR1 cut short")
    (bad.parent / ".half.parquet.tmp").write_bytes(b"")
    assert place.report() == 0
    assert str(bad) in capsys.readouterr().out.replace("\n", "")
    assert (place.out / "kernel_choice" / "kernel_choice.svg").is_file()
    assert "bad.parquet: cannot be read" in (place.out / "report.html").read_text()


def test_no_rows_is_a_clear_message(place: Place, capsys: pytest.CaptureFixture[str]) -> None:
    assert place.report() == 1
    assert "python -m llmlab.run" in capsys.readouterr().out


def test_an_escaped_experiment_folder_is_found_by_its_name(place: Place) -> None:
    path = place.results / "runs" / "exp=my%20sweep" / "a.parquet"
    rows.write_file(path, "runs", [rows.run_row("my sweep", 0)])
    assert len(load(place.results, None, ["my sweep"]).runs) == 1


# ---------------------------------------------------------------------------------------------
# README sections


def test_replacing_sections_twice_changes_nothing_more() -> None:
    bodies = {"kernel_choice.headline": r"| a\1 | \g<0> |", "batching.headline": "x"}
    once = sections.replace(README, bodies)
    assert sections.replace(once, bodies) == once
    assert r"| a\1 | \g<0> |" in once
    assert "old" not in once
    assert [line for line in ("before", "between", "after") if line in once.splitlines()]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("<!-- llmlab:begin a.headline -->", "section a.headline has no end marker"),
        ("x\n<!-- llmlab:end a.headline -->", "line 2: end of a.headline"),
        (
            "<!-- llmlab:begin a.headline -->\n<!-- llmlab:begin b.headline -->",
            "line 2: b.headline",
        ),
    ],
)
def test_markers_that_do_not_pair_up_are_named(text: str, message: str) -> None:
    with pytest.raises(sections.SectionError, match=message):
        sections.names(text)


def test_an_unknown_section_names_the_allowed_ones(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    place.readme.write_text("<!-- llmlab:begin a.speed -->\n<!-- llmlab:end a.speed -->\n")
    assert place.report("--check") == 1
    message = capsys.readouterr().err
    assert "'speed'" in message
    assert "headline" in message
    assert str(place.readme) in message


def test_check_finds_a_changed_number_and_the_report_mends_it(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.write_evidence(place.experiments, rows.kernel_choice(3))
    place.readme.write_text(README)
    assert place.report("--check") == 1
    assert place.report() == 0
    assert place.report("--check") == 0
    built = place.readme.read_text()
    assert "No committed evidence for `batching` yet" in built
    assert "](experiments/kernel_choice/kernel_choice.svg)" in built

    number = next(line for line in built.splitlines() if line.startswith("| sdpa")).split("|")[2]
    place.readme.write_text(built.replace(number, " 9,999 ", 1))
    capsys.readouterr()
    assert place.report("--check") == 1
    printed = capsys.readouterr()
    assert "9,999" in printed.out
    assert printed.out.startswith("---")
    assert "disagree" in printed.err
    assert place.report() == 0
    assert place.readme.read_text() == built


def test_check_finds_a_figure_that_is_not_of_the_evidence(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.write_evidence(place.experiments, rows.kernel_choice(1))
    place.readme.write_text(README)
    place.report()
    csv = place.experiments / "kernel_choice" / "kernel_choice.csv"
    csv.write_text(csv.read_text().replace("True", "False", 1))
    assert place.report("--check") == 1
    assert "kernel_choice.csv" in capsys.readouterr().out


def test_the_readme_never_shows_rows_that_are_not_committed(place: Place) -> None:
    rows.write_results(place.results, rows.kernel_choice(1))
    place.readme.write_text(README)
    assert place.report() == 0
    assert "No committed evidence for `kernel_choice` yet" in place.readme.read_text()


def test_notebooks_have_sections_with_links_of_their_own(place: Place) -> None:
    rows.write_evidence(place.experiments, rows.kernel_choice(1))
    page = place.experiments / "kernel_choice" / "README.md"
    page.write_text(README)
    assert place.report() == 0
    assert "](kernel_choice.svg)" in page.read_text()


# ---------------------------------------------------------------------------------------------
# Collecting


def test_collected_rows_are_the_rows_that_were_written(place: Place) -> None:
    rows.write_results(place.results, rows.quickstart(50))
    before = load(place.results, None)
    assert place.collect("quickstart") == 0
    after = load(None, place.experiments)
    for table in ("runs", "requests", "steps"):
        a, b = getattr(before, table), getattr(after, table)
        assert a.reset_index(drop=True).equals(b.reset_index(drop=True))
    schema = pq.read_schema(place.experiments / "quickstart" / "runs.parquet")
    assert schema.equals(TABLES["runs"])
    assert not list(place.experiments.glob("*/.*"))


def test_rows_without_provenance_are_refused_and_dirty_ones_named(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows.kernel_choice(1)
    data["runs"][0]["git_sha"] = None
    data["runs"][1]["git_dirty"] = True
    rows.write_results(place.results, data)
    assert place.collect("kernel_choice") == 0
    message = capsys.readouterr().err
    assert f"refused {data['runs'][0]['run_id']}: has no git_sha" in message
    assert "1 runs had uncommitted changes" in message
    assert len(load(None, place.experiments).runs) == 2


def test_evidence_of_another_machine_stays_unless_replaced(place: Place) -> None:
    old = rows.kernel_choice(1)
    for row in old["runs"]:
        row |= {"run_id": row["run_id"] + "-h", "hw_key": "hw02", "run_key": row["run_key"] + "h"}
    rows.write_evidence(place.experiments, old)
    rows.write_results(place.results, rows.kernel_choice(1))
    assert place.collect("kernel_choice") == 0
    assert len(load(None, place.experiments).runs) == 6
    assert place.collect("kernel_choice", "--replace") == 0
    assert len(load(None, place.experiments).runs) == 3


def test_nothing_to_collect_is_a_clear_message(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    assert place.collect("batching") == 1
    assert "+experiment=batching" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------
# The report


class Links(html.parser.HTMLParser):
    """Every src and href, and the order of open tags."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_report_needs_nothing_but_itself(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    data = rows.batching(2)
    for row in data["runs"]:
        if row["status"] != "ok":
            row["error_msg"] = "<script>alert(1)</script>"
    rows.write_results(place.results, data, rows.quickstart(60))
    assert place.report() == 0
    page = (place.out / "report.html").read_text(encoding="utf-8")
    links = Links()
    links.feed(page)
    assert links.found
    assert all(link.startswith(("data:", "#")) for link in links.found)
    assert "url(" not in page
    assert "<script" not in page
    for text in ("+experiment=batching", "oom_host", "foreign_process", "viewport", "dark"):
        assert text in page
    printed = capsys.readouterr().out
    assert "No figure kernel_choice" in printed
    assert "python -m llmlab.run +experiment=kernel_choice" in printed
    assert "report.html" in printed


def test_only_the_experiments_asked_for_are_drawn(place: Place) -> None:
    rows.write_results(place.results, rows.kernel_choice(1), rows.kv_layout())
    assert place.report("--experiment", "kernel_choice") == 0
    assert [p.name for p in place.out.iterdir() if p.is_dir()] == ["kernel_choice"]


def test_no_figure_of_rows_that_are_gone_stays(place: Place) -> None:
    rows.write_results(place.results, rows.kernel_choice(1))
    assert place.report() == 0
    for path in (place.results / "runs" / "exp=kernel_choice").glob("*-00[12]-*.parquet"):
        path.unlink()
    assert place.report() == 0
    assert not list(place.out.glob("kernel_choice/kernel_choice.*"))


def test_failed_runs_alone_make_a_report(place: Place) -> None:
    lost = rows.run_row("kernel_choice", 0, status="oom_host", valid=None, error_msg="too big")
    rows.write_results(place.results, {"runs": [lost]})
    assert place.report() == 0
    assert "too big" in (place.out / "report.html").read_text()


def test_check_names_evidence_that_cannot_be_read(
    place: Place, capsys: pytest.CaptureFixture[str]
) -> None:
    rows.write_evidence(place.experiments, rows.kernel_choice(1))
    (place.experiments / "kernel_choice" / "steps.parquet").write_bytes(b"cut")
    place.readme.write_text("no sections")
    assert place.report("--check") == 1
    assert "steps.parquet: cannot be read" in capsys.readouterr().err


def test_help_teaches(capsys: pytest.CaptureFixture[str]) -> None:
    for main in (report.main, collect.main):
        with pytest.raises(SystemExit) as stop:
            main(["--help"])
        assert stop.value.code == 0
        assert "examples:" in capsys.readouterr().out
