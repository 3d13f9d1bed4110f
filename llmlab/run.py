"""`python -m llmlab.run`: compose a config (or a sweep of them), measure it, show the numbers."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from llmlab import compose, sweep
from llmlab.bench.results import CorruptFile, Row, new_run_id, results_root
from llmlab.bench.summary import summary
from llmlab.bench.supervisor import Progress as RunProgress

EXIT_BAD_INPUT = 2
EXIT_INTERRUPTED = 130
WIDTH_IN_FILES = 140


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; its exit code.

    0: measured (a sweep also when points did not fit the machine); 1: a run failed; 2: bad input,
    nothing was run; 130: interrupted.
    """
    args = _parser().parse_intermixed_args(argv)
    try:
        points = compose.points(args.overrides, args.multirun)
        problems = sweep.check(points)
    except compose.ComposeError as error:
        problems = error.lines
    if problems:
        for line in problems:
            print(f"error: {line}", file=sys.stderr)
        return EXIT_BAD_INPUT
    if args.cfg:
        for point in points:
            print(compose.to_yaml(point.settings), end="---\n" if len(points) > 1 else "")
        return 0
    try:
        return _measure(points)
    except CorruptFile as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(
            "interrupted: finished runs are kept, the same command continues with the rest",
            file=sys.stderr,
        )
        return EXIT_INTERRUPTED


def _measure(points: list[compose.Point]) -> int:
    block_id = new_run_id()
    todo, stored = sweep.split_done(sweep.jobs(points, block_id))
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDTH_IN_FILES)
    if stored:
        console.print(
            f"{len(stored)} of {len(stored) + len(todo)} runs are already measured "
            "(resume=never measures them again)"
        )
    rows = _execute(todo, block_id, console)
    for row in rows:
        if row["status"] == "invalid_config":
            print(f"error: {row['error_msg']}", file=sys.stderr)
    console.print(summary([*stored, *rows], results_root(points[0].settings.output_dir)))
    return exit_code(rows, single=len(points) == 1)


def _execute(todo: list[sweep.Job], block_id: str, console: Console) -> list[Row]:
    columns = (
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        overall = progress.add_task("runs", total=len(todo), visible=len(todo) > 1)
        current = progress.add_task("", total=1)

        def on_start(order: int, job: sweep.Job) -> None:
            label = " ".join(job.overrides) or job.settings.name
            progress.update(current, description=label, completed=0, total=1)
            if not console.is_terminal:
                console.print(f"run {order + 1} of {len(todo)}: {label}", highlight=False)

        def on_progress(told: RunProgress) -> None:
            phase = told.phase
            if told.output_tokens is not None:
                phase += f", {told.output_tokens:,} tokens"
            progress.update(
                current, description=phase, completed=told.done or 0, total=told.total or 1
            )

        def on_end(order: int, row: Row) -> None:
            progress.update(overall, completed=order + 1)

        return sweep.execute(todo, block_id, on_start, on_progress, on_end)


def exit_code(rows: Sequence[Row], single: bool) -> int:
    """2 for a config refused while loading, 1 for a failed run, else 0.

    In a sweep a point that does not fit the machine is a finding, not a failure.
    """
    statuses = {row["status"] for row in rows}
    if "invalid_config" in statuses:
        return EXIT_BAD_INPUT
    findings = {"ok"} if single else {"ok", "oom_gpu", "oom_host", "unsupported"}
    return 0 if statuses <= findings else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llmlab.run",
        description="Compose one config (or a sweep), measure each in a process of its own, and "
        "write the rows as parquet.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=_epilog(),
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="a group's choice (kv=contiguous), a value in it (kv.block_tokens=32), "
        "or a named experiment (+experiment=kv_layout)",
    )
    parser.add_argument(
        "-m", "--multirun", action="store_true", help="sweep over comma-separated values"
    )
    parser.add_argument("--cfg", action="store_true", help="print the composed config, run nothing")
    return parser


def _epilog() -> str:
    lines = compose.choices_help()
    lines += [
        "",
        "examples:",
        "  python -m llmlab.run                                   the defaults: embedded model",
        "  python -m llmlab.run +experiment=quickstart            one named experiment",
        "  python -m llmlab.run kv=contiguous batching.max_batch=8",
        "  python -m llmlab.run -m kv=contiguous,paged batching=static,continuous",
        "  python -m llmlab.run model=llama3_2_1b model.weights=random kv.max_seq_tokens=2048",
        "  python -m llmlab.run --cfg workload=azure_conv         see every value that can be set",
        "",
        "Runs that are finished are skipped when the command is given again (resume=never: not).",
        "Figures and report: python -m analysis.report",
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    try:
        raise SystemExit(main())
    except BrokenPipeError:  # the reader of a pipe, such as `head`, has seen enough
        sys.stderr.close()
