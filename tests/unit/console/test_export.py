"""Exports of runs: their parts hold what the routes answer, and nothing that others may not see."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import pytest
from dialoop.errors import AlreadyExists
from dialoop_ops.cli.main import main
from dialoop_ops.console import export
from dialoop_ops.runs import RunIndex, token_numbers
from dialoop_ops.runs.summaries import text_of
from dialoop_ops.runs.token_numbers import token_page

from tests.unit.console.test_app import XSS, row, write_run


def unpack(packed: str) -> Any:
    return json.loads(gzip.decompress(base64.b64decode(packed)))


def read_head(folder: Path) -> Any:
    text = (folder / "data" / "head.js").read_text()
    (packed,) = re.fullmatch(r'window\.dialoopExport="([A-Za-z0-9+/=]+)";\n', text).groups()  # type: ignore[union-attr]
    return unpack(packed)


def read_part(folder: Path, name: str) -> Any:
    text = (folder / "data" / f"{name}.js").read_text()
    named, packed = re.fullmatch(r'dialoopPart\("(.+?)","([A-Za-z0-9+/=]+)"\);\n', text).groups()  # type: ignore[union-attr]
    assert named == name
    return unpack(packed)


def test_the_parts_hold_every_trajectory_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(export, "_PART_BYTES", 1500)
    run_dir = write_run(tmp_path / "a", num_rows=9)
    shown: list[tuple[str, int, int]] = []
    size = export.export_runs(
        {"a": RunIndex(run_dir)}, tmp_path / "out", show=lambda *args: shown.append(args)
    )
    assert size == sum(p.stat().st_size for p in (tmp_path / "out").rglob("*") if p.is_file())
    assert shown[-1] == ("a", 9, 9)
    (run,) = read_head(tmp_path / "out")["runs"]
    parts = {
        kind: [
            read_part(tmp_path / "out", f"{run['folder']}{kind}-{number}")
            for number in range(len(firsts))
        ]
        for kind, firsts in run["parts"].items()
    }
    assert len(parts["rows"]) > 1
    begins = [1 + sum(map(len, parts["rows"][:number])) for number in range(len(parts["rows"]))]
    assert run["parts"]["rows"] == begins
    summaries = [dict(zip(run["fields"], v, strict=True)) for p in parts["summaries"] for v in p]
    assert [s["number"] for s in summaries] == list(range(1, 10))
    assert [text for part in parts["texts"] for text in part] == [text_of(row(0))] * 9
    rows = [each for part in parts["rows"] for each in part]
    assert [each["trajectory"]["trajectory_id"] for each in rows] == [f"t{n}" for n in range(9)]
    assert rows[0]["tokens"][0]["ids"] == token_page(row(0)).ids
    assert rows[0]["tokens"][0]["logprobs"] == [None, None, -0.25, "-Infinity"]


def test_a_long_sequence_is_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(token_numbers, "MAX_TOKENS", 3)
    run_dir = write_run(tmp_path / "a", num_rows=1)
    export.export_runs({"a": RunIndex(run_dir)}, tmp_path / "out")
    (whole,) = read_part(tmp_path / "out", "0/rows-0")[0]["tokens"]
    assert (whole["ids"], whole["start"], whole["num_tokens"]) == ([5, 8, 2, 7], 0, 4)
    assert {len(value) for value in whole.values() if isinstance(value, list)} == {4}


def test_an_export_has_no_path_no_secret_and_no_html_of_a_model(tmp_path, capsys):
    run_dir = write_run(tmp_path / "a")
    assert main(["console", str(run_dir), "--export", str(tmp_path / "out")]) == 0
    assert str(tmp_path / "out" / "index.html") in capsys.readouterr().out
    head = read_head(tmp_path / "out")
    assert str(tmp_path) not in json.dumps(head)
    assert "hush" not in json.dumps(head)
    files = [path.read_text() for path in (tmp_path / "out").rglob("*.js")]
    assert not any(XSS in text for text in files)
    page = (tmp_path / "out" / "index.html").read_text()
    assert "default-src 'none'" in page
    assert page.index("data/head.js") < page.index("assets/console.js")
    assert "://" not in page


def test_a_folder_that_holds_anything_is_refused(tmp_path, capsys):
    run_dir = write_run(tmp_path / "a")
    with pytest.raises(AlreadyExists, match="exists already"):
        export.export_runs({"a": RunIndex(run_dir)}, run_dir)
    assert main(["console", str(run_dir), "--export", str(run_dir)]) == 1
    assert "Name a new directory" in capsys.readouterr().err


def test_a_run_whose_last_line_is_torn_is_exported_up_to_it(tmp_path):
    run_dir = write_run(tmp_path / "a", num_rows=3)
    with (run_dir / "trajectories.jsonl").open("a") as file:
        file.write(json.dumps(row(3))[:50])
    export.export_runs({"a": RunIndex(run_dir)}, tmp_path / "out")
    (run,) = read_head(tmp_path / "out")["runs"]
    assert run["progress"]["num_trajectories"] == 3
    assert run["progress"]["num_bytes"] < run["progress"]["num_bytes_of_run"]


def test_a_report_is_one_page_with_its_parts_inside(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(export, "MAX_REPORTED", 5)
    run_dir = write_run(tmp_path / "a", num_rows=9)
    rows = [row(n, outcome="evaluation" if n in (1, 2) else "trained") for n in range(9)]
    (run_dir / "trajectories.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    assert main(["report", str(run_dir)]) == 0
    file = run_dir / "report.html"
    assert str(file) in capsys.readouterr().out
    page = file.read_text()
    parts = dict(re.findall(r'<script type="text/plain" data-part="(.+?)">(.+?)</script>', page))
    head, console = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    (run,) = unpack(head.split('"')[1])["runs"]
    summaries = [dict(zip(run["fields"], v, strict=True)) for v in unpack(parts["0/summaries-0"])]
    # All evaluations, and the newest of the others.
    assert [each["number"] for each in summaries] == [2, 3, 7, 8, 9]
    assert len(unpack(parts["0/rows-0"])) == 5
    assert run["overview"]["num_trajectories"] == 9
    assert XSS not in page
    assert str(tmp_path) not in json.dumps(run)
    (style,) = re.findall(r"<style>(.*?)</style>", page, re.DOTALL)
    for text in (head, console, style):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"'sha256-{digest}'" in page
    assert not re.search(r'(src|href)="(?!data:)', page.replace(console, ""))


def test_a_report_replaces_its_own_file_and_no_other(tmp_path, capsys):
    run_dir = write_run(tmp_path / "a")
    assert main(["report", str(run_dir)]) == main(["report", str(run_dir)]) == 0
    mine = tmp_path / "mine.html"
    mine.write_text("mine")
    capsys.readouterr()
    assert main(["report", str(run_dir), "--json"]) == 0
    size = (run_dir / "report.html").stat().st_size
    said = json.loads(capsys.readouterr().out)
    assert said == {"page": str(run_dir / "report.html"), "num_bytes": size}
    assert main(["report", str(run_dir), "--to", str(mine)]) == 1
    assert (mine.read_text(), "Name a new file" in capsys.readouterr().err) == ("mine", True)
