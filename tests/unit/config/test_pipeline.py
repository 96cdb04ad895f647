# SPDX-License-Identifier: Apache-2.0
"""Pipelines in run files: what is refused, stages named and drawn, and what presets mean."""

from __future__ import annotations

import pytest
from tests.unit.config.conftest import LoadStages, LoadText

from penstock.config import AlgorithmConfig, Hook, RunConfig, StageConfig, dump, identity
from penstock.config.algorithms import builtin_algorithms
from penstock.config.loader import parse
from penstock.errors import ConfigError

ADVANTAGE = "{id: advantage, type: compute, role: advantage, reads: [reward], writes: [advantage]}"
TRAIN = "{id: train, type: train, role: actor, reads: [turns, advantage]}"
SHAPE = "{id: shape, type: compute, role: shaping, fn: 'm:shape', reads: [READS], writes: [shaped]}"
SCORE = (
    "{id: score, type: infer, role: reward, fn: 'm:score', reads: [turns], writes: [score], "
    "place: [gpu]}"
)


def two_policies(example: str, load_text: LoadText) -> LoadStages:
    """As `load_stages`, with the policies a and b."""
    models = "  a: {init: builtin:tiny-qwen3}\n  b: {init: builtin:tiny-qwen3}"
    text = example.replace("  policy: {init: builtin:tiny-qwen3, engine: hf, replicas: 2}", models)

    def load(*stages: str, overrides: tuple[str, ...] = ()) -> RunConfig:
        lines = "".join(f"    - {stage}\n" for stage in stages)
        return load_text(
            text.replace("pipeline: null\n", f"pipeline:\n  stages:\n{lines}"), overrides
        )

    return load


def load_error(load: LoadStages, *stages: str, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load(*stages, overrides=overrides)
    return str(caught.value)


def test_a_pipeline_is_kept_as_it_was_written(load_stages: LoadStages) -> None:
    config = load_stages(ADVANTAGE, TRAIN)
    assert config.pipeline is not None
    assert [stage.id for stage in config.pipeline.stages] == ["advantage", "train"]
    again = parse(dump(config), origin="config.yaml")
    assert again == config and identity(again) == identity(config)


@pytest.mark.parametrize(
    ("stages", "at", "expected_text"),
    [
        (
            (SHAPE.replace("READS", "advantage"), ADVANTAGE.replace("[reward]", "[shaped]"), TRAIN),
            "run.yaml:27: pipeline.stages[0].reads: ",
            "stages form a cycle: advantage ─[advantage]─► shape ─[shaped]─► advantage",
        ),
        (
            (TRAIN,),
            "run.yaml:27: pipeline.stages[0].reads[1]: ",
            "stage train reads advantage, which no stage writes: "
            "? ─[advantage]─► train",
        ),
        (
            (ADVANTAGE, ADVANTAGE.replace("id: advantage", "id: credit"), TRAIN),
            "run.yaml:28: pipeline.stages[1].writes[0]: ",
            "stages advantage and credit both write advantage: "
            "advantage ─[advantage]─► ◄─[advantage]─ credit",
        ),
        (
            (ADVANTAGE, TRAIN.replace("role: actor", "role: actor, after: [advanage]")),
            "run.yaml:28: pipeline.stages[1].after[0]: ",
            'stage train waits for the unknown stage "advanage" (advanage? ─► train); '
            'did you mean "advantage"?',
        ),
        (
            (ADVANTAGE, TRAIN, TRAIN),
            "run.yaml:29: pipeline.stages[2].id: ",
            'duplicate stage "train"; names of stages must be unique',
        ),
        (
            (ADVANTAGE, TRAIN, TRAIN.replace("id: train", "id: again")),
            "run.yaml:29: pipeline.stages[2].role: ",
            "stages train and again both train the actor",
        ),
        (
            (ADVANTAGE,),
            "pipeline.stages: ",
            "no stage trains policy policy; add one with type: train and role: actor",
        ),
        (
            (ADVANTAGE, SHAPE.replace("READS", "reward").replace("fn: 'm:shape', ", ""), TRAIN),
            "run.yaml:28: pipeline.stages[1].role: ",
            "stage shape: there is no built-in for type compute and role shaping; give fn",
        ),
        (
            (ADVANTAGE.replace("writes: [advantage]", "writes: [credit]"), TRAIN),
            "run.yaml:27: pipeline.stages[0].writes: ",
            "the built-in for it writes advantage, not credit",
        ),
        (
            (ADVANTAGE, TRAIN.replace("reads", "options: {lr: 1}, reads")),
            "run.yaml:28: pipeline.stages[1].options.lr: ",
            "lr is not an option of the built-in stage (none); remove it",
        ),
        (
            (SHAPE.replace("READS", "reward").replace("[shaped]", "[reward]"), ADVANTAGE, TRAIN),
            "run.yaml:27: pipeline.stages[0].writes[0]: ",
            "stage shape writes reward, which every batch already has",
        ),
        (
            (SHAPE.replace("READS", "reward").replace("type", "rename: {x: y}, type"), TRAIN),
            "run.yaml:27: pipeline.stages[0].rename: ",
            "x is renamed but not read",
        ),
        (
            (ADVANTAGE, TRAIN.replace("role", "policy: polici, role")),
            "run.yaml:28: pipeline.stages[1].policy: ",
            'unknown policy "polici"; did you mean "policy"?',
        ),
    ],
)  # fmt: skip
def test_what_cannot_work_names_stages_and_draws_the_path(
    load_stages: LoadStages, stages: tuple[str, ...], at: str, expected_text: str
) -> None:
    message = load_error(load_stages, *stages)
    line = next(line for line in message.splitlines() if expected_text in line)
    assert at in line


VALUES = "{id: values, type: infer, role: critic, reads: [turns], writes: [values]}"
GAE = (
    "{id: gae, type: compute, role: critic, reads: [reward, values], writes: [advantage, returns]}"
)
TRAIN_CRITIC = "{id: learn, type: train, role: critic, reads: [turns, values, returns]}"
TEACHER = "{id: teacher, type: infer, role: teacher, reads: [turns], writes: [teacher_logprobs]}"
TRAIN_WITH_TEACHER = TRAIN.replace("advantage]", "advantage, teacher_logprobs]")
OWN_LOSS = TRAIN.replace("role: actor", "role: actor, fn: 'm:loss'")
OPD = ("algorithm={name: opd, teacher: builtin:tiny-qwen3}",)


@pytest.mark.parametrize("train", [TRAIN, OWN_LOSS])
def test_an_actor_reads_the_advantage(load_stages: LoadStages, train: str) -> None:
    """Also one whose loss is the user's: an update without any is left out."""
    message = load_error(load_stages, ADVANTAGE, train.replace(", advantage]", "]"))
    assert "run.yaml:28: pipeline.stages[1].reads: stage train: an actor learns from " in message
    assert "advantage, which it does not read; add it to reads" in message
    assert "add one with type: compute and role: advantage" in message


def test_a_critic_reads_values_and_returns(load_stages: LoadStages) -> None:
    assert load_stages(VALUES, GAE, TRAIN_CRITIC, TRAIN).pipeline is not None
    critic = TRAIN_CRITIC.replace("[turns, values, returns]", "[turns]")
    message = load_error(load_stages, VALUES, GAE, critic, TRAIN)
    for column, kind in (("values", "infer"), ("returns", "compute")):
        assert f"stage learn: a critic learns from {column}, which it does not read" in message
        assert f"add one with type: {kind} and role: critic" in message
    own = critic.replace("role: critic", "role: critic, fn: 'm:loss'")
    assert load_stages(VALUES, GAE, own, TRAIN).pipeline is not None


def test_a_critic_that_nobody_trains_says_nothing(load_stages: LoadStages) -> None:
    message = load_error(load_stages, VALUES, GAE, TRAIN)
    assert "run.yaml:27: pipeline.stages[0].role: stage values uses the critic for val" in message
    assert "stage trains the critic of policy policy; add one with type: train, role: c" in message
    own = VALUES.replace("role: critic", "role: critic, fn: 'm:values'")
    assert load_stages(own, GAE, TRAIN).pipeline is not None


def test_the_critic_of_another_policy_says_nothing_here(example: str, load_text: LoadText) -> None:
    own = TRAIN_CRITIC.replace("type", "policy: a, type")
    message = load_error(two_policies(example, load_text), VALUES, GAE, own, TRAIN)
    assert "uses the critic for values, but no stage trains the critic of policy b" in message
    assert "policy a" not in message
    shared = two_policies(example, load_text)(VALUES, GAE, TRAIN_CRITIC, TRAIN)
    assert shared.pipeline is not None


def test_the_loss_of_the_algorithm_says_what_is_read(load_stages: LoadStages) -> None:
    asked = TEACHER.replace("role", "model: builtin:tiny-qwen3, role")
    message = load_error(load_stages, asked, ADVANTAGE, TRAIN, overrides=OPD)
    assert "stage train: opd learns from teacher_logprobs, which it does not read" in message
    assert load_stages(asked, ADVANTAGE, TRAIN_WITH_TEACHER, overrides=OPD).algorithm.name == "opd"
    near = ("algorithm={name: m2po}",)
    message = load_error(load_stages, ADVANTAGE, TRAIN, overrides=near)
    assert "stage train: beta 0.001 weighs the distance to reference_logprobs, which" in message
    assert "type: infer and role: reference, or set algorithm.beta: 0.0" in message
    assert load_stages(ADVANTAGE, TRAIN, overrides=("algorithm={name: m2po, beta: 0.0}",))

    assert load_stages(ADVANTAGE, OWN_LOSS, overrides=near)
    reference = TEACHER.replace("teacher", "reference")
    train = TRAIN.replace("advantage]", "advantage, reference_logprobs]")
    assert load_stages(reference, ADVANTAGE, train, overrides=near)


@pytest.mark.parametrize("algorithm", ["{name: decoupled}", "{ratio_against: proximal}"])
def test_a_loss_around_the_start_of_the_step_reads_it(
    load_stages: LoadStages, algorithm: str
) -> None:
    message = load_error(load_stages, ADVANTAGE, TRAIN, overrides=(f"algorithm={algorithm}",))
    assert "compares with proximal_logprobs, which it does not read" in message
    look = "{id: look, type: infer, role: actor, reads: [turns], writes: [proximal_logprobs]}"
    train = TRAIN.replace("advantage]", "advantage, proximal_logprobs]")
    assert load_stages(look, ADVANTAGE, train, overrides=(f"algorithm={algorithm}",))


# --- settings without effect ----------------------------------------------------------------------


def test_the_teacher_is_the_stages_model(load_stages: LoadStages) -> None:
    message = load_error(load_stages, TEACHER, ADVANTAGE, TRAIN_WITH_TEACHER, overrides=OPD)
    assert "stage teacher has no model and uses the policy, so algorithm.teacher has no" in message
    assert "write model: builtin:tiny-qwen3 at the stage" in message
    other = TEACHER.replace("role", "model: other, role")
    message = load_error(load_stages, other, ADVANTAGE, TRAIN_WITH_TEACHER, overrides=OPD)
    assert "stage teacher uses other, so algorithm.teacher has no effect" in message
    own = TEACHER.replace("role", "fn: 'm:teach', role")
    assert load_stages(own, ADVANTAGE, TRAIN_WITH_TEACHER, overrides=OPD)


def test_numbers_of_the_algorithm_that_are_options_of_stages(load_stages: LoadStages) -> None:
    ppo = "algorithm={name: ppo, beta: 0.0, gamma: 1.0, lam: 0.5}"
    message = load_error(load_stages, VALUES, GAE, TRAIN_CRITIC, TRAIN, overrides=(ppo,))
    assert "algorithm.lam: the pipeline has a custom stage" in message
    assert "write options: {lam: 0.5} at that stage" in message and "algorithm.gamma" not in message


def test_beside_an_own_loss_no_ratio_is_set(load_stages: LoadStages) -> None:
    own = TRAIN.replace("type: train", "type: train, fn: 'm:loss'")
    chosen = "algorithm={ratio_against: proximal, correction: {}}"
    message = load_error(load_stages, ADVANTAGE, own, overrides=(chosen,))
    assert "ratio_against has no effect" in message
    assert "correction has no effect" in message


@pytest.mark.parametrize("key", ["epsilon", "epsilon_high", "delta", "beta"])
def test_numbers_of_the_algorithm_beside_a_loss_of_ones_own(
    load_stages: LoadStages, key: str
) -> None:
    told = (f"algorithm.{key}={3.0 if key == 'delta' else 0.3}",)
    message = load_error(load_stages, ADVANTAGE, OWN_LOSS, overrides=told)
    assert f"algorithm.{key}: stage train has a custom loss, so {key} has no" in message
    if key != "beta":
        assert load_stages(ADVANTAGE, TRAIN, overrides=told)


def test_what_a_name_stands_for_is_not_refused_beside_own_stages(load_stages: LoadStages) -> None:
    for name in ("ppo", "dapo", "m2po", "gspo", "rloo"):
        config = load_stages(ADVANTAGE, OWN_LOSS, overrides=(f"algorithm={{name: {name}}}",))
        assert parse(dump(config), origin="config.yaml") == config, "where all keys are written"
    own = "models.policy.algorithm={name: m2po, tau: 0.5}"
    message = load_error(load_stages, ADVANTAGE, OWN_LOSS, overrides=(own,))
    assert "tau has no effect here" in message


@pytest.mark.parametrize(
    ("stage", "key", "expected_text"),
    [
        (ADVANTAGE, "model: x", "compute stages run no model"),
        (TRAIN, "model: x", "the actor is the policy itself"),
        (VALUES, "model: x", "the critic is the one being trained"),
        (VALUES, "fn: 'm:f', model: x", "it runs fn, which loads its own model"),
        (ADVANTAGE, "parallel: {dp: 4}", "it runs a function on each rank's rows"),
        (VALUES, "fn: 'm:f', parallel: {tp: 2}", "it runs a function on each rank's rows"),
        (TRAIN, "rename: {advantage: credit}", "models and losses take columns by their own names"),
        (VALUES, "on: admitted", "it works on complete batches"),
    ],
)
def test_settings_of_what_a_stage_does_not_have(
    load_stages: LoadStages, stage: str, key: str, expected_text: str
) -> None:
    stages = [VALUES, GAE, TRAIN_CRITIC, TRAIN]
    if stage == ADVANTAGE:
        stages = [ADVANTAGE, TRAIN]
    stages[stages.index(stage)] = stage.replace("type", f"{key}, type", 1)
    message = load_error(load_stages, *stages)
    assert expected_text in message and "has no effect" in message


def test_models_that_stages_do_have(load_stages: LoadStages) -> None:
    critic = TRAIN_CRITIC.replace("role", "model: x, role")
    assert load_stages(VALUES, GAE, critic, TRAIN)
    placed = SCORE.replace("role", "model: x, parallel: {dp: 2}, on: admitted, role")
    assert load_stages(placed, ADVANTAGE, TRAIN)


def test_what_is_far_from_the_trainer_cannot_have_what_is_inside(load_stages: LoadStages) -> None:
    reading = SCORE.replace("[turns]", "[turns, advantage]")
    assert "score is a service and reads advantage, which stage advantage writes inside the " in (
        load_error(load_stages, ADVANTAGE, reading, TRAIN)
    )
    critic = SCORE.replace("role: reward", "role: critic")
    assert "the critic's weights change with every batch" in load_error(
        load_stages, ADVANTAGE, critic, TRAIN
    )
    compute = SCORE.replace("type: infer", "type: compute")
    assert "compute stages need complete groups, and a service gets single rows" in load_error(
        load_stages, ADVANTAGE, compute, TRAIN
    )
    assert "runs a function row by row; give fn" in load_error(
        load_stages,
        ADVANTAGE,
        SCORE.replace("fn: 'm:score', ", "").replace("role: reward", "role: judge"),
        TRAIN,
    )


@pytest.mark.parametrize("where", ["training", "models.policy.training"])
def test_own_stages_say_how_they_are_spread(load_stages: LoadStages, where: str) -> None:
    message = load_error(load_stages, ADVANTAGE, TRAIN, overrides=(f"{where}.parallel.dp=2",))
    assert "parallel has no effect here because the pipeline has custom stages" in message
    spread = TRAIN.replace("role: actor", "role: actor, parallel: {dp: 2}")
    assert load_stages(ADVANTAGE, spread).pipeline is not None


def test_a_stage_placed_elsewhere_is_a_stage_of_the_ledger(load_stages: LoadStages) -> None:
    config = load_stages(SCORE, ADVANTAGE, TRAIN.replace("advantage]", "advantage, score]"))
    declared = StageConfig(name="score", reads=("turns",), writes=("score",))
    assert config.dataflow.stages == (declared,)
    again = parse(dump(config), origin="config.yaml")
    assert again == config, "declared once, however often the file is read"


def test_the_ledger_judges_a_service_as_any_of_its_stages(load_stages: LoadStages) -> None:
    unknown = SCORE.replace("[turns]", "[turns, mark]")
    message = load_error(load_stages, unknown, ADVANTAGE, TRAIN)
    assert "pipeline.stages[0].reads[1]: stage score reads mark, which no stage writes: " in message
    late = SCORE.replace("[score]", "[reward]").replace("place", "on: admitted, place")
    message = load_error(load_stages, late, ADVANTAGE, TRAIN, overrides=("reward=null",))
    assert "stage score: admission depends on reward" in message
    twice = SCORE.replace("[score]", "[reward]")
    assert "the nodes already score with penstock.tasks.reverse:reward" in load_error(
        load_stages, twice, ADVANTAGE, TRAIN
    )


def test_an_entry_of_the_dataflow_gives_a_service_its_deadline(load_stages: LoadStages) -> None:
    entry = "dataflow.stages=[{name: score, reads: [turns], writes: [score], deadline_s: 5}]"
    config = load_stages(SCORE, ADVANTAGE, TRAIN, overrides=(entry,))
    assert [(stage.name, stage.deadline_s) for stage in config.dataflow.stages] == [("score", 5.0)]
    message = load_error(
        load_stages, SCORE, ADVANTAGE, TRAIN, overrides=(entry.replace("[score]", "[mark]"),)
    )
    assert "stage score is also under dataflow.stages, with other writes" in message


def test_trainers_are_not_sent_columns_that_they_do_not_require(load_stages: LoadStages) -> None:
    entry = "dataflow.stages=[{name: score, reads: [turns], writes: [score], required: false}]"
    reading = ADVANTAGE.replace("[reward]", "[score], rename: {score: reward}")
    for stages in ((reading, TRAIN), (SCORE, reading, TRAIN)):
        message = load_error(load_stages, *stages, overrides=(entry,))
        assert f"pipeline.stages[{len(stages) - 2}].reads[0]: stage advantage reads sco" in message
        assert "score ─[score]─► advantage; set required: true there" in message
        assert load_stages(*stages, overrides=(entry.replace("false", "true"),))
    assert load_stages(SCORE, ADVANTAGE, TRAIN, overrides=(entry,)), "for other readers"


def test_stages_of_two_policies_do_not_meet(example: str, load_text: LoadText) -> None:
    stages = [
        text.replace("id: ", f"policy: {p}, id: {p}_") for p in "ab" for text in (ADVANTAGE, TRAIN)
    ]
    config = two_policies(example, load_text)(*stages)
    assert config.pipeline is not None
    assert [stage.id for stage in config.pipeline.of_policy("b")] == ["b_advantage", "b_train"]


# --- presets --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "max_staleness"), [("sync", 0), ("one_step", 1), ("async", 8)])
def test_a_mode_is_a_pace(example: str, load_text: LoadText, mode: str, max_staleness: int) -> None:
    text = example.replace("max_staleness: 1", f"mode: {mode}")
    config = load_text(text)
    assert config.training.max_staleness == max_staleness
    assert parse(dump(config), origin="config.yaml") == config
    with pytest.raises(ConfigError, match=f"mode {mode} means max_staleness"):
        wrong = 0 if mode == "async" else 3
        load_text(text, [f"training.max_staleness={wrong}"])


def test_async_takes_the_bound_that_is_written(example: str, load_text: LoadText) -> None:
    config = load_text(example.replace("max_staleness: 1", "mode: async\n  max_staleness: 4"))
    assert config.training.max_staleness == 4


def named(example: str, name: str, more: str = "") -> str:
    old = (
        "algorithm: {name: grpo, num_generations: 16, epsilon: 0.2, entropy_coef: 0.01, beta: 0.0}"
    )
    text = example.replace(old, f"algorithm: {{name: {name}{more}}}")
    return text.replace("  minibatches: 1\n", "").replace("{admit: reward-spread}, ", "")


def test_dapo_turns_on_all_its_parts(example: str, load_text: LoadText) -> None:
    config = load_text(named(example, "dapo"))
    algorithm = config.algorithm
    assert (algorithm.epsilon, algorithm.epsilon_high) == (0.2, 0.28)
    assert (algorithm.beta, algorithm.aggregation) == (0.0, "token-mean")
    admit = [rule.name for rule in config.for_policy("policy").rules if rule.hook is Hook.ADMIT]
    assert admit == ["reward-spread"]
    own = load_text(named(example, "dapo").replace("[{select", "[{admit: all}, {select"))
    admit = [rule.name for rule in own.for_policy("policy").rules if rule.hook is Hook.ADMIT]
    assert admit == ["all"], "what the file says wins"


@pytest.mark.parametrize("name", ["ppo", "dapo", "m2po", "gspo", "rloo", "opd"])
def test_presets_carry_the_numbers_of_their_papers(
    example: str, load_text: LoadText, name: str
) -> None:
    teacher = ", teacher: builtin:tiny-qwen3" if name == "opd" else ""
    config = load_text(named(example, name, teacher))
    training = config.training
    assert config.algorithm.num_generations == 8
    assert (training.minibatches, training.weight_decay, training.max_grad_norm) == (4, 0.01, 1.0)
    beta = {"ppo": 1e-3, "m2po": 1e-3, "rloo": 1e-3}.get(name, 0.0)
    assert config.algorithm.beta == beta
    assert config.algorithm.tau == (0.01 if name == "m2po" else None)
    few = load_text(named(example, name, teacher), ["training.groups_per_batch=2"])
    assert few.training.minibatches == 2
    assert parse(dump(config), origin="config.yaml") == config


def models(example: str, *entries: str) -> str:
    """Policies of their own, in place of the one."""
    before, _, after = example.partition("models:\n")
    rest = after[after.index("sources:") :]
    return f"{before}models:\n" + "".join(f"  {entry}\n" for entry in entries) + rest


def test_minibatches_follow_a_policys_own_algorithm(example: str, load_text: LoadText) -> None:
    init = "init: builtin:tiny-qwen3"
    entries = (
        f"plain: {{{init}}}",
        f"own: {{{init}, algorithm: {{name: m2po}}}}",
        f"few: {{{init}, algorithm: {{name: m2po}}, training: {{groups_per_batch: 2}}}}",
        f"same: {{{init}, algorithm: {{name: grpo}}}}",
        f"told: {{{init}, algorithm: {{name: m2po}}, training: {{minibatches: 3}}}}",
    )
    text = models(named(example, "grpo"), *entries)
    config = load_text(text)
    found = {name: config.for_policy(name).training.minibatches for name in config.models}
    assert found == {"plain": 1, "own": 4, "few": 2, "same": 1, "told": 3}
    assert config.models["same"].training is None, "what is shared stays shared"
    assert parse(dump(config), origin="config.yaml") == config
    written = load_text(text, ["training.minibatches=2"])
    found = {name: written.for_policy(name).training.minibatches for name in written.models}
    assert found == {"plain": 2, "own": 2, "few": 2, "same": 2, "told": 3}, "the file wins"


def test_the_file_wins_over_the_preset(example: str, load_text: LoadText) -> None:
    config = load_text(
        named(example, "m2po", ", tau: 0.002, beta: 0.0"), ["training.minibatches=1"]
    )
    assert (config.algorithm.tau, config.algorithm.beta) == (0.002, 0.0)
    assert config.training.minibatches == 1
    even = load_text(named(example, "dapo", ", epsilon: 0.3, epsilon_high: null")).algorithm
    assert (even.epsilon, even.epsilon_high) == (0.3, None)


def test_every_name_has_a_preset_and_grpo_stays_plain(example: str, load_text: LoadText) -> None:
    for name, declared in builtin_algorithms().items():
        assert {*declared.preset} <= {*AlgorithmConfig.model_fields}, name
        assert declared.keys <= {*AlgorithmConfig.model_fields}, name
    config = load_text(named(example, "grpo"))
    assert (config.algorithm.beta, config.training.minibatches) == (0.0, 1)


@pytest.mark.parametrize(
    ("name", "more", "expected_text"),
    [
        ("grpo", ", tau: 0.1", "tau belongs to m2po, and the algorithm is grpo"),
        ("m2po", ", tau: null", "m2po needs tau"),
        ("opd", "", "opd needs teacher"),
        ("rloo", ", num_generations: 1", "needs at least two generations per group, got 1"),
        ("gspo", ", epsilon: 0.2, epsilon_high: 0.2", "set epsilon and epsilon_high <= 0.01"),
        ("grpo", ", lam: 0.95", "lam belongs to ppo"),
        ("dapo", ", epsilon: 0.3", "epsilon_high 0.28, the default of dapo, is"),
        ("gspo", ", epsilon: 5.0e-4", "or epsilon_high: null to clip evenly"),
        ("sapo", ", delta: 3.0", "delta belongs to the clipped loss"),
        ("sapo", ", epsilon: 0.1", "epsilon clips a ratio, and sapo has a soft gate in place"),
        ("sapo", ", epsilon_high: 0.3", "epsilon_high clips a ratio, and sapo has a soft"),
        ("m2po", ", epsilon: 0.1", "epsilon clips a ratio, and m2po has the budget tau; remove it"),
        ("m2po", ", ratio_against: proximal", "m2po fixes what its ratio is against"),
        ("m2po", ", correction: {weighting: none, veto: 1e-4}", "remove correction"),
        ("grpo", ", correction: {}", "set ratio_against: proximal, or only reject tokens"),
        ("decoupled", ", correction: {}", "count twice; only reject tokens (weighting: none)"),
        ("grpo", ", correction: {low: 3.0, weighting: mask}", "no token is left"),
        ("grpo", ", correction: {low: 0.5}", "low has no effect with weighting truncate"),
        ("grpo", ", correction: {weighting: none}", "weighting none by itself corrects nothing"),
        (
            "grpo",
            ", correction: {weighting: none, veto: 1e-4, high: 5.0}",
            "high has no effect with weighting none; remove it",
        ),
        ("grpo", ", correction: {sequence: sum}", "set sequence_low or sequence_high"),
    ],
)
def test_keys_without_effect_or_of_another_algorithm_are_refused(
    example: str, load_text: LoadText, name: str, more: str, expected_text: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        load_text(named(example, name, more))
    assert expected_text in str(caught.value)


PRM = "{id: prm, type: infer, role: prm, reads: [turns], writes: [step_scores], place: [a]}"


def test_a_scoring_service_needs_a_model_or_a_function(load_stages: LoadStages) -> None:
    steps = "{id: advantage, type: compute, role: advantage, reads: [reward, step_scores], "
    steps += "writes: [advantage], fn: 'penstock.trainer.pipeline.credits:step_advantage'}"
    load_stages(PRM.replace("place:", "model: outputs/prm, place:"), steps, TRAIN)
    for old, new, problem in [
        ("", "", "runs a function or a model row by row; give model: the folder of `penstock prm"),
        (", place: [a]", ", model: m", "it runs as a service: give place and model; or give fn"),
        ("[step_scores]", "[scores], model: m", "the built-in for it writes step_scores, not sco"),
        ("[turns]", "[turns, reward], model: m", "reads turns only; set reads: [turns]"),
        ("role: prm", "role: prm, model: m, options: {x: 1}", "x is not an option"),
    ]:
        assert problem in load_error(
            load_stages, PRM.replace(old, new) if old else PRM, steps, TRAIN
        )
