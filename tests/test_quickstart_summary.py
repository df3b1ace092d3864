"""The quickstart's closing table.

Bugs caught: a line too wide for 80 columns, a share printed as a fraction, a count of
equal outputs that forgets a prompt set, minutes that do not add up.
"""

from specforge_trim.cli.summary import (
    DataLine,
    EvaluateLine,
    TrainLine,
    render_minutes,
    render_summary,
    table,
)


def example() -> str:
    return render_summary(
        title="specforge_trim quickstart: SmolLM2-135M-Instruct, 2 CPU threads",
        data=[
            DataLine("long_prompt", 1130, 1101234, 6012, 0.081, 0.1743),
            DataLine("humaneval", 92, 24123, 9000, 0.512, 0.62),
            DataLine("all", 1222, 1125357, 15012, 0.142, 0.27),
        ],
        train=TrainLine(
            epochs=4,
            steps=212,
            tokens_per_second=1523.6,
            loss=(3.1, 3.5, 4.0, 4.25, 4.5, 4.75, 15.0),
            accuracy=(0.41, 0.3, 0.25, 0.2, 0.125, 0.1, 0.0625),
        ),
        evaluate=[
            EvaluateLine("long_prompt", 8, 512, 1.432, 1.01, 8),
            EvaluateLine("humaneval", 8, 499, 1.6, 1.0, 7),
        ],
        minutes=[("install", 0.7), ("target", 0.3), ("train", 6.25), ("evaluate", 2.0)],
    )


def test_it_fits_a_terminal_and_holds_every_number():
    text = example()
    wide = [line for line in text.splitlines() if len(line) > 80]
    assert wide == []
    for piece in ("1,125,357", "17.4%", "8.1%", "1,524 tokens/s", "15.000", "0.062", "1.43"):
        assert piece in text, piece


def test_equal_outputs_are_counted_over_both_sets():
    assert "greedy output equals target: 15/16" in example()


def test_columns_line_up():
    lines = table(("name", "n"), [("a", "1"), ("long name", "1,000")])
    assert lines == [
        "name           n",
        "----------------",
        "a              1",
        "long name  1,000",
    ]


def test_minutes_add_up_and_wrap():
    assert render_minutes([("a", 0.25), ("b", 1.5)]).endswith("all 1.8")
    many = render_minutes([(f"phase number {i}", 1.0) for i in range(9)])
    assert max(map(len, many.splitlines())) <= 80 and "all 9.0" in many
