"""The peers benchmark, as far as it goes without peers: prompts, arithmetic, and our contender on a tiny model."""

import json
import subprocess
import sys
from dataclasses import replace

import jax
import pytest
import tokenizers

from benchmarks import peers, peers_plan, peers_processes
from benchmarks.peers_host import Work
from benchmarks.peers_plan import Contender, Measurement, Result
from benchmarks.peers_processes import ROOT
from rl_posttrain.model import convert
from rl_posttrain.model.transformer import ModelConfig, init

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the benchmark reads /proc")
SPECIAL = ("<|pad|>", "<|start|>", "<|end|>")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny random model in Hugging Face's layout; each word of the prompts is a token."""
    directory = tmp_path_factory.mktemp("model")
    words = [*SPECIAL, *dict.fromkeys(peers_plan.WORDS)]
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=SPECIAL[0])
    )
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    cfg = ModelConfig(
        vocab_size=len(words), embed_dim=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, mlp_dim=32
    )
    convert.save_model(directory, init(jax.random.key(0), cfg), cfg, length=64)
    tokenizer.save(str(directory / "tokenizer.json"))
    special = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL))
    (directory / "tokenizer_config.json").write_text(json.dumps(special))
    return str(directory)


def test_prompts_are_different_and_exactly_as_long_as_asked(model):
    prompts, texts = peers_plan.make_prompts(model, 5, 12)
    again = tokenizers.Tokenizer.from_file(f"{model}/tokenizer.json")
    assert [again.encode(text, add_special_tokens=False).ids for text in texts] == prompts
    assert len(set(texts)) == 5 and {len(prompt) for prompt in prompts} == {12}
    assert all(prompt[0] == SPECIAL.index("<|start|>") for prompt in prompts)
    assert peers_plan.make_prompts(model, 5, 12) == (prompts, texts)


def measured(peak=1.0, **seconds):
    """Three samples, one of them disturbed: the median is as given."""
    sample = {"peak_bytes": peak, "other_cores": 0.0, **seconds}
    slow = {key: 10 * value for key, value in sample.items()} | {"peak_bytes": peak / 2}
    return Result([sample, slow, sample])


def test_figures_of_a_step_by_hand():
    step = peers_plan.MEASUREMENTS[0]
    results = {
        "ours": measured(4e9, wall_s=10.0, generate_s=4.0, update_s=6.0),
        "trl": measured(10e9, wall_s=30.0, generate_s=10.0, update_s=20.0),
        "trl_bf16": measured(8e9, wall_s=24.0, generate_s=12.0, update_s=12.0),
        "tunix": Result(error="stopped by the memory guard"),
    }
    figures = peers_plan.ratios(step, results, 1)
    wanted = {"generation_vs_trl": 2.5, "update_vs_trl": 20 / 6, "step_memory_vs_trl": 0.4, "update_vs_trl_bf16": 2.0}
    assert {name: figures[name] for name in wanted} == pytest.approx(wanted)
    assert not any(name.endswith("tunix") for name in figures)
    assert peers_plan.ratios(step, results | {"ours": Result(error="failed")}, 1) == {}


def test_a_long_prompt_is_compared_with_the_best_of_those_that_finish():
    seconds = lambda wall: dict(wall_s=wall, generate_s=1.0, update_s=wall - 1.0)
    results = {
        "ours": measured(3e9, **seconds(20.0)),
        "trl_one_pass": Result(error="stopped by the memory guard"),
        "trl_checkpointing": measured(9e9, **seconds(100.0)),
        "trl_one_at_a_time": measured(6e9, **seconds(200.0)),
    }
    figures = peers_plan.ratios(peers_plan.MEASUREMENTS[1], results, 1)
    assert figures == pytest.approx({"long_prompt_speedup": 5.0, "long_prompt_memory_ratio": 0.5})
    alone = {name: results[name] for name in ("ours", "trl_one_pass")}
    assert peers_plan.ratios(peers_plan.MEASUREMENTS[1], alone, 1) == {}


def test_figures_of_decoding_and_importing_by_hand():
    decode, load = peers_plan.MEASUREMENTS[2:]
    results = {
        "ours": measured(first_s=1.0, all_s=7.3),  # 32 x 63 tokens in 6.3 s
        "transformers": measured(first_s=2.0, all_s=14.6),
        "limit": measured(first_s=0.0, all_s=3.15),
    }
    assert peers_plan.parts(decode, results["ours"])["tokens_per_s"] == pytest.approx(320)
    figures = peers_plan.ratios(decode, results, 1)
    assert figures == pytest.approx({"decode_vs_transformers": 2.0, "decode_fraction_of_limit": 0.5})
    figures = peers_plan.ratios(load, {"ours": measured(9e8, wall_s=2.0)}, 600_000_000)
    assert figures == pytest.approx({"import_s": 2.0, "import_memory_ratio": 1.5})


def test_every_figure_names_contenders_that_are_measured():
    table = {measurement.name: measurement for measurement in peers_plan.MEASUREMENTS}
    for measurement, needed in peers_plan.NEEDS.values():
        names = [contender.name for together in table[measurement].turns for contender in together]
        assert set(needed) <= set(names) and len(set(names)) == len(names)
    assert set(peers.SETTINGS) == set(table)


def answer_of(program, limit):
    """What a contender's process says whose work is `program`, with so many bytes to use."""
    work = Work("step", "", [[1]], ["a"], 1, 1, limit, {})
    code = f"import time\nfrom benchmarks import peers_host\n{program}\npeers_host.serve(run, ())"
    done = subprocess.run(
        [sys.executable, "-c", code, work.encoded()], capture_output=True, text=True, cwd=ROOT, input="measure\n"
    )
    return [json.loads(line) for line in done.stdout.splitlines()], done.returncode


def test_a_contender_answers_with_times_or_its_reason():
    waits = "def run(work, turns):\n    while turns.begin():\n        print('noise')\n        turns.end(part_s=2.0)"
    (ready, sample), code = answer_of(waits, 1e12)
    assert ready == {"ready": {}} and code == 0
    assert sample["part_s"] == 2.0 and sample["wall_s"] > 0 and sample["peak_bytes"] > 2**20
    (error,), code = answer_of("def run(work, turns):\n    raise ValueError('two\\nlines')", 1e12)
    assert (error, code) == ({"error": "ValueError: two lines"}, 1)
    (error,), code = answer_of("def run(work, turns):\n    time.sleep(60)", 1e6)
    assert "memory guard" in error["error"] and code == 1


def test_a_silent_contender_is_ended_and_an_environment_that_does_not_install_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(peers_processes, "ANSWER_SECONDS", 0.5)
    (tmp_path / "python").write_text("#!/bin/sh\necho 'last words' >&2\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    work = Work("step", "", [[1]], ["a"], 1, 1, 1e12, {})
    with pytest.raises(peers_processes.Unavailable, match="no answer within 0 s: last words"):
        peers_processes.Host(str(tmp_path / "python"), "peers_trl", work, tmp_path, "silent")

    monkeypatch.setitem(peers_processes.PINS, "nothing", (str(tmp_path / "no-package"),))
    monkeypatch.setattr(peers_processes, "VENV", ["-c", "import sys; sys.exit('no space')"])
    with pytest.raises(peers_processes.Unavailable, match="does not install: no space"):
        peers_processes.environment(tmp_path, "nothing")
    assert peers_processes.environment(tmp_path, None) == sys.executable
    complete = tmp_path / "nothing"
    complete.mkdir()
    (complete / peers_processes.STAMP).write_text(str(tmp_path / "no-package"))
    assert peers_processes.environment(tmp_path, "nothing") == str(complete / "bin" / "python")


def test_our_contenders_publish_their_figures(model, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
    ours, limit = replace(peers_plan.OURS, rounds=1), replace(peers_plan.LIMIT, rounds=1)
    absent = Contender("transformers", "no_such_module")
    size = dict(prompts=2, prompt_length=8, group_size=2, max_tokens=4)
    measurements = (
        Measurement("step", "step", ((ours,),), **size),
        Measurement("decode", "decode", ((absent, ours, limit),), **size),
        Measurement("import", "import", ((replace(ours, fresh=True, warm_ups=0),),), **size),
    )
    names = ("update_vs_trl", "decode_vs_transformers", "decode_fraction_of_limit", "import_s", "import_memory_ratio")
    returned = peers.measure(names, model, tmp_path, {"model.remat": "full"}, measurements)
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (result["benchmark"], result["figures"]) == ("peers", returned)
    assert "no_such_module" in result["machine"]["failed"]["decode_transformers"]
    assert result["machine"]["settings"]["step"] == {**peers.SETTINGS["step"], "model.remat": "full"}
    assert set(returned) & set(names) == {"decode_fraction_of_limit", "import_s", "import_memory_ratio"}
    parts = returned["step_ours_generate_s"] + returned["step_ours_update_s"]
    assert returned["step_ours_wall_s"] == pytest.approx(parts, rel=0.2)
    assert returned["step_ours_peak_bytes"] > 2**26
    assert returned["import_memory_ratio"] * peers.weight_bytes(model) == pytest.approx(
        returned["import_ours_peak_bytes"]
    )
