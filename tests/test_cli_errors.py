"""What a user can get wrong: one clear message on stderr, exit code 2, no traceback.

Catches: a wrong input that trains on, a traceback in the user's face, a message that does not name
what is wrong, an error that every rank repeats, help that does not show an example.
"""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch

from specforge_trim.cli.main import COMMANDS, main, train_main

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    folder = tmp_path_factory.mktemp("errors")
    tiny.save_tiny_target(folder / "target")
    tiny.save_tiny_target(folder / "shallow", num_layers=4)
    tiny.write_conversations(folder / "train.jsonl", 2)
    (folder / "empty.jsonl").write_text('{"messages": []}\n{"rows": 1}\n')
    (folder / "misspelt.yaml").write_text("train:\n  lerning_rate: 1\n")
    (folder / "plain.yaml").write_text("train: {device: cpu}\n")
    return folder


def fails(capfd, argv, *, command=train_main):
    """The error text of a command that must end with exit code 2 and no traceback."""
    assert command(argv) == 2
    err = capfd.readouterr().err
    assert "Traceback" not in err
    assert err.count("error: ") == 1
    return err[err.index("error: ") :]


def base(place, *, target="target", data="train.jsonl"):
    return [
        *("--config", str(place / "plain.yaml"), "--target", str(place / target)),
        *("--train-data", str(place / data), "--cache-dir", str(place / "cache")),
        *("--output-dir", str(place / "run"), "--num-workers", "0"),
    ]


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--config", "no/such.yaml"], ["no/such.yaml", "no such file"]),
        (["--trim-backbone-rows"], ["trim_backbone_rows", "trim_loss_positions"]),
        (["--draft-vocab-size", "0"], ["draft_vocab_size", "0"]),
        (["--draft-vocab-size", "9999"], ["draft_vocab_size", "9999", "272"]),
        (["--attention-backend", "usp"], ["usp", "one"]),
        (["--stop-grad-context-tokens"], ["--stop-grad-context-tokens", "--trim-loss-positions"]),
        (["--no-such-flag"], ["--no-such-flag"]),
        (["--train-data", "no.jsonl"], ["no.jsonl", "no such file"]),
        (["--train-data", "{place}"], ["{place}", "is a folder, expected a file"]),
        (["--target", "no/such/target"], ["no/such/target"]),
        (["--aux-layers", "1", "9", "12"], ["aux_layers", "[1, 9, 12]", "8"]),
        (["--aux-layers", "none", "2"], ["aux_layers", "[None, 2]", "alone"]),
        (["--cache-dir", "~nobodyhere/x"], ["cache_dir", "~nobodyhere/x", "home folder"]),
        (["--init-from", "~nobodyhere/x"], ["init_from", "~nobodyhere/x", "home folder"]),
        (["--fsdp"], ["fsdp", "this run has one"]),
        # Nothing is fetched or made before files that are read later are looked for.
        (
            ["--target", "no/such/target", "--eval-every", "5", "--eval-data", "no.jsonl"],
            ["no.jsonl", "no such file"],
        ),
        (
            ["--target", "no/such/target", "--decode-every", "5", "--eval-data", "no.jsonl"],
            ["no.jsonl", "no such file"],
        ),
        (
            ["--eval-every", "5", "--eval-features", "{place}/none"],
            ["eval_features", "{place}/none", "no such folder"],
        ),
    ],
)
def test_cli_wrong_training_input(place, capfd, argv, words):
    argv, words = ([text.replace("{place}", str(place)) for text in s] for s in (argv, words))
    err = fails(capfd, [*base(place), *argv])
    assert all(word in err for word in words), err
    assert len(err.strip().splitlines()) == 1


def test_cli_misspelt_key_names_key_file_and_the_right_one(place, capfd):
    err = fails(capfd, ["--config", str(place / "misspelt.yaml")])
    assert "train.lerning_rate" in err and "misspelt.yaml" in err and "'learning_rate'" in err


def test_cli_data_without_a_usable_conversation_names_file_and_line(place, capfd):
    err = fails(capfd, base(place, data="empty.jsonl"))
    assert "no usable conversation" in err and "empty.jsonl:1" in err


def test_cli_shallow_target_needs_aux_layers(place, capfd):
    err = fails(capfd, base(place, target="shallow"))
    assert "aux_layers" in err and "4 layers" in err and "7" in err


def test_cli_fa_without_its_package(place, capfd, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    err = fails(capfd, [*base(place), "--attention-backend", "fa"])
    assert "fa" in err and "flash-attn" in err and "not installed" in err


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["inspekt"], ["inspekt", "'inspect'"]),
        (["export", "--output-dir", "no/run"], ["no complete checkpoint", "no/run"]),
        (["evaluate"], ["eval_data"]),
        (["evaluate", "--eval-data", "no.jsonl"], ["no.jsonl", "no such file"]),
        (
            ["evaluate", "--eval-data", "{data}", "--output-dir", "no/run"],
            ["no draft in no/run/export", "`specforge-trim export`", "--draft"],
        ),
        (["prepare"], ["train_data"]),
        (["inspect", "no.jsonl"], ["no.jsonl", "no such file"]),
        (["inspect", "{data}", "--index", "5"], ["--index 5", "0 to 1"]),
        (["inspect", "{data}", "--html", "{data}"], ["--html", "is no HTML page"]),
        (["inspect", "{data}", "--html", "."], ["--html .", "expected a file"]),
        (["inspect", "{data}", "--conversations", "-1"], ["--conversations -1", "at least 0"]),
        (["regenerate", "{data}"], ["--out"]),
        (["capture", "{data}", "--lerning-rate", "3"], ["--lerning-rate"]),
    ],
)
def test_cli_wrong_command_input(place, capfd, argv, words):
    argv = [a.replace("{data}", str(place / "train.jsonl")) for a in argv]
    setting = ["--config", str(place / "plain.yaml"), "--target", str(place / "target")]
    setting += ["--cache-dir", str(place / "cache")]
    err = fails(
        capfd, argv + (setting if len(argv) > 1 or argv[0] != "inspekt" else []), command=main
    )
    assert all(word in err for word in words), err


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_cli_help_shows_an_example(name, capsys):
    with pytest.raises(SystemExit) as done:
        main([name, "--help"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    assert "example:" in out and f"specforge-trim {name}" in out
    # verify reads stores of any target, make-config takes the target as its argument, and plot
    # reads metrics only
    assert "--target" in out or name in ("verify", "make-config", "plot")


def test_cli_without_arguments_lists_the_commands(capsys):
    with pytest.raises(SystemExit) as done:
        main([])
    assert done.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)


@pytest.mark.parametrize("command", [main, train_main])
def test_cli_version_names_what_decides_a_result(command, capsys):
    with pytest.raises(SystemExit) as done:
        command(["--version"])
    assert done.value.code == 0
    out = capsys.readouterr().out
    assert "specforge_trim" in out and torch.__version__.split("+")[0] in out


def test_cli_a_fault_of_the_program_keeps_its_traceback(monkeypatch):
    def broken(argv):
        raise AssertionError("ours")

    monkeypatch.setitem(COMMANDS, "export", broken)
    with pytest.raises(AssertionError, match="ours"):
        main(["export"])


def test_cli_script_ends_with_code_2_and_only_rank_0_speaks(place):
    command = [sys.executable, str(ROOT / "train_eagle3.py"), "--trim-backbone-rows"]
    command += ["--config", str(place / "plain.yaml")]
    for rank, lines in (("0", 1), ("1", 0)):
        environment = os.environ | {"RANK": rank, "WORLD_SIZE": "2", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        assert done.returncode == 2
        assert len(done.stderr.splitlines()) == lines, done.stderr
