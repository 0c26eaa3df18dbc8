"""The demo on a tiny pair: what it shows, what it measures, and what it says when the drafter is not installed."""

import io
import re

import pytest
from rich.console import Console

import dflax
from dflax import cli, model
from dflax.infer import demo
from dflax.infer.demo import Comparison, DemoConfig, choose_prompt, compare, show
from dflax.train import stories
from tests.golden import load_case

NEW = 24


@pytest.fixture(scope="module")
def case():
    return load_case("dflash_generate")


@pytest.fixture(scope="module")
def pair(case):
    return dflax.load(case.folder / "target"), dflax.load(case.folder / "drafter_fitted")


@pytest.fixture(scope="module")
def prompt(case):
    return case.expected["prompts"][0].tolist()


@pytest.fixture(scope="module")
def plain(pair, prompt):
    return dflax.generate(pair[0], [prompt], NEW)


def test_plain_text_where_it_is_not_a_terminal(pair, prompt, plain):
    out = io.StringIO()
    written = show(Console(file=out), *pair, prompt, NEW)
    assert written == "".join(f"{token} " for token in plain.tokens[0])
    assert out.getvalue() == f"{written}\n"


def test_drafts_are_green_on_a_terminal(pair, prompt, plain, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard")
    show(console, *pair, prompt, NEW)
    green = " ".join(re.findall(r"\x1b\[1;32m(.*?)\x1b\[0m", out.getvalue())).split()
    rounds = dflax.speculate(*pair, [prompt], NEW).acceptance_lengths[0]
    assert len(green) > 0
    # Each round's last token is the target's; the last round may have been cut to its drafts.
    assert sum(rounds) - len(rounds) <= len(green) <= sum(rounds) - len(rounds) + 1
    assert re.sub(r"\x1b\[.*?m", "", out.getvalue()).split() == [str(token) for token in plain.tokens[0]]


def test_compare_counts_nothing_that_compiles(pair, prompt, plain):
    result = compare(*pair, prompt, NEW, repeats=1)
    assert result.plain.stats.compiled == result.speculative.stats.compiled == 0
    assert result.plain.tokens == plain.tokens
    assert result.identical
    assert result.plain_speed > 0
    text = result.lines()
    assert "identical output   yes" in text
    assert f"speed-up           {result.speculative_speed / result.plain_speed:.2f} times" in text
    other = Comparison(result.plain, dflax.generate(pair[0], [prompt], 3), 1.0, 1.0)
    assert "identical output   no" in other.lines()


def test_a_response_of_one_token_has_no_speed(pair, prompt):
    assert "speed-up           -" in compare(*pair, prompt, 1, repeats=1).lines()


def test_prompts():
    shown, chat = choose_prompt(DemoConfig(seed=1))
    assert shown in demo.PROMPTS
    assert chat == [{"role": "user", "content": shown}]
    assert choose_prompt(DemoConfig(seed=1)) == (shown, chat)
    assert choose_prompt(DemoConfig("mine", pair="tiny")) == ("mine", "mine")
    shown, given = choose_prompt(DemoConfig(pair="tiny", seed=2))
    assert shown == given
    assert "<unk>" not in stories.tokenizer().tokenize(shown)


def test_a_pair_that_is_not_installed(monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(model.BUILT_IN, "arith-dflash", lambda: tmp_path / "arith-dflash")
    monkeypatch.setitem(model.BUILT_IN, "arith", lambda: tmp_path)
    assert cli.main(["demo", "--pair", "tiny"]) == 2
    printed = capsys.readouterr()
    assert "'arith-dflash' is not in this installation" in printed.err
    assert printed.err.count("\n") == 1
