"""The setting `objective`: a name or a weighted sum.

Catches: a misspelt term that trains something else, the sign of an exponent taken for a sum, a
weight that switches a term off or turns it round, a mistake that shows only after the data is
made.
"""

import pytest

from specforge_trim.config.objective import TERMS, Objective, parse_objective
from specforge_trim.drafts.eagle3.settings import Config, ConfigError, LossConfig, load_config
from specforge_trim.loss.divergences import _TERMS
from specforge_trim.train.loop import step_settings


@pytest.mark.parametrize(
    "text, terms",
    [
        ("soft_ce", [("soft_ce", 1.0)]),
        ("0.5*soft_ce+0.5*tv", [("soft_ce", 0.5), ("tv", 0.5)]),
        (" 2 * js + lk_alpha ", [("js", 2.0), ("lk_alpha", 1.0)]),
        ("1e+2*tv+1e-3*soft_ce+.5*js", [("tv", 100.0), ("soft_ce", 0.001), ("js", 0.5)]),
        ("soft_ce+tv", [("soft_ce", 1.0), ("tv", 1.0)]),
    ],
)
def test_what_is_read(text, terms):
    assert parse_objective(text).terms == tuple(terms)


@pytest.mark.parametrize(
    "text, says",
    [
        ("soft_cee", "did you mean soft_ce"),
        ("kl", "unknown term 'kl', expected soft_ce, hard_ce"),
        ("soft_ce+soft_ce", "soft_ce stands there twice"),
        ("", "is no term"),
        ("soft_ce+", "is no term"),
        ("soft_ce-tv", "is no term"),
        ("-1*tv", "is no term"),
        ("tv*2", "is no term"),
        ("0*tv", "weight 0, expected a number above 0"),
        ("1.2.3*tv", "weight 1.2.3"),
        ("1e999*tv", "weight 1e999"),
    ],
)
def test_what_is_refused(text, says):
    with pytest.raises(ValueError, match="objective = ") as error:
        parse_objective(text)
    assert says in str(error.value)
    with pytest.raises(ConfigError, match="objective = "):
        Config(loss=LossConfig(objective=text))


@pytest.mark.parametrize("objective", ["soft_ce", "0.5*soft_ce+0.5*lk_alpha"])
def test_an_eta_that_nothing_reads_is_refused(objective):
    with pytest.raises(ConfigError, match="lk_eta = 10 has no effect with .*lk_lambda"):
        Config(loss=LossConfig(objective=objective, lk_eta=10.0))
    Config(loss=LossConfig(objective="0.5*tv+0.5*lk_lambda", lk_eta=10.0))


def test_every_term_has_a_gradient():
    assert set(_TERMS) | {"lk_lambda"} == set(TERMS)


def test_settings_reach_the_step():
    assert step_settings(Config()).objective == Objective() == parse_objective("soft_ce")
    argv = ["--objective", "0.9*lk_lambda+0.1*hard_ce", "--lk-eta", "10", "--loss-decay", "0.6"]
    config = load_config(argv, prog="t", description="d")
    assert step_settings(config).decay == 0.6
    want = Objective((("lk_lambda", 0.9), ("hard_ce", 0.1)), lk_eta=10.0)
    assert step_settings(config).objective == want
