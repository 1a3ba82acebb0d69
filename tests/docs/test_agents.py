"""AGENTS.md and the skill name what exists; `test_pages.py` checks their commands and links."""

import re
from dataclasses import fields

import pytest
import yaml
from pages import ROOT

from credit_trl import CreditConfig
from credit_trl.cli import COMPANIONS

AGENTS = (ROOT / "AGENTS.md").read_text("utf-8")
SKILLS = sorted((ROOT / "skills").glob("*/SKILL.md"))


def front_matter(text: str) -> dict:
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)[1])


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.parent.name)
def test_skill_has_the_form_that_assistants_read(skill):
    header = front_matter(skill.read_text("utf-8"))
    assert re.fullmatch(r"[a-z0-9-]{1,64}", header["name"])
    assert header["name"] == skill.parent.name
    assert 0 < len(header["description"]) <= 1024


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.parent.name)
def test_commands_of_the_skill_are_in_its_header(skill):
    text = skill.read_text("utf-8")
    commands = set(front_matter(text)["metadata"]["commands"])
    assert commands <= {f"trl {name}" for name in ("credit", *COMPANIONS)}
    blocks = re.findall(r"```bash\n(.*?)```", text, re.DOTALL)
    assert set(re.findall(r"^(trl [\w-]+)", "".join(blocks), re.MULTILINE)) == commands


@pytest.mark.parametrize("skill", SKILLS, ids=lambda skill: skill.parent.name)
def test_options_and_metrics_of_the_skill_exist(skill):
    text = skill.read_text("utf-8").partition("\n---\n")[2]
    settings = set(re.findall(r"`(\w+)(?:: [^`]*)?`", text))
    options = {name for name in settings if "_" in name and not name.startswith("_")}
    assert len(options) > 5
    assert options - {"credit_maps"} <= {field.name for field in fields(CreditConfig)}
    documented = (ROOT / "docs" / "options.md").read_text("utf-8")
    for metric in re.findall(r"`(credit/\w+)`", text):
        assert f"`{metric}`" in documented, metric


def test_agents_page_is_short_and_its_folders_exist():
    assert len(AGENTS.splitlines()) <= 60
    rows = re.findall(r"^\| (`.*?) \|", AGENTS, re.MULTILINE)
    paths = [path for row in rows for path in re.findall(r"`([\w/.]+)`", row)]
    assert len(paths) > 10
    missing = [path for path in paths if not (ROOT / "src" / "credit_trl" / path).exists()]
    assert missing == []
