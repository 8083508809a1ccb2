"""Tables: every arm in each, with intervals, and a word on what the text was."""

from __future__ import annotations

import io
from dataclasses import replace

from rich.console import Console

from fabric.evaluate.config import FULL
from fabric.evaluate.report import tables
from fabric.evaluate.results import Evaluation, arm_result
from tests.fabric.evaluate.test_results import figures


def an_evaluation() -> Evaluation:
    """Two arms on two sets."""
    samples = [
        figures(kl=0.01, top1=0.9, nll=2.1, greedy_match=0.75),
        figures(kl=0.03, top1=1.0, nll=2.0),
        figures(set_name="lookup", is_found=True, is_found_reference=True),
        figures(set_name="lookup", is_found=False, is_found_reference=True),
    ]
    return Evaluation(
        model="tiny",
        namespace="ab",
        evaluation_set="cdef",
        is_registered=True,
        config=FULL,
        arms=tuple(arm_result(name, None, samples, {"prose"}) for name in ("one", "two")),
    )


def printed(found: Evaluation) -> list[str]:
    """Each table as text, on a terminal of 80 columns."""
    texts = []
    for table in tables(found):
        console = Console(file=io.StringIO(), width=80)
        console.print(table)
        texts.append(console.file.getvalue())  # type: ignore[attr-defined]  # a StringIO
    return texts


def test_there_is_a_table_of_all_and_one_of_each_set() -> None:
    """Each with all arms."""
    pooled, prose, lookup = printed(an_evaluation())

    for text in (pooled, prose, lookup):
        assert "one" in text
        assert "two" in text
    assert "prose, 2 windows, 20 tokens" in pooled
    assert "prose: 2 samples, 20 tokens, perplexity 7.4" in prose
    assert "lookup: 2 samples" in lookup


def test_figures_stand_with_their_intervals() -> None:
    """KL, top-1, perplexity and greedy tokens; found keys where keys were asked for."""
    pooled, _, lookup = printed(an_evaluation())

    for cell in ("8.00", "0.0200", "0.0100..0.0300", "95.0", "90.0..100.0", "5.13", "75..75"):
        assert cell in pooled
    assert "found" not in pooled
    assert "full %" in lookup
    assert "0..100" in lookup
    assert "greedy" not in lookup


def test_one_set_needs_no_table_of_its_own() -> None:
    """It is the pooled one."""
    only = arm_result("one", None, [figures()], {"prose"})

    assert len(printed(replace(an_evaluation(), arms=(only,)))) == 1


def test_text_of_the_callers_own_is_called_that() -> None:
    """It qualifies nothing."""
    registered, *_ = printed(an_evaluation())
    own, *_ = printed(replace(an_evaluation(), is_registered=False))

    assert "evaluation set cdef" in registered
    assert "qualifies no codec" in " ".join(own.split())
    assert "qualifies" not in registered
