"""The loop: ask, sample, run, judge, update; one step after another, from (seed, step) and the state alone.

    tasks -> rollout -> sandbox -> rewards -> algorithms -> observability

`train` first warms up on worked examples (`sft_step`) and preference pairs (`preference_step`), as far as the config
asks for it, then reinforces (`grpo_step`). Whatever a later step needs from
an earlier one is in `RunState`, so a run that was killed and resumed equals the unbroken one.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from rl_posttrain.algorithms.advantages import asymmetric, group_advantages
from rl_posttrain.algorithms.grpo import adapted_entropy_coefficient, uses_entropy, uses_reference_in_loss
from rl_posttrain.algorithms.kl import KL_VALUES, adapted_coefficient
from rl_posttrain.algorithms.losses import sample_weights
from rl_posttrain.batch import Batch, Params, TrainState
from rl_posttrain.data import trees
from rl_posttrain.data.packing import pack, unpack
from rl_posttrain.observability.rollouts import rollout_metrics
from rl_posttrain.rewards.combine import group_rewards
from rl_posttrain.rewards.verifiers import verify
from rl_posttrain.rollout.generate import generate
from rl_posttrain.rollout.sampling import Sampling
from rl_posttrain.services import Services
from rl_posttrain.tasks import mixture
from rl_posttrain.types import Rollout, Task, Verdict

Metrics = dict[str, float]
SAMPLING = 1  # folded into the run's key, then the step


@dataclass
class RunState:
    """Everything that a run needs to continue."""

    step: int  # loop steps done, over all stages
    train: TrainState
    reference: Params | None  # the policy at the start of the stage; None where nothing is measured against it
    counters: dict[str, int]  # next unused training index of each domain
    examples: Any  # the supervised examples' iterator (grain), None without a warm-up
    pairs: Any  # that of the preference pairs, None without that stage
    evaluations: list[dict[str, Any]]  # the rows of evaluation.json so far
    kl_coefficient: float  # of the KL penalty of the reward, which a target adapts
    entropy_coefficient: float  # of the entropy bonus, which a target adapts


@dataclass(frozen=True)
class Sampled:
    """Groups of W completions and what they earned."""

    groups: list[list[Rollout]]
    verdicts: list[list[Verdict]]
    rewards: np.ndarray  # float32 [Q, W]; NaN for samples that left their group

    @property
    def informative(self) -> np.ndarray:
        """bool [Q]: whether the rewards within a group differ, and so have something to say."""
        known = np.isfinite(self.rewards)
        most, least = (np.where(known, self.rewards, -sign * np.inf) for sign in (1, -1))
        return (known.sum(1) >= 2) & (most.max(1) > least.min(1))

    def with_more(self, other: Sampled) -> Sampled:
        """These groups, then the other's."""
        return Sampled(
            self.groups + other.groups,
            self.verdicts + other.verdicts,
            np.concatenate([self.rewards, other.rewards]),
        )


@dataclass(frozen=True)
class Collected:
    """One step's completions, judged and weighed: Q groups of W samples, of which P are trained on.

    The first P groups are the first round; what refilling sampled follows. Without refilling Q is P.
    """

    groups: list[list[Rollout]]
    verdicts: list[list[Verdict]]
    rewards: np.ndarray  # float32 [Q, W]; NaN for samples that left their group
    kl: np.ndarray | None  # float32 [P, W], nats per completion, where the reward is penalised by it; of those kept
    advantages: np.ndarray  # float32 [Q, W]; 0 for groups that are not kept
    seconds: dict[str, float]
    kept: np.ndarray  # int [P]: which groups are trained on
    metrics: Metrics  # of refilling


def collect(services: Services, state: RunState) -> Collected:
    """Asks, samples, runs and judges: one step's groups, with their advantages.

    Where `rollout.refill` allows it, a group without signal (its rewards are equal) gives its place to a group of a
    fresh prompt of the same domain, if that one has signal: DAPO's dynamic sampling, https://arxiv.org/abs/2503.14476,
    bounded. A group for which none is found in time stays, and counts in the denominators.
    """
    config, clock = services.config, Clock()
    sampled = sample(services, state, draw_tasks(services, state), 0, clock)
    kept, rounds = np.arange(len(sampled.groups)), 0
    while rounds < config.rollout.refill and not (told := sampled.informative[kept]).all():
        rounds += 1
        places = np.flatnonzero(~told)
        tasks = fresh_tasks(services, state, [sampled.groups[kept[place]][0].task.domain for place in places])
        fresh = sample(services, state, tasks, rounds, clock)
        first = len(sampled.groups)
        sampled = sampled.with_more(fresh)
        kept[places] = np.where(fresh.informative, first + np.arange(len(places)), kept[places])
    groups, rewards = [sampled.groups[i] for i in kept], sampled.rewards[kept]
    kl = None
    if config.algorithm.kl_in == "reward":
        kl = completion_kl(services, state, groups)
        clock.lap("reference")
    advantages = np.zeros_like(sampled.rewards)
    compared = group_advantages(
        rewards if kl is None else rewards - state.kl_coefficient * kl,
        np.isfinite(rewards),
        config.algorithm.advantage,
        config.algorithm.advantage_scale,
        [group[0].task.domain for group in groups],
    )
    advantages[kept] = asymmetric(compared, config.algorithm.negative_weight)
    metrics = {
        "rollout/refills": float(rounds),
        "rollout/uninformative_fraction": float(np.mean(~sampled.informative)),
        "rollout/unfilled_fraction": float(np.mean(~sampled.informative[kept])),
    }
    return Collected(sampled.groups, sampled.verdicts, sampled.rewards, kl, advantages, clock.seconds, kept, metrics)


def sample(services: Services, state: RunState, tasks: list[Task], rounds: int, clock: Clock) -> Sampled:
    """Completions of these tasks, judged. A draw depends on (seed, step, round, task, sample) and the policy alone."""
    config = services.config
    width = config.rollout.group_size
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(config.seed), SAMPLING), state.step)
    groups = generate(
        services.policy(state.train.params),
        tasks,
        tokenizer=services.tokenizer,
        model_cfg=config.model,
        sampling=Sampling(config.rollout.temperature),
        width=width,
        max_tokens=config.rollout.max_tokens,
        prompt_bucket=config.rollout.prompt_bucket,
        rows=config.rollout.prompts_per_step,
        key=jax.random.fold_in(key, rounds) if rounds else key,
        policy_version=int(state.train.step),
    )
    clock.lap("rollout")
    judged = verify(services.domains, [rollout for group in groups for rollout in group])
    clock.lap("verify")
    verdicts = [judged[i : i + width] for i in range(0, len(judged), width)]
    worth = [
        group_rewards(group, group_verdicts, config.rewards, config.rollout.max_tokens)
        for group, group_verdicts in zip(groups, verdicts, strict=True)
    ]
    rewards = np.array([[np.nan if r is None else r for r in group] for group in worth], np.float32)
    return Sampled(groups, verdicts, rewards)


def completion_kl(services: Services, state: RunState, groups: list[list[Rollout]]) -> np.ndarray:
    """KL from the reference, estimated on each completion with the logprobs that it was sampled with: [P, W]."""
    config, shape = services.config, (len(groups), len(groups[0]))
    batch, placements = pack(
        trees.from_groups(groups, np.ones(shape), np.zeros(shape)),
        config.grpo.row_length,
        services.rows_multiple(config.update),
    )
    reference = np.asarray(services.score(state.reference, services.place(batch))[0])
    estimates = KL_VALUES[config.algorithm.kl](jnp.asarray(batch.behaviour_logprobs), jnp.asarray(reference))
    return np.array([[part.sum() for part in group] for group in unpack(estimates, placements)], np.float32)


def grpo_step(services: Services, state: RunState) -> tuple[Metrics, Collected]:
    """One step of reinforcement: collect, then a few optimizer steps on what was collected."""
    collected, clock = collect(services, state), Clock()
    batches = [complete(services, state, services.place(batch)) for batch in grpo_batches(services, collected)]
    measured = []
    for _ in range(services.config.grpo.epochs):
        for batch in batches:
            state.train, metrics = services.grpo_update(state.train, batch)
            measured.append({name: float(value) for name, value in jax.device_get(metrics).items()})
    clock.lap("update")
    mean = {name: float(np.mean([metrics[name] for metrics in measured])) for name in measured[0]}
    mean["policy/mismatch"] = measured[0]["policy/log_ratio_max"]  # the first update meets the policy that sampled
    first = len(collected.kept)  # groups of the first round: what came after was chosen by how earlier ones fared
    metrics = rollout_metrics(collected.groups[:first], collected.verdicts[:first], collected.rewards[:first])
    metrics |= collected.metrics
    metrics |= {f"sandbox/{name}": value for name, value in services.sandbox.statistics().items()}
    tokens = sum(len(rollout.completion_tokens) for group in collected.groups for rollout in group)
    mean |= adapt_coefficients(services, state, collected, mean)
    move_reference(services, state)
    return {**mean, **metrics, **timing({**collected.seconds, **clock.seconds}, tokens)}, collected


def complete(services: Services, state: RunState, batch: Batch) -> Batch:
    """Rows on the mesh, with what the objective asks of other policies and of the state, before the first update."""
    algorithm, fields = services.config.algorithm, {}
    if uses_reference_in_loss(algorithm):
        fields["reference_logprobs"] = services.score(state.reference, batch)[0]
    if algorithm.proximal == "step_start":
        fields["proximal_logprobs"] = services.score(state.train.params, batch)[0]
    if uses_entropy(algorithm):
        fields["entropy_coefficient"] = jnp.full_like(batch.loss_weight, state.entropy_coefficient)
    return replace(batch, **fields)


def adapt_coefficients(services: Services, state: RunState, collected: Collected, measured: Metrics) -> Metrics:
    """Moves the coefficients that have a target, for the next step. Returns what they were in this one, and the KL."""
    algorithm, metrics = services.config.algorithm, {}
    if collected.kl is not None:
        tokens = sum(len(rollout.completion_tokens) for i in collected.kept for rollout in collected.groups[i])
        kl = float(collected.kl.sum()) / tokens
        metrics |= {"policy/kl": kl, "policy/kl_coefficient": state.kl_coefficient}
        if algorithm.kl_target is not None:
            state.kl_coefficient = adapted_coefficient(state.kl_coefficient, kl, algorithm.kl_target)
    if uses_entropy(algorithm):
        metrics["policy/entropy_coefficient"] = state.entropy_coefficient
        trained = np.isfinite(collected.rewards[collected.kept]).any()  # else no entropy was measured
        if algorithm.entropy_target is not None and trained:
            state.entropy_coefficient = adapted_entropy_coefficient(
                state.entropy_coefficient, measured["policy/entropy"], algorithm.entropy_target, algorithm.entropy_step
            )
    return metrics


def move_reference(services: Services, state: RunState) -> None:
    """Every so many steps of this stage, moves the reference towards the policy, or makes it the policy."""
    algorithm, done = services.config.algorithm, state.step + 1 - services.config.grpo_start
    if algorithm.reference_every is not None and done % algorithm.reference_every == 0:
        share = algorithm.reference_mixture
        mix = lambda old, new: old + share * (new - old) if share < 1 else jnp.copy(new)
        state.reference = jax.tree.map(mix, state.reference, state.train.params)


def grpo_batches(services: Services, collected: Collected) -> list[Batch]:
    """The batches of one pass: whole groups, split before packing, each with denominators of its own.

    A group without signal (every advantage 0) has no gradient, so it is left out of the rows unless a KL term or an
    entropy bonus wants it; it counts in the denominators all the same.
    """
    config, algorithm = services.config, services.config.algorithm
    kept, advantages = [collected.groups[i] for i in collected.kept], collected.advantages[collected.kept]
    lengths = np.array([[len(rollout.completion_tokens) for rollout in group] for group in kept])
    valid = np.isfinite(collected.rewards[collected.kept])
    wanted = (advantages != 0).any(1) | uses_reference_in_loss(algorithm) | uses_entropy(algorithm)
    emphasis = np.array([[algorithm.domain_weights.get(r.task.domain, 1.0) for r in g] for g in kept])
    batches = []
    for part in np.array_split(np.arange(len(lengths)), config.grpo.mini_batches):
        weights = sample_weights(
            lengths[part].ravel(),
            valid[part].ravel(),
            algorithm.aggregation,
            algorithm.constant_length,
            emphasis[part].ravel(),
        ).reshape(len(part), -1)
        rows = np.flatnonzero(wanted[part]) if wanted[part].any() else np.arange(1)  # a step needs some row
        groups = trees.from_groups([kept[part[i]] for i in rows], weights[rows], advantages[part[rows]])
        batches.append(pack(groups, config.grpo.row_length, services.rows_multiple(config.update))[0])
    return batches


def sft_step(services: Services, state: RunState) -> Metrics:
    """One optimizer step on worked examples."""
    section, clock = services.config.sft, Clock()
    tasks = make_tasks(services, next(state.examples))
    examples = trees.from_examples(tasks, services.tokenizer)
    batch, _ = pack(examples, section.row_length, services.rows_multiple(section.update))
    clock.lap("data")
    state.train, measured = services.sft_update(state.train, services.place(batch))
    metrics = {name: float(value) for name, value in jax.device_get(measured).items()}
    clock.lap("update")
    return {
        **metrics,
        **timing(clock.seconds, sum(len(sample.tokens) for tree in examples for sample in tree.samples)),
    }


def preference_step(services: Services, state: RunState) -> Metrics:
    """One optimizer step on preference pairs."""
    section, clock = services.config.preference, Clock()
    pairs = trees.from_pairs([services.pairs[0][i] for i in next(state.pairs)], services.tokenizer, section.row_length)
    batch = services.place(pack(pairs, section.row_length, services.rows_multiple(section.update))[0])
    clock.lap("data")
    batch = replace(batch, reference_logprobs=services.score(state.reference, batch)[0])
    state.train, measured = services.preference_update(state.train, batch)
    metrics = {name: float(value) for name, value in jax.device_get(measured).items()}
    clock.lap("update")
    return {**metrics, **timing(clock.seconds, sum(len(s.tokens) for tree in pairs for s in tree.samples))}


def heldout_margins(services: Services, state: RunState) -> np.ndarray:
    """How far the chosen of each held-out pair is ahead in log ratio to the reference, nats: float64 [pairs]."""
    section, margins = services.config.preference, []
    for start in range(0, len(services.pairs[1]), section.batch_size):
        part = services.pairs[1][start : start + section.batch_size]
        pairs = trees.from_pairs(part, services.tokenizer, section.row_length)
        batch, placements = pack(pairs, section.row_length, services.rows_multiple(section.update))
        placed = services.place(batch)
        policy, reference = (services.score(params, placed)[0] for params in (state.train.params, state.reference))
        ratios = unpack(np.asarray(policy, np.float64) - np.asarray(reference, np.float64), placements)
        margins += [chosen.sum() - rejected.sum() for chosen, rejected in ratios]
    return np.array(margins)


def draw_tasks(services: Services, state: RunState) -> list[Task]:
    """This step's prompts: a function of (seed, step) and the domains' counters, which move on."""
    config = services.config
    weights = {name: task.weight for name, task in config.tasks.items()}
    names = mixture.draw(config.seed, state.step, weights, config.rollout.prompts_per_step)
    return fresh_tasks(services, state, names)


def fresh_tasks(services: Services, state: RunState, domains: list[str]) -> list[Task]:
    """The next prompts of these domains by their counters, which move on."""
    assigned, state.counters = mixture.assign(domains, state.counters)
    return make_tasks(services, assigned)


def make_tasks(services: Services, assigned: list[tuple[str, int]]) -> list[Task]:
    """Training tasks for (domain, index) pairs; each domain is asked once."""
    made: dict[tuple[str, int], Task] = {}
    for name in dict.fromkeys(name for name, _ in assigned):
        indices = [index for other, index in assigned if other == name]
        made |= zip([(name, i) for i in indices], services.domains[name].make(services.config.seed, "train", indices))
    return [made[pair] for pair in assigned]


def timing(seconds: dict[str, float], tokens: int) -> Metrics:
    """`time/<phase>_s`, their sum and completion tokens per second."""
    total = sum(seconds.values())
    phases = {f"time/{name}_s": value for name, value in seconds.items()}
    return {**phases, "time/step_s": total, "tokens/per_s": tokens / total}


class Clock:
    """Wall seconds by phase."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, phase: str) -> None:
        """Adds the time since the last lap to `phase`."""
        now = time.perf_counter()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - self._last
        self._last = now


def begin_stage(services: Services, state: RunState) -> None:
    """After the stage before: a fresh optimizer, and the policy of this moment as the frozen reference."""
    params = state.train.params
    if state.reference is not None:
        state.reference = jax.tree.map(jnp.copy, params)
    state.train = services.init_train_state(params)


def train(
    services: Services, state: RunState, after: Callable[[RunState, str, Metrics, Collected | None], bool]
) -> None:
    """Runs steps until the config's last, or until `after` (which logs, evaluates and saves) returns False."""
    config = services.config
    while state.step < config.total_steps:
        if state.step < config.sft.steps:
            stage, metrics, collected = "sft", sft_step(services, state), None
        else:
            if state.step in (config.sft.steps, config.grpo_start):
                begin_stage(services, state)
            if state.step < config.grpo_start:
                stage, metrics, collected = "preference", preference_step(services, state), None
            else:
                stage, (metrics, collected) = "grpo", grpo_step(services, state)
        state.step += 1
        if not after(state, stage, metrics, collected):
            return
