"""The command line: what goes to stdout and what to stderr, exit codes, and `calibrate`'s own words."""

from __future__ import annotations

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from kvsluice.connector import OffloadConfig
from kvsluice.connector.calibrate import Progress, place
from kvsluice.connector.cli import calibrate, main
from kvsluice.connector.cli.output import terminated_as_exit
from kvsluice.tiers import FileSystemTier, reasons
from kvsluice.tiers.errors import TierUnavailableError

SMALL = ["--chunk-bytes", "64KiB", "--sizes", "16KiB", "--concurrency", "1,2", "--max-bytes", "32MiB"]


def snippet_in(text: str) -> dict[str, object]:
    """The one JSON object in a result for people."""
    found, _ = json.JSONDecoder().raw_decode(text[text.index("{") :])
    return found


def test_calibrate_prints_grid_snippet_and_reasons(tmp_path, capsys):
    assert main(["calibrate", str(tmp_path), *SMALL]) == 0
    out, err = capsys.readouterr()
    assert "writes: throughput, and median/p99 of one" in out
    assert "reads: throughput, and median/p99 of one" in out
    assert "16 KiB" in out
    assert "64 KiB" in out
    snippet = snippet_in(out)
    assert snippet["root_dir"] == str(tmp_path)
    OffloadConfig.from_dict({"tiers": [snippet]})
    for key, value in {**snippet["backpressure"], "n_read_threads": snippet["n_read_threads"]}.items():
        assert f"  {key} {value:g}: " in out
    assert "calibrate: 0/8" in err
    assert "calibrate: 8/8" in err
    assert list(tmp_path.iterdir()) == []


def test_with_json_stdout_is_one_document(tmp_path, capsys):
    assert main(["calibrate", str(tmp_path), *SMALL, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out)
    assert set(document) >= {"grid", "fit", "suggestion", "snippet", "left_behind"}
    assert len(document["grid"]) == 8
    assert "calibrate: 8/8" in err


def test_no_line_is_wider_than_a_terminal_of_eighty_columns_but_the_sentences(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(calibrate, "results", lambda: Console(width=80, highlight=False))
    wide = [*SMALL[:4], "--concurrency", "1,2,3,4,5", *SMALL[6:]]
    assert main(["calibrate", str(tmp_path), *wide]) == 0
    out = capsys.readouterr().out
    rows = [line for line in out.splitlines() if "iB/s" in line and ":" not in line and "," not in line]
    assert len(rows) == 4
    assert all(line.count("iB/s") == 5 for line in rows)


def test_cells_that_were_not_measured_are_named_with_the_reason(tmp_path, capsys):
    few = ["--chunk-bytes", "64KiB", "--sizes", "64KiB", "--concurrency", "1,2,16", "--max-bytes", "6MiB"]
    assert main(["calibrate", str(tmp_path), *few]) == 0
    assert "not measured: 64 KiB x 16: more bytes than allowed (max_bytes)" in capsys.readouterr().out


def write_config(path: Path, *tiers: dict[str, object], **top: object) -> Path:
    path.write_text(json.dumps({"tiers": [{"type": "host", "capacity": "1GiB"}, *tiers], **top}))
    return path


@pytest.mark.parametrize("name", ["nvme", "fs"])
def test_a_tier_is_taken_from_the_configuration_by_name_or_type(tmp_path, capsys, name):
    root = tmp_path / "kv"
    root.mkdir()
    config = write_config(
        tmp_path / "c.json",
        {"type": "fs", "name": "nvme", "root_dir": str(root), "capacity": "1GiB", "backpressure": {"cooldown_s": 3}},
        {"type": "obj", "bucket": "kvs"},
    )
    assert main(["calibrate", "--config", str(config), "--tier", name, *SMALL, "--json"]) == 0
    snippet = json.loads(capsys.readouterr().out)["snippet"]
    assert (snippet["name"], snippet["capacity"], snippet["backpressure"]["cooldown_s"]) == ("nvme", 1 << 30, 3)
    assert list(root.iterdir()) == []


def test_the_only_tier_that_can_be_measured_needs_no_name(tmp_path, capsys):
    config = write_config(
        tmp_path / "c.json",
        {"type": "fs", "root_dir": str(tmp_path)},
        backpressure={"backpressure_cls": "EMABackpressureDetector"},
    )
    assert main(["calibrate", "--config", str(config), *SMALL, "--json"]) == 0
    assert "backpressure_cls" not in json.loads(capsys.readouterr().out)["snippet"]["backpressure"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "give a folder or s3://bucket/prefix, or --config FILE with --tier NAME"),
        (["{here}", "--tier", "fs"], "give a folder"),
        (["{here}/typo"], "there is no folder '{here}/typo'"),
        (["gs://bucket/prefix"], "'gs://bucket/prefix': give a folder or s3://bucket/prefix"),
        (["{here}", "--region", "eu"], "unknown key 'region'"),
        (["{here}", "--direct-io", "maybe"], "direct_io is 'maybe'"),
        (["s3://kvs", "--endpoint-url", "ftp://there"], "endpoint_url"),
        (["{here}", "--chunk-bytes", "4 bananas"], "--chunk-bytes '4 bananas': a size is"),
        (["{here}", "--sizes", "1MiB,,"], "--sizes '': a size is"),
        (["{here}", "--concurrency", "1,two"], "--concurrency 'two': give whole numbers"),
        (["{here}", "--max-bytes", "1MiB"], "max_bytes is 1048576: chunks of 4 MiB need at least"),
        (["{here}", "--max-seconds", "-1"], "max_seconds is -1"),
        (["--config", "{here}/none.json"], "configuration file '{here}/none.json'"),
        (["--config", "{here}/c.json"], "--tier is missing; there are 'nvme', 'obj' of type fs or obj"),
        (["--config", "{here}/c.json", "--tier", "nvm"], "--tier 'nvm' names no tier; there are 'nvme', 'obj'"),
        (["--config", "{here}/c.json", "--tier", "host"], "--tier 'host' names no tier"),
        (["{here}", "--config", "{here}/c.json"], "--config names the tier: leave {here} out"),
        (["--config", "{here}/c.json", "--region", "eu"], "--config names the tier: leave --region out"),
    ],
)
def test_wrong_use_is_one_line_on_stderr_and_exit_code_2(tmp_path, capsys, arguments, message):
    write_config(
        tmp_path / "c.json",
        {"type": "fs", "name": "nvme", "root_dir": str(tmp_path)},
        {"type": "obj", "bucket": "kvs"},
    )
    before = list(tmp_path.iterdir())
    assert main(["calibrate", *(argument.format(here=tmp_path) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("kvsluice: ")
    assert message.format(here=tmp_path) in line
    assert list(tmp_path.iterdir()) == before


def test_several_wrong_keys_are_still_one_line(tmp_path, capsys):
    (tmp_path / "c.json").write_text(json.dumps({"tiers": [{"type": "fs", "rot": 1, "capacity": "x"}]}))
    assert main(["calibrate", "--config", str(tmp_path / "c.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "rot" in line
    assert "capacity" in line


def test_a_tier_that_fails_is_one_line_and_exit_code_1(tmp_path, capsys, monkeypatch):
    def fail(self: FileSystemTier, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        raise TierUnavailableError("fs: could not store it", reason=reasons.IO_ERROR)

    monkeypatch.setattr(FileSystemTier, "store", fail)
    assert main(["calibrate", str(tmp_path), *SMALL]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == "kvsluice: fs: could not store it"
    assert list(tmp_path.iterdir()) == []


def test_what_is_left_behind_is_exit_code_1_and_the_result_is_printed(tmp_path, capsys, monkeypatch):
    def refuse(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise PermissionError(1, "not permitted", str(path))

    monkeypatch.setattr(place.shutil, "rmtree", refuse)
    assert main(["calibrate", str(tmp_path), *SMALL, "--json"]) == 1
    out, err = capsys.readouterr()
    (left,) = json.loads(out)["left_behind"]
    assert left.startswith(str(tmp_path))
    assert "not removed" in err


@pytest.mark.parametrize(
    ("number", "code", "word"),
    [
        (signal.SIGINT, 130, "interrupted"),
        (signal.SIGTERM, 143, "terminated"),
        (signal.SIGHUP, 129, "hung up"),
    ],
)
def test_a_signal_ends_it_cleanly(tmp_path, capsys, monkeypatch, number, code, word):
    store = FileSystemTier.store
    calls = iter(range(10**9))

    def stop(self: FileSystemTier, key: bytes, buffer: memoryview, num_bytes: int) -> int:
        if next(calls) == 150:
            os.kill(os.getpid(), number)
        return store(self, key, buffer, num_bytes)

    monkeypatch.setattr(FileSystemTier, "store", stop)
    before = [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)]
    arguments = ["--chunk-bytes", "1MiB", "--sizes", "1MiB", "--concurrency", "2", "--max-bytes", "2GiB", "--json"]
    assert main(["calibrate", str(tmp_path), *arguments]) == code
    assert [signal.getsignal(one) for one in (signal.SIGTERM, signal.SIGHUP)] == before
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == f"kvsluice: {word}"
    assert list(tmp_path.iterdir()) == []


def test_a_second_signal_does_not_stop_the_clean_up(tmp_path):
    removed = tmp_path / "removed"

    def work() -> None:
        with terminated_as_exit():
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGHUP)
                signal.raise_signal(signal.SIGTERM)
                removed.touch()

    with pytest.raises(SystemExit) as ended:
        work()
    assert ended.value.code == 143
    assert removed.exists()


def test_a_signal_that_is_ignored_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with terminated_as_exit():
            signal.raise_signal(signal.SIGHUP)
            assert signal.getsignal(signal.SIGTERM) != signal.SIG_IGN
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_an_unknown_option_is_exit_code_2(capsys):
    assert main(["calibrate", "--nope"]) == 2
    assert "No such option" in capsys.readouterr().err


def test_help_names_every_command_and_without_one_it_is_wrong_use(capsys):
    assert main(["--help"]) == 0
    assert "calibrate" in capsys.readouterr().out
    assert main([]) == 2


def test_the_version_is_that_of_the_distribution(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == importlib.metadata.version("kvsluice")


def test_the_script_is_installed_and_runs():
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="kvsluice")
    assert script.load() is main


@pytest.mark.parametrize("absent", ["typer", "rich"])
def test_without_the_extra_it_says_what_to_install(absent):
    # In a process of its own: what has been imported here would hide the absence.
    code = f"""
import sys
sys.modules[{absent!r}] = None
from kvsluice.connector.cli import main
sys.exit(main(["--help"]))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"kvsluice: the command line needs {absent}: pip install 'kvsluice[cli]'\n"


def test_on_a_terminal_progress_is_a_bar_that_goes_away(capsys):
    console = Console(stderr=True, force_terminal=True, width=100)
    with calibrate._progress(console, 60.0) as show:  # noqa: SLF001 - a terminal is not to be had in a test
        show(Progress(1, 4, "write", 1 << 20, 2, 1.0))
        show(Progress(4, 4, None, 0, 0, 2.0))
    err = capsys.readouterr().err
    assert "write 1 MiB x 2" in err
    assert "1/4" in err
    assert "of 60 s at the most" in err
