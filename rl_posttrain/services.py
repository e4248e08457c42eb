"""Builds every service of a run from its config: the only place that knows them all."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from rl_posttrain import config as config_lib
from rl_posttrain.algorithms import grpo, preference, sft
from rl_posttrain.algorithms.grpo import AlgorithmConfig
from rl_posttrain.algorithms.update import UpdateConfig, init_state, make_optimizer, score, state_shardings, update
from rl_posttrain.batch import Batch, Params, TrainState
from rl_posttrain.config import ConfigError
from rl_posttrain.data import trees
from rl_posttrain.data.jsonl import PreferencePair, read_split
from rl_posttrain.data.tokenizer import Tokenizer, TokenizerConfig, make_tokenizer
from rl_posttrain.evaluation import EvaluationConfig
from rl_posttrain.model import convert, peft, quantise, transformer
from rl_posttrain.model import lora as lora_lib
from rl_posttrain.model.lora import LoraConfig
from rl_posttrain.model.transformer import ModelConfig
from rl_posttrain.rewards import verifiers
from rl_posttrain.rewards.combine import RewardConfig
from rl_posttrain.rollout.generate import RolloutConfig
from rl_posttrain.sandbox import selftest
from rl_posttrain.sandbox.pool import Pool, PoolConfig
from rl_posttrain.sharding import mesh as mesh_lib
from rl_posttrain.sharding.mesh import MeshConfig
from rl_posttrain.stages import GrpoConfig, PreferenceConfig, SftConfig
from rl_posttrain.storage import filesystem
from rl_posttrain.storage.checkpoints import CheckpointConfig, Checkpoints
from rl_posttrain.storage.trajectories import TrajectoryWriter
from rl_posttrain.tasks import registry
from rl_posttrain.tasks.registry import Domain, Tools

DROPOUT = 2  # folded into the run's seed; 0 is the model's, 1 the adapters'


@dataclass(frozen=True)
class TaskConfig:
    """One domain of the mixture (an entry of config section `tasks`, keyed by the domain's name)."""

    weight: float = 1.0  # relative share of the training prompts
    options: dict[str, Any] = field(default_factory=dict)  # what the family understands

    def __post_init__(self):
        if not self.weight >= 0:
            raise ValueError(f"weight={self.weight} must be at least 0 (0: evaluated, never trained on)")


@dataclass(frozen=True)
class Config:
    """A whole run. Each field is a section of the config file."""

    model: ModelConfig
    tasks: dict[str, TaskConfig]
    seed: int = 0
    # A model directory in Hugging Face's form: the run starts from its weights, and `model` from its config.json.
    pretrained: str | None = None
    lora: LoraConfig = field(default_factory=LoraConfig)
    init_from: str | None = None  # a run's workdir, whose parameters this one starts from
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    mesh: MeshConfig = field(default_factory=MeshConfig)
    sandbox: PoolConfig = field(default_factory=PoolConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    rewards: RewardConfig = field(default_factory=RewardConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    sft: SftConfig = field(default_factory=SftConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def __post_init__(self):
        if not self.tasks or not any(task.weight > 0 for task in self.tasks.values()):
            raise ValueError("tasks: at least one domain must have a weight above 0")
        if self.rollout.prompts_per_step < self.grpo.mini_batches:
            raise ValueError(
                f"grpo.mini_batches={self.grpo.mini_batches} exceeds rollout.prompts_per_step="
                f"{self.rollout.prompts_per_step}: a mini-batch holds whole groups"
            )
        if self.grpo.steps and self.grpo.row_length < self.rollout.max_tokens + 2:
            raise ValueError(
                f"grpo.row_length={self.grpo.row_length} cannot hold a prompt and a completion of rollout.max_tokens="
                f"{self.rollout.max_tokens}: use longer rows or fewer tokens"
            )
        buffer, limit, refill = self.rewards.overlong_buffer, self.rollout.max_tokens, self.rollout.refill
        if buffer > limit:
            raise ValueError(
                f"rewards.overlong_buffer={buffer} exceeds rollout.max_tokens={limit}: it is its last part"
            )
        if refill and self.algorithm.advantage == "step_mean":
            raise ValueError(f"rollout.refill={refill}: for advantage='step_mean' equal rewards have a signal: use 0")
        for name, section, steps in (
            ("sft.update", self.sft.update, self.sft.steps),
            ("preference.update", self.preference.update, self.preference.steps),
            ("update", self.update, self.updates),
        ):
            if 0 < steps < section.warmup_steps:
                raise ValueError(
                    f"{name}.warmup_steps={section.warmup_steps} exceeds the stage's {steps} optimizer steps"
                )
        self.algorithm.check_domains(self.tasks)
        for name, stage in (("sft", self.sft), ("preference", self.preference)):
            if stage.steps and stage.update.optimizer != self.update.optimizer:
                raise ValueError(
                    f"{name}.update.optimizer={stage.update.optimizer!r} and update.optimizer={self.update.optimizer!r}"
                    ": a run's checkpoints hold moments of one kind; use one, or a run apart and init_from"
                )
        if self.seed < 0:
            raise ValueError(f"seed={self.seed} must be at least 0")
        if self.init_from is not None and self.lora.adapter is not None:
            raise ValueError(
                f"init_from={self.init_from!r} and lora.adapter={self.lora.adapter!r} both name what the run starts "
                "from: use one"
            )
        block = self.model.attention_block
        if self.model.attention == "dense" and block != ModelConfig.attention_block:
            raise ValueError(f"model.attention_block={block} has no effect with attention='dense': use 'blockwise'")

    @property
    def total_steps(self) -> int:
        """Loop steps of all stages."""
        return self.grpo_start + self.grpo.steps

    @property
    def grpo_start(self) -> int:
        """Loop steps before GRPO."""
        return self.sft.steps + self.preference.steps

    @property
    def keeps_reference(self) -> bool:
        """Whether some stage measures the policy against an older one, which is then part of the state."""
        return self.preference.steps > 0 or self.algorithm.kl_coefficient > 0

    @property
    def updates(self) -> int:
        """Optimizer steps of the GRPO stage."""
        return self.grpo.steps * self.grpo.epochs * self.grpo.mini_batches


def parse(values: Mapping[str, Any]) -> Config:
    """Reads a config mapping into a `Config`. The model's vocabulary size defaults to the tokenizer's.

    Raises:
      ConfigError: naming the key, the value and the remedy.
    """
    tree: dict[str, Any] = config_lib.plain(values)
    if tree.get("pretrained") is not None:
        _fill_from_directory(tree)
    section = config_lib.build(TokenizerConfig, tree.get("tokenizer", {}), "config.tokenizer")
    with _refusing("config.tokenizer"):
        tokenizer = make_tokenizer(section)
    if isinstance(tree.get("model"), dict):
        tree["model"] = {"vocab_size": tokenizer.vocab_size, **tree["model"]}
    config = config_lib.build(Config, tree)
    if config.model.vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"config.model.vocab_size={config.model.vocab_size} is below the tokenizer's {tokenizer.vocab_size}: "
            "leave it out"
        )
    return config


def _fill_from_directory(tree: dict[str, Any]) -> None:
    """Completes `tree["model"]` by the directory's config.json, and takes its tokenizer unless another is named."""
    directory, model = tree["pretrained"], tree.get("model", {})
    if "vocab_size" not in model:  # a saved run's config is complete
        with _refusing("config.pretrained"):
            tree["model"] = {**config_lib.to_dict(convert.model_config(directory)), **model}
    tokenizer = tree.get("tokenizer", {})
    if "kind" not in tokenizer:
        tree["tokenizer"] = {"kind": "huggingface", "directory": directory, **tokenizer}


@contextlib.contextmanager
def _refusing(place: str) -> Iterator[None]:
    """Makes a ConfigError of a ValueError, which here can only come from the config."""
    try:
        yield
    except ValueError as error:
        raise ConfigError(f"{place}: {error}") from error


@dataclass(frozen=True)
class Services:
    """What the loop works with. Functions are jitted; nothing here changes during a run but by its own I/O."""

    config: Config
    workdir: str
    tokenizer: Tokenizer
    domains: dict[str, Domain]
    pairs: tuple[list[PreferencePair], list[PreferencePair]]  # to train on, and held out; empty without that stage
    init_params: Callable[[], Params]  # what is trained: seeded or pretrained, sharded
    policy: Callable[[Params], Params]  # the model's parameters, of what is trained; adapters merged
    abstract: TrainState  # shapes, dtypes and shardings of the train state, for restoring
    init_train_state: Callable[[Params], TrainState]  # fresh optimizer
    sft_update: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    preference_update: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    grpo_update: Callable[[TrainState, Batch], tuple[TrainState, dict[str, jax.Array]]]
    score: Callable[[Params, Batch], tuple[jax.Array, jax.Array]]  # of what is trained
    place: Callable[[Batch], Batch]  # host rows onto the mesh
    rows_multiple: Callable[[UpdateConfig], int]  # packed rows come in multiples of this
    checkpoints: Checkpoints
    trajectories: TrajectoryWriter
    sandbox: Pool


@contextlib.contextmanager
def tools(config: Config) -> Iterator[Tools]:
    """The sandboxes and helper processes that domains verify with; all ended at the end.

    Raises:
      SandboxUnavailable: the sandbox does not work or does not protect here; the message has the remedy.
    """
    with Pool(config.sandbox) as pool, contextlib.closing(verifiers.tools(pool)) as opened:
        selftest.require(pool)  # no verdict without it: a protection that is missing here is named and refused
        pool.statistics()  # of the self-test, which is not the run's
        yield opened


def load_domains(config: Config, opened: Tools) -> dict[str, Domain]:
    """The config's domains by name, in its order."""
    return {name: registry.load(name, task.options, opened) for name, task in config.tasks.items()}


def load_pairs(config: Config, tokenizer: Tokenizer) -> tuple[list[PreferencePair], list[PreferencePair]]:
    """The pairs of the preference stage, (to train on, held out); each can be trained. None without that stage."""
    section = config.preference
    if not section.steps:
        return [], []
    with _refusing("config.preference"):
        split = read_split(section.path or "", section.heldout or "")
        trees.from_pairs([*split[0], *split[1]], tokenizer, section.row_length)
    return split


@contextlib.contextmanager
def build(config: Config, workdir: str) -> Iterator[Services]:
    """Opens the services of a run in `workdir`; sandboxes, workers and writers are closed at the end.

    Raises:
      ConfigError: the mesh does not fit the devices or the model, or a domain refuses its options.
    """
    tokenizer = make_tokenizer(config.tokenizer)
    with _refusing("config.mesh"):
        mesh = mesh_lib.make_mesh(config.mesh)
        mesh_lib.check(config.model, mesh)
    directory = config.checkpoint.directory or filesystem.join(workdir, "checkpoints")
    with contextlib.ExitStack() as stack:
        opened = stack.enter_context(tools(config))
        stack.enter_context(jax.set_mesh(mesh))
        checkpoints = Checkpoints(directory, config.checkpoint)
        stack.callback(checkpoints.close)
        yield Services(
            config=config,
            workdir=workdir,
            tokenizer=tokenizer,
            domains=load_domains(config, opened),
            pairs=load_pairs(config, tokenizer),
            checkpoints=checkpoints,
            trajectories=TrajectoryWriter(filesystem.join(workdir, "trajectories")),
            sandbox=opened.pool,
            **compiled(config, mesh),
        )


def whole_model(config: Config, mesh: jax.sharding.Mesh) -> Params:
    """The whole model's first parameters, sharded: pretrained ones, else seeded ones.

    Raises:
      ConfigError: the pretrained ones are not whole.
    """
    if config.pretrained is not None:
        with _refusing("config.pretrained"):
            return convert.load_params(config.pretrained, config.model, mesh)
    draw = lambda: transformer.init(jax.random.fold_in(jax.random.key(config.seed), 0), config.model)
    return jax.jit(draw, out_shardings=mesh_lib.shardings(transformer.declare(config.model), mesh))()


def frozen_base(config: Config, mesh: jax.sharding.Mesh) -> Params:
    """The whole model's first parameters, stored as `config.lora.base` says, array by array."""
    narrow = partial(quantise.quantise, cfg=config.model, base=config.lora.base)
    if config.pretrained is not None:
        with _refusing("config.pretrained"):
            return quantise.beside(convert.load_params(config.pretrained, config.model, mesh, narrow))
    return quantise.quantise_tree(whole_model(config, mesh), config.model, config.lora.base)


@dataclass(frozen=True)
class Trained:
    """What the optimizer moves: the whole model, or adapters beside a frozen base.

    Attributes:
      declared: its table of parameters.
      base: the frozen model; None where the whole model is trained.
      init: its first values, sharded.
      assemble: (base, trained, dropout key or None) -> parameters for `transformer`.
      policy: (trained) -> the parameters that rollouts use.
    """

    declared: Any
    base: Params | None
    init: Callable[[], Params]
    assemble: Callable[..., Params]
    policy: Callable[[Params], Params]


def trained_part(config: Config, mesh: jax.sharding.Mesh) -> Trained:
    """Decides by `config.lora` what is trained, and loads the frozen base where there is one."""
    cfg, lora = config.model, config.lora
    if not lora.rank:
        whole = transformer.declare(cfg)
        return Trained(whole, None, lambda: whole_model(config, mesh), lambda _, trained, key: trained, lambda p: p)
    base = frozen_base(config, mesh)
    declared = lora_lib.declare_adapters(cfg, lora)
    draw = lambda: lora_lib.init_adapters(jax.random.fold_in(jax.random.key(config.seed), 1), cfg, lora)
    fresh = jax.jit(draw, out_shardings=mesh_lib.shardings(declared, mesh))
    directory = lora.adapter
    merge = jax.jit(
        partial(lora_lib.merge, lora=lora), out_shardings=mesh_lib.shardings(transformer.declare(cfg), mesh)
    )
    # Beside a narrow base adapters stay apart: merged and rounded anew, a weight would differ from the trainer's.
    policy = merge if lora.base == "float32" else partial(lora_lib.attach, lora=lora)
    return Trained(
        declared,
        base,
        fresh if directory is None else lambda: peft.load_adapters(directory, cfg, lora, mesh),
        lambda base, trained, key: lora_lib.attach(base, trained, lora, key),
        lambda trained: policy(base, trained),
    )


def compiled(config: Config, mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """The jitted functions of a run, with their shardings; state is donated."""
    cfg, part = config.model, trained_part(config, mesh)
    if config.lora.adapter is not None:
        with _refusing("config.lora.adapter"):
            peft.check(config.lora.adapter, cfg, config.lora)
    param_shardings = mesh_lib.shardings(part.declared, mesh)
    first = lambda: transformer.init_tree(jax.random.key(0), cfg, part.declared)
    rows = mesh_lib.batch_sharding(mesh)
    replicated = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    sections = {
        "sft": (config.sft.update, config.sft.steps),
        "preference": (config.preference.update, config.preference.steps),
        "grpo": (config.update, config.updates),
    }
    optimizers, states = {}, {}
    for name, (section, steps) in sections.items():
        optimizers[name] = make_optimizer(section, steps or section.warmup_steps + 1)
        with _refusing("config.update" if name == "grpo" else f"config.{name}.update"):
            states[name] = state_shardings(first, optimizers[name], param_shardings, replicated)

    def jit_update(name: str, loss, drops: bool = True):
        dropout = jax.random.fold_in(jax.random.key(config.seed), DROPOUT)
        key = lambda count: jax.random.fold_in(dropout, count) if drops else None

        def step(base: Params | None, state: TrainState, batch: Batch):
            return update(
                state,
                batch,
                model_cfg=cfg,
                loss=loss,
                optimizer=optimizers[name],
                micro_batches=sections[name][0].micro_batches,
                declared=part.declared,
                assemble=lambda trained, count: part.assemble(base, trained, key(count)),
            )

        jitted = jax.jit(step, donate_argnums=1, out_shardings=(states[name], replicated))
        return partial(jitted, part.base)

    def score_trained(base: Params | None, trained: Params, batch: Batch):
        return score(part.assemble(base, trained, None), batch, model_cfg=cfg)

    pairs = config.preference
    preferring = partial(preference.loss, kind=pairs.kind, beta=pairs.beta, label_smoothing=pairs.label_smoothing)
    abstract = jax.eval_shape(lambda: init_state(first(), optimizers["grpo"]))
    placed = lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    return dict(
        init_params=part.init,
        policy=part.policy,
        abstract=jax.tree.map(placed, abstract, states["grpo"]),
        init_train_state=jax.jit(partial(init_state, optimizer=optimizers["grpo"]), out_shardings=states["grpo"]),
        sft_update=jit_update("sft", sft.loss),
        preference_update=jit_update("preference", preferring, drops=False),  # see PreferenceConfig
        grpo_update=jit_update("grpo", partial(grpo.loss, cfg=config.algorithm)),
        score=partial(jax.jit(score_trained, out_shardings=(rows, rows)), part.base),
        place=lambda batch: jax.tree.map(lambda leaf: jax.device_put(leaf, rows), batch),
        rows_multiple=lambda section: shards * section.micro_batches,
    )
