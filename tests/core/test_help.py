"""Help pages: one screen each, with examples that can be read, and every option behind
`--help-all`."""

from __future__ import annotations

import dataclasses
import shlex

import pytest
from click.testing import CliRunner

from memfit.api.serving import Answering
from memfit.api.verbs import VERBS
from memfit.cli import main
from memfit.cli.commands import commands
from memfit.cli.help import EXAMPLES, FIRST, SCREEN
from memfit.job import Job
from memfit.words.options import Ask, Measuring, Planning, Run, Studying


def page(*words: str) -> str:
    done = CliRunner().invoke(commands, list(words), prog_name="memfit", terminal_width=80)
    assert done.exit_code == 0
    return done.output


@pytest.mark.parametrize("verb", VERBS)
def test_help_fits_one_screen_with_two_examples(verb: str) -> None:
    text = page(verb, "--help")
    assert len(text.splitlines()) <= SCREEN
    assert max(map(len, text.splitlines())) <= 80
    assert all(example in text for example in EXAMPLES[verb])
    short = ("models", "gpus", "cache", "card", "capture", "new-family")
    assert "--help-all" in text or verb in short


@pytest.mark.parametrize(
    ("typed", "same"),
    [
        (["help"], ["--help"]),
        (["help", "plan"], ["plan", "--help"]),
        (["-h"], ["--help"]),
        (["plan", "-h"], ["plan", "--help"]),
        (["version"], ["--version"]),
    ],
)
def test_other_words_for_help(
    typed: list[str], same: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(typed) == main(same) == 0
    out, err = capsys.readouterr()
    assert out[: len(out) // 2] == out[len(out) // 2 :]
    assert not err


@pytest.mark.parametrize("verb", VERBS)
def test_help_all_has_every_option(verb: str) -> None:
    text = page(verb, "--help-all")
    command = commands.get_command(None, verb)  # type: ignore[arg-type]
    assert command is not None
    names = {one.name: one for one in command.params}
    assert set(FIRST[verb]) <= set(names), "the short page names options that there are not"
    for one in command.params:
        assert one.opts[0] in text or one.param_type_name == "argument"


@pytest.mark.parametrize("verb", VERBS)
def test_the_examples_can_be_read(verb: str) -> None:
    for example in EXAMPLES[verb]:
        program, name, *words = shlex.split(example)
        words = words if name == verb else [name, *words]  # `card` is what no verb means
        assert program == "memfit"
        command = commands.get_command(None, verb)  # type: ignore[arg-type]
        assert command is not None
        command.make_context(verb, words)


@pytest.mark.parametrize("kind", [Ask, Job, Run, Planning, Answering, Studying, Measuring])
def test_every_option_has_one_plain_line(kind: type) -> None:
    for one in dataclasses.fields(kind):
        text = one.metadata["help"]
        assert 4 <= len(text) <= 82, one.name
        assert not text.endswith("."), one.name
