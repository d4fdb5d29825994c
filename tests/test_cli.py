"""`treecp-rl`: exit codes, JSON on stdout and nothing else there, and help without importing torch."""

import json
import subprocess
import sys

import pytest

from treecp_rl import __version__, cli
from treecp_rl.verify.models import tiny_config

SMALL = ["--num-layers", "1", "--vocab-size", "64", "--lengths", "9:3,4,0;5:2"]


def run(*arguments):
    return subprocess.run(
        [sys.executable, "-m", "treecp_rl.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_version():
    finished = run("--version")
    assert (finished.returncode, finished.stdout.strip()) == (0, f"treecp-rl {__version__}")


def test_help_imports_nothing_heavy():
    code = (
        "import sys; from treecp_rl import cli\n"
        "try: cli.main(['verify', '--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'verl', 'ray', 'transformers', 'hydra'} & set(sys.modules)))"
    )
    finished = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert finished.stdout.strip().endswith("[]")


def test_no_command_prints_help(capsys):
    assert cli.main([]) == 2
    assert "verify" in capsys.readouterr().out


def test_verify_json(capsys):
    assert cli.main(["verify", "--json", *SMALL]) == 0
    record = json.loads(capsys.readouterr().out)
    keys = {"passed", "cases", "max_relative_gradient_error", "max_logprob_error", "dtype", "world_size"}
    assert keys <= record.keys()
    assert record["passed"] is True


def test_verify_table(capsys):
    assert cli.main(["verify", "--share", "prefix", "--dtype", "float32", *SMALL]) == 0
    out = capsys.readouterr().out
    assert "your_lengths" in out
    assert "exact: qwen2" in out


def test_verify_missed_bound_exits_1(monkeypatch, capsys):
    from treecp_rl.verify import certificate

    monkeypatch.setattr(certificate, "_FLOAT64_BOUND", 1e-30)
    assert cli.main(["verify", *SMALL]) == 1
    assert "MISSED" in capsys.readouterr().out


def test_refused_model_exits_2(tmp_path, capsys):
    config = tiny_config(64, hidden_size=32, num_layers=2)
    config.layer_types = ["full_attention", "sliding_attention"]
    config.save_pretrained(tmp_path)
    assert cli.main(["verify", "--model-config", str(tmp_path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "UnsupportedModel" in captured.err
    assert "sliding_attention" in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["verify", "--lengths", "9"], "--lengths"),
        (["verify", "--lengths", "missing.csv"], "missing.csv"),
        (["verify", "--model-config", "/no/such/config"], "no such file"),
        (["bench", "step", "--cases", "2048x64"], "2048:64"),
    ],
)
def test_bad_arguments_exit_2_in_one_line(arguments, words, capsys):
    assert cli.main(arguments) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("arguments", [["verify", "--world-size", "3"], ["bench"], ["nonsense"]])
def test_argparse_refuses(arguments):
    with pytest.raises(SystemExit) as refusal:
        cli.main(arguments)
    assert refusal.value.code == 2


def test_train_hands_everything_on(monkeypatch):
    import treecp_rl.train as train

    received = []
    monkeypatch.setattr(train, "main", received.append)
    assert cli.main(["train", "trainer.backend=treecp", "--cfg", "job"]) == 0
    assert received == [["trainer.backend=treecp", "--cfg", "job"]]


@pytest.mark.parametrize(
    "text", ["not json", "[]", "{}", '{"model_type": "qwen9"}', '{"model_type": "qwen2", "hidden_size": -1}']
)
def test_a_config_that_describes_no_model_is_one_line(tmp_path, capsys, text):
    (tmp_path / "config.json").write_text(text)
    assert cli.main(["verify", "--model-config", str(tmp_path / "config.json")]) == 2
    message = capsys.readouterr().err
    assert "describes no causal LM" in message
    assert message.count("\n") == 1


@pytest.mark.parametrize("line", ["a,0,4", "a,-3,4", "a,3,-4", "a,x,4"])
def test_csv_lengths_are_checked_like_inline_ones(tmp_path, capsys, line):
    path = tmp_path / "lengths.csv"
    path.write_text(f"group,prompt,response\n{line}\n")
    assert cli.main(["verify", "--lengths", str(path)]) == 2
    assert "lengths.csv:2" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("verify", "--num-layers", "0"),
        ("verify", "--vocab-size", "-5"),
        ("bench", "step", "--group-size", "0"),
        ("bench", "step", "--repeats", "0"),
        ("bench", "step", "--threads", "0"),
    ],
)
def test_counts_below_one_are_usage_errors(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(list(arguments))
    assert stop.value.code == 2
    assert arguments[-2] in capsys.readouterr().err
