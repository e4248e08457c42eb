"""No inert knob: every field of the quickstart's resolved config changes something that a run does, or is refused.

Nothing is trained here. A field is changed in a small copy of the config, and what it is said to act on is compared:
the lowered programs of the updates and of decoding, or the log of a whole run whose arithmetic is left out.
"""

import dataclasses
import hashlib
import json
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import cli
from experiments import run as run_command
from rl_posttrain import config as config_lib
from rl_posttrain import evaluation, loop, services
from rl_posttrain.algorithms import update
from rl_posttrain.batch import Batch, TrainState
from rl_posttrain.model import transformer
from rl_posttrain.observability import alerts, lines
from rl_posttrain.rollout import generate
from rl_posttrain.rollout.sampling import Sampling
from rl_posttrain.sandbox import pool as pool_lib
from rl_posttrain.sharding import mesh as mesh_lib
from rl_posttrain.storage.checkpoints import CheckpointConfig, Checkpoints
from rl_posttrain.tasks.registry import FunctionCheck
from rl_posttrain.types import Execution, Verdict

QUICKSTART = cli.load_config_file(str(Path(__file__).resolve().parents[1] / "configs" / "quickstart.py"))
FIELDS = config_lib.flatten(config_lib.to_dict(services.parse(QUICKSTART)))
# Everything else as the fields' defaults have it, so that a later quickstart does not move the ground under the knobs.
SMALL = {
    "tokenizer": QUICKSTART["tokenizer"],
    "tasks": {"strings/reverse": {"weight": 1.0}, "strings/sort": {"weight": 1.0}},
    "model": dict(embed_dim=32, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=8, mlp_dim=32),
    "mesh": dict(data=-1),
    "rollout": dict(prompts_per_step=4, group_size=4, max_tokens=8),
    "sft": dict(steps=3, batch_size=4, examples=12, row_length=64),
    "grpo": dict(steps=3, row_length=128),
    "evaluation": dict(every=4, items=3, rows=8),
    "checkpoint": dict(every=3, keep=9),
}
ROWS, LENGTH = 8, 64  # of the batch that the updates are lowered for


@dataclass(frozen=True)
class Knob:
    """Another value of a field, and what it must change: names of observations, or "refused"."""

    value: Any
    seen_in: str | tuple[str, ...]
    given: dict[str, Any] = field(default_factory=dict)  # changes of the config on both sides of the comparison
    also: dict[str, Any] = field(default_factory=dict)  # changes that the other value asks for


MODEL = ("score", "decode")  # the trainer and the sampler must agree on the mathematics
SAMPLED = {"evaluation.temperature": 1.0}
SHARDED = {"mesh.data": 1, "mesh.fsdp": -1}

ADAPTED = {"lora.rank": 2}
MIXED = {"model.num_experts": 4, "model.experts_per_token": 2}
WINDOWED = {"model.window": 4}
PAIRS = Path(__file__).parent / "golden" / "preference"
PREFERRED = {
    "preference.steps": 2,
    "preference.batch_size": 4,
    "preference.row_length": 64,
    "preference.path": str(PAIRS / "train.jsonl"),
    "preference.heldout": str(PAIRS / "heldout.jsonl"),
}
OPTIMIZERS = ("update.optimizer", "sft.update.optimizer", "preference.update.optimizer")  # must agree
PENALISED = {"algorithm.kl_coefficient": 0.1}
CORRECTED = {
    "algorithm.proximal": "step_start",
    "algorithm.correction": "masked",
    "algorithm.correction_low": 0.5,
    "algorithm.correction_high": 5.0,
}

SHORT = {"rollout.max_tokens": 4}  # as long as the longest of the completions that the run below makes
OVERLONG = {**SHORT, "rewards.overlong_buffer": 2, "rewards.overlong_penalty": 0.5}
WITHOUT_SIGNAL = {"rollout.max_tokens": 2, "rewards.truncated": "filtered"}  # every completion is cut off

KNOBS = {
    "seed": Knob(1, "run"),
    "init_from": Knob("another run", "run"),
    "pretrained": Knob("models/nowhere", "refused"),
    "lora.rank": Knob(2, "placement"),
    "lora.alpha": Knob(8.0, "score", given=ADAPTED),
    "lora.rslora": Knob(True, "score", given=ADAPTED),
    "lora.dropout": Knob(0.5, "whole_update", given=ADAPTED),
    "lora.targets": Knob(["query"], "placement", given=ADAPTED),
    "lora.base": Knob("int8", "score", given=ADAPTED),
    "lora.adapter": Knob("models/nowhere", "refused", given=ADAPTED),
    "tokenizer.kind": Knob("byte", ("run", *MODEL), also={"tokenizer.alphabet": None}),
    "tokenizer.alphabet": Knob("".join(reversed(FIELDS["tokenizer.alphabet"])), "run"),
    "tokenizer.directory": Knob("models/other", "refused"),
    "tokenizer.chat": Knob(True, "refused"),
    "tokenizer.system": Knob("Be brief.", "refused"),
    "tokenizer.variables": Knob({"enable_thinking": False}, "refused"),
    "model.vocab_size": Knob(FIELDS["model.vocab_size"] + 5, MODEL),
    "model.embed_dim": Knob(48, MODEL),
    "model.num_layers": Knob(2, MODEL),
    "model.num_heads": Knob(8, MODEL),
    "model.num_kv_heads": Knob(2, MODEL),
    "model.head_dim": Knob(16, MODEL),
    "model.mlp_dim": Knob(48, MODEL),
    "model.rope_theta": Knob(5000.0, MODEL),
    "model.rope_scaling": Knob({"kind": "linear", "factor": 2.0}, MODEL),
    "model.norm_epsilon": Knob(1e-5, MODEL),
    "model.output_bias": Knob(True, MODEL),
    "model.activation": Knob("gelu_tanh", MODEL),
    "model.norm_plus_one": Knob(True, MODEL),
    "model.post_norms": Knob(True, MODEL),
    "model.scale_embeddings": Knob(True, MODEL),
    "model.query_scale": Knob(0.5, MODEL),
    "model.attention_softcap": Knob(5.0, MODEL),
    "model.logit_softcap": Knob(5.0, MODEL),
    "model.window": Knob(4, MODEL),
    "model.sliding": Knob([False], MODEL, given=WINDOWED),
    "model.local_rope_theta": Knob(50.0, MODEL, given=WINDOWED),
    "model.num_experts": Knob(4, MODEL, also={"model.experts_per_token": 2}),
    "model.experts_per_token": Knob(1, MODEL, given=MIXED),
    "model.normalise_experts": Knob(False, MODEL, given=MIXED),
    "model.experts": Knob("grouped", MODEL, given=MIXED),
    "model.qk_norm": Knob(True, MODEL),
    "model.qkv_bias": Knob(True, MODEL),
    "model.tie_embeddings": Knob(False, MODEL),
    "model.compute_dtype": Knob("bfloat16", MODEL),
    "model.remat": Knob("full", "whole_update"),
    "model.attention": Knob("blockwise", MODEL),
    "model.attention_block": Knob(16, MODEL, given={"model.attention": "blockwise"}),
    "model.logprob_chunk": Knob(16, "score"),
    "model.vocab_multiple": Knob(7, MODEL),
    "mesh.data": Knob(2, "placement", given=SHARDED),
    "mesh.fsdp": Knob(2, "placement"),
    "mesh.tensor": Knob(2, "placement", given={"model.vocab_multiple": 2}),
    "mesh.stage": Knob(2, "refused"),
    "mesh.context": Knob(2, "refused"),
    "mesh.expert": Knob(2, "refused"),
    "sandbox.slots": Knob(1, "sandbox"),
    "sandbox.runs_per_slot": Knob(1, "sandbox"),
    "sandbox.pending": Knob(3, "queue"),
    "sandbox.interpreter": Knob("/bin/sh", "container"),
    "sandbox.packages": Knob("/usr/lib", "container"),
    "sandbox.preload": Knob(["numpy"], "container"),
    "sandbox.limits.cpu_seconds": Knob(1.0, "sandbox"),
    "sandbox.limits.wall_seconds": Knob(5.0, "sandbox"),
    "sandbox.limits.memory_bytes": Knob(200 << 20, "sandbox"),
    "sandbox.limits.processes": Knob(4, "sandbox"),
    "sandbox.limits.file_bytes": Knob(1 << 16, "sandbox"),
    "sandbox.limits.output_bytes": Knob(1 << 12, "sandbox"),
    "sandbox.limits.open_files": Knob(32, "sandbox"),
    "rollout.prompts_per_step": Knob(5, "run"),
    "rollout.group_size": Knob(3, "run"),
    "rollout.temperature": Knob(0.7, ("run", "decode")),
    "rollout.max_tokens": Knob(6, ("run", "decode")),
    "rollout.prompt_bucket": Knob(7, "run"),
    "rollout.refill": Knob(1, "run", given=WITHOUT_SIGNAL),
    "rewards.correct": Knob(2.0, "run", given={"algorithm.advantage": "mean"}),
    "rewards.wrong": Knob(0.25, "run"),
    "rewards.partial": Knob(0.5, "run"),
    "rewards.malformed": Knob(-1.0, "run"),
    "rewards.truncated": Knob("filtered", "run", given=SHORT),
    "rewards.overlong_buffer": Knob(3, "run", given=OVERLONG),
    "rewards.overlong_penalty": Knob(0.25, "run", given=OVERLONG),
    "rewards.length_penalty": Knob(0.5, "run"),
    "algorithm.advantage": Knob("mean", "run"),
    "algorithm.aggregation": Knob("sequence_mean", "run"),
    "algorithm.constant_length": Knob(
        32, "run", given={"algorithm.aggregation": "constant_length", "algorithm.constant_length": 16}
    ),
    "algorithm.negative_weight": Knob(0.5, "run"),
    "algorithm.advantage_scale": Knob("step", "run", given={"algorithm.advantage": "mean"}),
    "algorithm.domain_weights": Knob({"strings/sort": 3.0}, "run"),
    "algorithm.ratio": Knob("sequence", "grpo_update"),
    "algorithm.proximal": Knob("step_start", ("run", "grpo_update")),
    "algorithm.surrogate": Knob("cispo", "grpo_update"),
    "algorithm.clip_low": Knob(0.1, "grpo_update"),
    "algorithm.clip_high": Knob(0.1, "grpo_update"),
    "algorithm.dual_clip": Knob(3.0, "grpo_update"),
    "algorithm.gate_positive": Knob(2.0, "grpo_update", given={"algorithm.surrogate": "soft_gate"}),
    "algorithm.gate_negative": Knob(2.0, "grpo_update", given={"algorithm.surrogate": "soft_gate"}),
    "algorithm.correction": Knob("importance", "grpo_update", given={"algorithm.proximal": "step_start"}),
    "algorithm.correction_low": Knob(0.7, "grpo_update", given=CORRECTED),
    "algorithm.correction_high": Knob(2.0, "grpo_update", given=CORRECTED),
    "algorithm.kl": Knob("k2", "grpo_update", given=PENALISED),
    "algorithm.kl_in": Knob("reward", ("run", "grpo_update"), given=PENALISED),
    "algorithm.kl_coefficient": Knob(0.1, ("run", "grpo_update")),
    "algorithm.kl_target": Knob(0.01, "run", given={**PENALISED, "algorithm.kl_in": "reward"}),
    "algorithm.entropy_coefficient": Knob(0.1, ("run", "grpo_update")),
    "algorithm.entropy_target": Knob(2.0, ("run", "grpo_update")),
    "algorithm.entropy_step": Knob(0.1, "run", given={"algorithm.entropy_target": 2.0}),
    "algorithm.reference_every": Knob(1, "run", given=PENALISED),
    "algorithm.reference_mixture": Knob(0.5, "run", given={**PENALISED, "algorithm.reference_every": 1}),
    **{
        f"{section}.{name}": knob
        for section, program in (
            ("update", "grpo_update"),
            ("sft.update", "sft_update"),
            ("preference.update", "preference_update"),
        )
        for name, knob in {
            "optimizer": Knob("muon", program, also=dict.fromkeys(OPTIMIZERS, "muon")),
            "learning_rate": Knob(3e-4, program),
            "rates": Knob({"layers/query": 0.5}, program),
            "warmup_steps": Knob(2, program),
            "schedule": Knob("cosine", program),
            "final_learning_rate_fraction": Knob(0.5, program, given={f"{section}.schedule": "cosine"}),
            "weight_decay": Knob(0.1, program),
            "b1": Knob(0.8, program),
            "b2": Knob(0.9, program),
            "epsilon": Knob(1e-6, program),
            "gradient_clip": Knob(0.5, program),
            "micro_batches": Knob(2, program),
        }.items()
    },
    "sft.steps": Knob(2, "run"),
    "sft.batch_size": Knob(5, "run"),
    "sft.examples": Knob(3, "run"),
    "sft.row_length": Knob(96, "run"),
    "preference.steps": Knob(1, "run", given=PREFERRED),
    "preference.batch_size": Knob(3, "run", given=PREFERRED),
    "preference.row_length": Knob(96, "run", given=PREFERRED),
    "preference.path": Knob(str(PAIRS / "other.jsonl"), "run", given=PREFERRED),
    "preference.heldout": Knob(str(PAIRS / "heldout_other.jsonl"), "run", given=PREFERRED),
    "preference.kind": Knob("ipo", "preference_update"),
    "preference.beta": Knob(0.2, "preference_update"),
    "preference.label_smoothing": Knob(0.1, "preference_update"),
    "grpo.steps": Knob(2, "run"),
    "grpo.epochs": Knob(2, "run"),
    "grpo.mini_batches": Knob(2, "run"),
    "grpo.row_length": Knob(96, "run"),
    "grpo.mismatch_alarm": Knob(1e-4, "run"),
    "evaluation.every": Knob(2, "run"),
    "evaluation.items": Knob(4, "run"),
    "evaluation.samples": Knob(2, "run", given=SAMPLED),
    "evaluation.temperature": Knob(1.0, ("run", "evaluation_decode")),
    "evaluation.top_k": Knob(3, ("run", "evaluation_decode"), given=SAMPLED),
    "evaluation.top_p": Knob(0.5, ("run", "evaluation_decode"), given=SAMPLED),
    "evaluation.rows": Knob(4, "run"),
    "checkpoint.every": Knob(2, "run"),
    "checkpoint.keep": Knob(1, "run"),
    "checkpoint.keep_best": Knob(False, "run", given={"checkpoint.every": 1, "checkpoint.keep": 1}),
    "checkpoint.directory": Knob("elsewhere", "run"),
}


# ---- observations: functions of a config and an empty folder ----


def mesh_of(config: services.Config) -> jax.sharding.Mesh:
    return mesh_lib.make_mesh(config.mesh)


LOGPROBS = {"behaviour_logprobs", "reference_logprobs", "proximal_logprobs"}
FLOATS = {"loss_weight", "advantages", "temperature", "entropy_coefficient", *LOGPROBS}


def batch() -> Batch:
    kinds = {f.name: jnp.float32 if f.name in FLOATS else jnp.int32 for f in dataclasses.fields(Batch)}
    shapes: dict[str, Any] = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), kind) for name, kind in kinds.items()}
    return Batch(**shapes)


def lowered(name: str, with_model: bool = False):
    """The program of one of the services' jitted functions. Lowering drops what no result depends on.

    Without the model, whose place a sum takes, an update is lowered in a tenth of the time.
    """

    def sums(params, rows, *, model_cfg):
        del model_cfg
        total = sum(leaf.sum() for leaf in jax.tree.leaves(params))
        return jnp.full(rows.labels.shape, total), jnp.full(rows.labels.shape, total)

    def observe(config: services.Config, folder: Path) -> str:
        del folder
        mesh = mesh_of(config)
        with jax.set_mesh(mesh), pytest.MonkeyPatch.context() as patch:
            if not with_model:
                patch.setattr(update, "score", sums)
            made = services.compiled(config, mesh)
            first = made["abstract"].params if name == "score" else made["abstract"]
            return made[name].func.lower(*made[name].args, first, batch()).as_text()

    return observe


def decoding(of_evaluation: bool):
    """The program that samples completions."""

    def observe(config: services.Config, folder: Path) -> str:
        del folder
        shape = jax.ShapeDtypeStruct
        with jax.set_mesh(mesh_of(config)):
            return generate.decode_groups.lower(
                jax.eval_shape(lambda key: transformer.init(key, config.model), jax.random.key(0)),
                shape((4, 33), jnp.int32),
                shape((4,), jnp.int32),
                shape((4,), jnp.uint32),
                shape((config.rollout.group_size,), jnp.uint32),
                jax.random.key(0),
                model_cfg=config.model,
                sampling=config.evaluation.sampling if of_evaluation else Sampling(config.rollout.temperature),
                width=config.rollout.group_size,
                max_tokens=config.rollout.max_tokens,
                end_ids=(1,),
            ).as_text()

    return observe


def placement(config: services.Config, folder: Path) -> str:
    """Where parameters, moments and rows lie."""
    del folder
    mesh = mesh_of(config)
    mesh_lib.check(config.model, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, services.compiled(config, mesh)["abstract"])
    return f"{dict(mesh.shape)} {mesh_lib.batch_sharding(mesh)} {shardings}"


def sandbox(config: services.Config, folder: Path) -> Any:
    """What four programs meet: containers started, the most runs at one time, and each run's limits."""
    del folder
    seen = {"started": 0, "inside": 0, "most": 0, "limits": []}
    changed = threading.Condition()

    class RecordingSlot:
        def __init__(self, *_):
            self.runs = 0
            with changed:
                seen["started"] += 1

        def run(self, job, driver):
            self.runs += 1
            with changed:
                seen["limits"].append(job.limits)
                seen["inside"] += 1
                seen["most"] = max(seen["most"], seen["inside"])
                changed.notify_all()
                changed.wait_for(lambda: seen["most"] == config.sandbox.slots, 5)
                seen["inside"] -= 1
            return Execution("ok"), None

        def wait_ready(self):
            return None

        def close(self):
            return None

    with pytest.MonkeyPatch.context() as patch, services.tools(config) as tools:
        patch.setattr(pool_lib, "Slot", RecordingSlot)
        assert tools.judge is not None
        tools.judge(tools.pool, [(f"f = {i}", FunctionCheck("f", (((1,), 1),))) for i in range(4)])
    return seen


def container(config: services.Config, folder: Path) -> Any:
    """What candidates' containers are started with."""
    launcher = SimpleNamespace(shared=folder, toolchains={}, harness="harness", bubblewrap="bwrap")
    with pool_lib.Pool(config.sandbox) as pool:
        image = pool._image(launcher, "candidate")  # type: ignore[arg-type]
        return [part.replace(str(folder), "shared") for part in image.argv], image.paths, image.preload


def queue(config: services.Config, folder: Path) -> int:
    """How many submissions wait at most, of ten more than there are slots."""
    del folder
    go = threading.Event()
    with pool_lib.Pool(config.sandbox) as pool:
        submit = lambda: [pool.submit(go.wait) for _ in range(config.sandbox.slots + 10)]
        thread = threading.Thread(target=submit)
        thread.start()
        while thread.is_alive() and len(pool._queue) < config.sandbox.pending:
            time.sleep(0.01)
        waiting = len(pool._queue)
        go.set()
        thread.join()
    return min(waiting, config.sandbox.pending)


def a_run(config: services.Config, folder: Path) -> Any:
    """A whole run without arithmetic: every call of decoding and of an update, then all that is left on the disk."""
    log: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(services, "compiled", lambda config, mesh: without_arithmetic(log, mesh))
        patch.setattr(generate, "decode_groups", lambda *a, **k: log.append(described(a[1:], k)) or decoded(*a, **k))
        patch.setattr(loop, "verify", lambda domains, rollouts: [VERDICTS[r.sample % 4] for r in rollouts])
        patch.setattr(evaluation, "verify", lambda domains, rollouts: [judged(r) for r in rollouts])
        patch.setattr("rl_posttrain.observability.report.render", lambda workdir: workdir)
        patch.chdir(folder)
        assert run_command.run(config, "workdir") == 0
    workdir = folder / "workdir"
    entries = lines.read(workdir / "metrics.jsonl")
    timed = lambda name: name.startswith("time") or name.endswith(("_s", "_per_second"))
    log += [{name: value for name, value in entry.items() if not timed(name)} for entry in entries]
    log += [alerts.read(workdir), json.loads((workdir / "evaluation.json").read_text())]
    return (
        log
        + [str(path.relative_to(folder)) for path in sorted(folder.rglob("checkpoints/*"))]
        + [str(path.relative_to(folder)) for path in sorted(folder.glob("elsewhere/*"))]
    )


VERDICTS = (
    Verdict("pass", (True, True)),
    Verdict("wrong", (True, False)),
    Verdict("malformed"),
    Verdict("error", (False, False)),
)


def judged(rollout) -> Verdict:
    """The policy is best at its first version, so that the best checkpoint is not the last."""
    return VERDICTS[0] if rollout.policy_version < 2 else VERDICTS[1]


def decoded(params, prompts, lengths, hashes, samples, key, *, width, max_tokens, **_):
    """Completions of 2 to 4 tokens; one that fills all of `max_tokens` counts as cut off."""
    del params, lengths, key
    shape = (len(prompts), width, max_tokens)
    tokens = 3 + (hashes[:, None, None] + samples[None, :, None] + np.arange(max_tokens)) % 8
    counts = np.broadcast_to(2 + samples % 3, shape[:2])
    return tokens.astype(np.int32), np.full(shape, -1.0, np.float32), counts, counts < max_tokens


def without_arithmetic(log: list[Any], mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """In place of `services.compiled`: updates that only write down what they are given."""
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    fresh = lambda params: TrainState(step=jnp.int32(0), params=params, opt_state=())
    abstract = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=everywhere)

    def noting(name):
        def apply(state, rows):
            log.append((name, float(state.params["w"]), described(jax.tree.leaves(rows), {})))
            moved = {"w": state.params["w"] + 1}
            measured = {"loss/total": 0.0, "policy/log_ratio_max": 5e-4, "policy/entropy": 1.0}
            return state.replace(step=state.step + 1, params=moved), measured

        return apply

    return {
        "init_params": lambda: {"w": jax.device_put(jnp.float32(0), everywhere)},
        "policy": lambda trained: trained,
        "abstract": jax.tree.map(abstract, fresh({"w": jnp.float32(0)})),
        "init_train_state": fresh,
        "sft_update": noting("sft"),
        "preference_update": noting("preference"),
        "grpo_update": noting("grpo"),
        "score": lambda params, rows: (rows.reference_logprobs - 1 - params["w"], rows.advantages),
        "place": lambda rows: rows,
        "rows_multiple": lambda section: 1,
    }


def described(arrays: Any, named: dict[str, Any]) -> Any:
    """Arguments by value. The model's config is left out: a difference there is no effect yet."""
    plain = lambda a: np.asarray(jax.random.key_data(a) if jnp.issubdtype(a.dtype, jax.dtypes.prng_key) else a)
    digest = [(plain(a).shape, hashlib.sha256(plain(a).tobytes()).hexdigest()) for a in arrays]
    return digest, {name: value for name, value in named.items() if name != "model_cfg"}


OBSERVATIONS = {
    "sft_update": lowered("sft_update"),
    "preference_update": lowered("preference_update"),
    "grpo_update": lowered("grpo_update"),
    "whole_update": lowered("grpo_update", with_model=True),
    "score": lowered("score", with_model=True),
    "decode": decoding(of_evaluation=False),
    "evaluation_decode": decoding(of_evaluation=True),
    "placement": placement,
    "sandbox": sandbox,
    "container": container,
    "queue": queue,
    "run": a_run,
}


@pytest.fixture(scope="module")
def observe(tmp_path_factory):
    """(name, changes) -> what is observed of the small config with these changes; each is observed once."""
    known: dict[str, Any] = {}

    def observed(name: str, changes: dict[str, Any]) -> Any:
        key = json.dumps([name, changes], sort_keys=True)
        if key not in known:
            config = services.parse(config_lib.apply_overrides(SMALL, changes))
            known[key] = OBSERVATIONS[name](config, tmp_path_factory.mktemp(name))
        return known[key]

    return observed


@pytest.fixture(scope="module")
def another_run(tmp_path_factory) -> str:
    """A checkpoint of the run without arithmetic, with other parameters."""
    folder = tmp_path_factory.mktemp("another") / "checkpoints"
    checkpoints = Checkpoints(folder, CheckpointConfig())
    checkpoints.save(1, {"w": jnp.float32(7)}, {"step": jnp.int32(1)}, {})
    checkpoints.close()
    return str(folder)


# ---- the tests ----


def is_task_field(name: str) -> bool:
    return name.startswith("tasks.")


def test_every_field_has_a_knob_and_every_knob_a_field():
    assert {name for name in FIELDS if not is_task_field(name)} == KNOBS.keys()


@pytest.mark.parametrize("name", KNOBS)
def test_a_field_changes_something_or_is_refused(name, observe, another_run):
    knob = KNOBS[name]
    value = another_run if name == "init_from" else knob.value
    changed = {**knob.given, name: value, **knob.also}
    if knob.seen_in == "refused":
        with pytest.raises(config_lib.ConfigError, match=str(value)):
            observe("placement", changed)
        return
    for place in (knob.seen_in,) if isinstance(knob.seen_in, str) else knob.seen_in:
        before, after = observe(place, knob.given), observe(place, changed)
        assert before != after, f"{name}={value!r} changes nothing in {place}"


@pytest.mark.parametrize("place", OBSERVATIONS)
def test_the_same_config_shows_the_same(place, tmp_path_factory):
    """Else every field would seem to have an effect."""
    config = services.parse(SMALL)
    first, second = (OBSERVATIONS[place](config, tmp_path_factory.mktemp(place)) for _ in range(2))
    assert first == second


def test_the_weight_of_a_task_changes_what_is_drawn(observe):
    assert observe("run", {}) != observe("run", {"tasks.strings/sort.weight": 3.0})
