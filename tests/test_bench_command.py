"""`cuflash bench`: what its command line takes and refuses. No GPU is needed."""

import math

import pytest
from bench_reports import comparison, report_of

from cuflash import cli, machine, peers
from cuflash.bench import PRESETS
from cuflash.peers import Case


@pytest.fixture
def with_gpu(monkeypatch):
    """A machine that seems to have a GPU; what `cuflash bench` would run there is handed back."""
    asked = {}

    def run_bench(console, device, cases, them, **options):
        asked.update(cases=cases, peers=[peer.name for peer in them], **options)
        return report_of(*(comparison(case, cuflash=1.0) for case in cases))

    monkeypatch.setattr(machine, "why_no_gpu", lambda: None)
    monkeypatch.setattr(cli, "current_gpu", lambda rounds, repeats: (rounds, repeats))
    monkeypatch.setattr(cli, "run_bench", run_bench)
    return asked


def bench_command(options):
    return cli.main(["bench", *options.split()])


def test_machine_without_gpu_is_told_so(monkeypatch, capsys):
    monkeypatch.setattr(machine, "why_no_gpu", lambda: "the driver shows no GPU")
    assert bench_command("") == 2
    assert capsys.readouterr().err == "cuflash bench: error: it needs a GPU: the driver shows no GPU\n"


def test_bench_takes_the_papers_cases_and_every_peer_by_default(with_gpu):
    assert bench_command("") == 0
    assert with_gpu["cases"] == PRESETS["papers"].cases()
    assert with_gpu["peers"] == [peer.name for peer in peers.PEERS]
    assert with_gpu["budget"] == math.inf


def test_options_replace_what_the_preset_says(with_gpu):
    assert bench_command("--d 96 --n 512,2048 --causal both --dtype float16 --peers fa3,cudnn") == 0
    assert [(case.d, case.n, case.causal, case.dtype) for case in with_gpu["cases"]] == [
        (96, 512, False, "float16"),
        (96, 512, True, "float16"),
        (96, 2048, False, "float16"),
        (96, 2048, True, "float16"),
    ]
    assert with_gpu["peers"] == ["fa3", "cudnn"]


def test_features_and_sizes_can_be_given(with_gpu):
    options = "--preset gqa --window 255 none --softcap 30 --alibi --layout bhnd --tokens 8192 --heads 16 --kv-heads 2"
    assert bench_command(f"{options} --backward") == 0
    (case,) = with_gpu["cases"]
    assert case.backward
    assert case.deterministic
    assert case.window == (255, None)
    assert (case.softcap, case.alibi, case.layout) == (30.0, True, "bhnd")
    assert (case.batch, case.heads, case.kv_heads) == (2, 16, 2)


@pytest.mark.parametrize("asked", [True, False])
def test_gradients_need_not_be_deterministic(asked, with_gpu):
    assert bench_command(f"--preset gqa --backward --deterministic {'yes' if asked else 'no'}") == 0
    (case,) = with_gpu["cases"]
    assert case.deterministic == asked
    assert str(case).endswith("backward" if asked else "backward not deterministic")


def test_case_of_two_presets_is_run_once(with_gpu):
    assert bench_command("--preset papers,gqa,papers") == 0
    assert len(with_gpu["cases"]) == 19


def test_case_that_cuflash_fails_is_a_failure(with_gpu, monkeypatch):
    monkeypatch.setattr(
        cli, "run_bench", lambda *_, **__: report_of(comparison(Case(64, 1024), {"cuflash": "wrong"}, a=1.0))
    )
    assert bench_command("") == 1


UNUSABLE = {
    "unknown peer": ("--peers fa5", "must be of cudnn, fa2"),
    "unknown preset": ("--preset everything", "must be of papers"),
    "unknown dtype": ("--dtype float8", "must be of float16"),
    "no head dim": ("--d 0", "must be a positive integer"),
    "no list": ("--n 1024,,2048", "must be a positive integer"),
    "odd mask": ("--causal maybe", "invalid choice"),
    "no rounds": ("--rounds 0", "must be a positive integer"),
    "heads": ("--heads 8 --kv-heads 3", "must be a multiple of those of keys, got 8 and 3"),
    "no gradients": ("--deterministic no", "--deterministic no is about gradients, and needs --backward"),
    "no order": ("--backward --deterministic perhaps", "invalid choice"),
    "no folder": ("--json nowhere/o.json", "there is no folder nowhere"),
    "one file": ("--json o.png --plot o.png", "same file"),
}


@pytest.mark.usefixtures("with_gpu")
@pytest.mark.parametrize(("options", "message"), UNUSABLE.values(), ids=UNUSABLE)
def test_unusable_option_is_named(options, message, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: True)
    try:
        code = bench_command(options)
    except SystemExit as exit:
        code = exit.code
    assert code == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("with_gpu")
def test_plot_without_matplotlib_is_refused_before_anything_runs(monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli.importlib.util, "find_spec", lambda name: None)
    assert bench_command("--plot o.png") == 2
    assert "pip install 'cuflash[plot]'" in capsys.readouterr().err
