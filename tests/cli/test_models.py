"""kdit models: tables, JSON, and the document that is made from the same declarations."""

from __future__ import annotations

import json
from pathlib import Path

from typer.testing import CliRunner

from kdit.cli.main import app
from kdit.cli.models import document, models_report
from kdit.keys import FAMILIES

RUN = CliRunner()


def test_the_document_is_up_to_date(repository: Path) -> None:
    assert (repository / "docs" / "capabilities.md").read_text() == document()  # else: make docs


def test_json_names_every_pipeline_and_every_option() -> None:
    result = RUN.invoke(app, ["models", "--json"])
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report == models_report()
    keys = {key.value for entry in FAMILIES.values() for keys in entry.pipelines.values() for key in keys}
    assert {row["pipeline"] for row in report["pipelines"]} == keys
    names = [name for group in report["groups"].values() for name in group]
    assert len(set(names)) == len(names)
    for row in report["pipelines"]:
        assert list(row["options"]) and set(row["options"]) == set(names)
        assert row["folders"] and all(row["pipeline"] for _ in row["folders"])


def test_text_has_a_cell_for_each() -> None:
    result = RUN.invoke(app, ["models"])
    assert result.exit_code == 0
    report = models_report()
    cells = [cell.strip() for line in result.stdout.splitlines() for cell in line.split("|")]
    assert cells.count("yes") + cells.count("no") == sum(len(row["options"]) for row in report["pipelines"])
    assert cells.count("yes") == sum(sum(row["options"].values()) for row in report["pipelines"])
