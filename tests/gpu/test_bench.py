"""`cuflash bench` on a GPU: its own clock, and the peers that are installed."""

import json
import time

import pytest

from cuflash import cli, peers, timing

cupy = pytest.importorskip("cupy")


@pytest.mark.parametrize(
    "options",
    ["--causal both", "--softcap 20 --causal yes", "--alibi --causal yes", "--window 63 0", "--causal both --backward"],
)
def test_bench_measures_cuflash_and_accounts_for_every_peer(options, tmp_path, capsys):
    them = [peer.name for peer in peers.PEERS if peer.name != "flex"]  # it takes seconds to compile
    sizes = "--d 64 --n 512 --tokens 1024 --heads 4 --kv-heads 2 --rounds 2 --repeats 2 --dtype bfloat16"
    file = tmp_path / "o.json"
    assert cli.main(["bench", *sizes.split(), *options.split(), "--peers", ",".join(them), "--json", str(file)]) == 0
    for case in json.loads(file.read_text())["cases"]:
        assert set(case["results"]) | set(case["excluded"]) == {"cuflash", *them}
        assert "cuflash" in case["results"]
        assert all(result["median_ms"] > 0 for result in case["results"].values())
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith(("geometric mean", "D=64 N=512"))  # the latter where no peer serves the case


def test_time_of_a_run_does_not_contain_that_of_the_host():
    x = cupy.zeros(1024, "float32")

    def queued_late():
        time.sleep(1e-3)
        cupy.add(x, 1, out=x)

    queued_late()
    scratch = cupy.empty(timing.FLUSH_BYTES, "uint8")
    assert timing.time_once(queued_late, scratch, "a run") < 0.5
