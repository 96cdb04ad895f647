# SPDX-License-Identifier: Apache-2.0
"""Good run files, overrides, interpolation, files that are none, and one policy's view."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from pydantic import ValidationError

from penstock.config import (
    CommandWorkflow,
    Hook,
    RunConfig,
    SurvivorsClosing,
    demo_config,
    load,
)
from penstock.config.dataflow import sample_share
from penstock.errors import ConfigError

LoadText = Callable[..., RunConfig]

SMALLEST = """\
name: small
models: {policy: {init: builtin:tiny-qwen3}}
sources: [{name: train, task: my_tasks}]
training: {steps: 1}
"""


def load_error(load_text: LoadText, text: str, overrides: Sequence[str] = ()) -> str:
    with pytest.raises(ConfigError) as caught:
        load_text(text, overrides)
    return str(caught.value)


def test_design_example_loads(example: str, load_text: LoadText) -> None:
    config = load_text(example)
    assert config.models["policy"].replicas == 2
    assert config.training.learning_rate == 2e-3
    assert config.dataflow.lease.ttl_s == 12.0
    assert [(rule.hook, rule.name) for rule in config.dataflow.rules] == [
        (Hook.ADMIT, "reward-spread"),
        (Hook.SELECT, "edf"),
    ]


def test_defaults(load_text: LoadText) -> None:
    config = load_text(SMALLEST)
    model = config.models["policy"]
    assert (model.engine, model.replicas, model.capacity, model.torch_threads) == ("hf", 1, 256, 1)
    training = config.training
    assert (training.precision, training.micro_batch_tokens) == ("float32", 4096)
    assert (training.lr_scheduler_type, training.warmup_steps) == ("constant", 0)
    lease = config.dataflow.lease
    assert (lease.ttl_s, lease.max_attempts, lease.start_to_close_s) == (12.0, 3, 600.0)
    assert (lease.schedule_to_start_s, lease.schedule_to_close_s) == (None, None)
    dataflow = config.dataflow
    assert (dataflow.store, dataflow.payload, dataflow.partitions) == ("sqlite", "segments", 1)
    assert (dataflow.pace, dataflow.retain_batches) == ("any", 8)
    assert dataflow.bounds.model_dump() == {
        "memory_mb": 2048,
        "disk_free_mb": 1024,
        "disk_reserve_mb": 64,
    }
    sampling = config.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k) == (1.0, 1.0, 0)
    assert (config.workflow, config.reward, config.dataflow.closing) == (
        "single_turn",
        None,
        "complete",
    )


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("closing: complete", "closing: drop"),
        ("closing: complete", "closing: survivors(4)"),
        ("closing: complete", "keep: sample(share=0.25)"),
        ("closing: complete", "keep: window"),
        ("closing: complete", "closing: {survivors: {min: 16}}"),
        ("workflow: single_turn", "workflow: my_package.flows:run"),
        ("workflow: single_turn", "workflow: {command: [python, agent.py]}"),
        ("task: penstock.tasks.reverse", "task: data/train.jsonl"),
        ("init: builtin:tiny-qwen3", "init: Qwen/Qwen3-0.6B"),
        ("reward: penstock.tasks.reverse:reward", "reward: null"),
        ("learning_rate: 2.0e-3", "learning_rate: 0"),
        ("learning_rate: 2.0e-3", "learning_rate: 2e-3"),
        ("max_staleness: 1", "max_staleness: 0"),
        ("replicas: 2", "replicas: 0"),
        ("engine: hf", "engine: simulated"),
        ("rules: [{admit: reward-spread}", "rules: [{admit: all}, {admit: reward-spread}"),
        ("epsilon: 0.2", "epsilon: 0.2, epsilon_high: 0.28"),
        ("name: reverse", "name: reverse-0.6b_v2"),
        ("lease: {ttl_s: 12}", "lease: &l {ttl_s: 12}"),
        ("name: reverse", "\N{BYTE ORDER MARK}name: reverse"),
    ],
)
def test_good_variants_load(old: str, new: str, example: str, load_text: LoadText) -> None:
    text = example.replace(old, new, 1)
    assert text != example
    load_text(text)


def test_both_forms_of_survivors_are_one(example: str, load_text: LoadText) -> None:
    short, long = (
        load_text(example, [f"dataflow.closing={form}"])
        for form in ("survivors(4)", "{survivors: {min: 4}}")
    )
    assert short == long
    assert isinstance(short.dataflow.closing, SurvivorsClosing)
    assert short.dataflow.closing.survivors.min == 4


def test_the_share_of_kept_groups(example: str, load_text: LoadText) -> None:
    shares = {"all": 1.0, "window": 1.0, "sample(0.1)": 0.1, "sample( share = 1e-3 )": 1e-3}
    for keep, share in shares.items():
        config = load_text(example, [f"dataflow.keep={keep}"])
        assert sample_share(config.dataflow.keep) == share
    assert load_text(example).dataflow.keep == "all"


def test_command_workflow(load_text: LoadText) -> None:
    config = load_text(SMALLEST + "workflow: {command: [sh, -c, 'echo \\${HOME}']}\n")
    assert config.workflow == CommandWorkflow(command=("sh", "-c", "echo ${HOME}"))


def test_interpolation(load_text: LoadText, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TEST_OUT", "/tmp/out")
    config = load_text(
        SMALLEST.replace("{steps: 1}", "{steps: 7, checkpoint_every: '${.steps}'}")
        + "output_dir: ${oc.env:PENSTOCK_TEST_OUT}/${name}\n"
    )
    assert config.output_dir == "/tmp/out/small"
    assert config.training.checkpoint_every == 7


def test_yaml_merge_keys(load_text: LoadText) -> None:
    text = SMALLEST.replace(
        "{policy: {init: builtin:tiny-qwen3}}",
        "\n  a: &a {init: x, replicas: 3}\n  b: {<<: *a, replicas: 4}",
    )
    config = load_text(text)
    assert (config.models["b"].init, config.models["b"].replicas) == ("x", 4)


def test_overrides_win_in_order(example: str, load_text: LoadText) -> None:
    overrides = [
        "training.steps=5",
        "training.steps=6",
        "models.policy.replicas=1",
        "sources.0.weight=2",
        "sources[0].limit=10",
        "models.other={init: x}",
        "sampling.max_tokens=3",
        "training.learning_rate=1e-4",
        "output_dir=a=b",
    ]
    config = load_text(example, overrides)
    assert config.training.steps == 6
    assert config.models["policy"].replicas == 1
    assert (config.sources[0].weight, config.sources[0].limit) == (2.0, 10)
    assert set(config.models) == {"policy", "other"}
    assert config.sampling.max_tokens == 3
    assert config.training.learning_rate == 1e-4
    assert config.output_dir == "a=b"


@pytest.mark.parametrize(
    ("override", "key", "expected_text"),
    [
        ("training.stesp=5", "training.stesp: ", 'did you mean "steps"?'),
        ("trainng.steps=3", "trainng: ", 'did you mean "training"?'),
        ("models.policy.trainng.steps=3", "models.policy.trainng: ", 'did you mean "training"?'),
        ("sources[0].tsk.a=1", "sources[0].tsk: ", "unknown key"),
        ("training.steps=many", "training.steps: ", "expected an integer"),
        ("training.steps=", "training.steps: ", "null"),
        ("steps=5", "steps: ", 'did you mean "training.steps"?'),
        ("training.minibatches=65", "training.minibatches: ", "set minibatches <= 64"),
        ("training={steps: 1, groups_per_batch: 1, minibatches: 2}", "training.minibatches: ", ""),
        ("algorithm.num_generations=1", "algorithm.num_generations: ", ">= 2"),
        ("models.second.replicas=1", "models.second.init: ", "missing required key"),
        ("sources.3.weight=1", "sources.3.weight: ", "no such key in the file"),
        ("sources.x.weight=1", "sources.x.weight: ", "no such key in the file"),
        ("seed", "", "write a dotted key"),
        ("=5", "", "write a dotted key"),
        ("a..b=5", "", "write a dotted key"),
        ("+seed=5", "", "write a dotted key"),
        ("seed=[1", "seed: ", "not YAML"),
        ("seed=!!python/name:os.system", "seed: ", "is not allowed"),
        ("seed=${nothing}", "seed: ", "not found"),
        ("seed=${", "seed: ", "check the ${...}"),
        ("eval={every: 1}", "eval.suites: ", "missing required key"),
        ("seed=0b_", "seed: ", "put quotes around it"),
        ("models.policy.training.minibatches=65", "models.policy.training.minibatches: ", ""),
    ],
)
def test_bad_overrides_are_named(
    override: str, key: str, expected_text: str, example: str, load_text: LoadText
) -> None:
    message = load_error(load_text, example, [override])
    assert message.startswith(f'override "{override}": {key}'), message
    assert expected_text in message
    assert len(message.splitlines()) == 1, message


def test_an_override_that_completes_a_contradiction_is_named(
    example: str, load_text: LoadText
) -> None:
    message = load_error(
        load_text, example.replace("minibatches: 1", "minibatches: 8"),
        ["training.groups_per_batch=4"],
    )  # fmt: skip
    assert message.startswith('override "training.groups_per_batch=4": training.groups_per_batch: ')


def test_file_and_override_mistakes_are_listed_together(example: str, load_text: LoadText) -> None:
    message = load_error(
        load_text, example.replace("seed: 0", "seed: x"), ["training.steps=0", "zz"]
    )
    assert [line.split(":")[0] for line in message.splitlines()] == [
        "run.yaml",
        'override "training.steps=0"',
        'override "zz"',
    ]


def test_missing_file(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(SMALLEST)
    with pytest.raises(ConfigError, match=r"rum\.yaml: no such file; did you mean .*run\.yaml"):
        load(tmp_path / "rum.yaml")
    with pytest.raises(ConfigError, match="no such file; `penstock init DIR`"):
        load(tmp_path / "nowhere" / "zzz")


def test_folder_instead_of_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load(tmp_path)


def test_not_utf8(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load(tmp_path / "run.yaml")


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n"])
def test_empty_file(text: str, load_text: LoadText) -> None:
    assert load_error(load_text, text).startswith("run.yaml:1: ")


@pytest.mark.parametrize("text", ["- a\n- b\n", "hello\n", "3\n", "[]"])
def test_not_a_mapping(text: str, load_text: LoadText) -> None:
    assert load_error(load_text, text).startswith("run.yaml:1: the top level must be a mapping")


@pytest.mark.parametrize(
    ("text", "line"), [("a: b\nc: [\n", 3), ("a: b\n\tc: d\n", 2), ("a: 'b\n", 2), ("a: \0", 1)]
)
def test_syntax_error_has_its_line(text: str, line: int, load_text: LoadText) -> None:
    assert load_error(load_text, text).startswith(f"run.yaml:{line}: not YAML: ")


def test_alias_bomb_is_refused_quickly(load_text: LoadText) -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]" for i in range(1, 12)]
    assert "too large for a run file" in load_error(load_text, "\n".join(lines))


def test_policy_settings_win(example: str, load_text: LoadText) -> None:
    own = (
        "{init: x, algorithm: {epsilon: 0.1}, training: {steps: 3, minibatches: 4}, "
        "dataflow: {rules: [{select: fifo}]}}"
    )
    config = load_text(example, [f"models.second={own}", "dataflow.rules=[{admit: reward-spread}]"])
    first, second = config.for_policy("policy"), config.for_policy("second")
    assert first.algorithm == config.algorithm
    assert first.training == config.training
    assert (second.algorithm.epsilon, second.algorithm.num_generations) == (0.1, 16)
    assert (second.training.steps, second.training.minibatches) == (3, 4)
    assert second.training.groups_per_batch == 64
    assert second.model.init == "x"
    names = {
        policy.name: {rule.hook.value: rule.name for rule in policy.rules}
        for policy in (first, second)
    }
    shared = {
        "mix": "weights",
        "curate": "all",
        "admit": "reward-spread",
        "route": "by-policy",
    }
    assert names == {
        "policy": {**shared, "select": "edf"},
        "second": {**shared, "select": "fifo"},
    }


def test_unknown_policy_is_suggested(example: str, load_text: LoadText) -> None:
    with pytest.raises(ConfigError, match='did you mean "policy"'):
        load_text(example).for_policy("poliy")


def test_configs_are_frozen(example: str, load_text: LoadText) -> None:
    config = load_text(example)
    with pytest.raises(ValidationError, match="frozen"):
        config.training.steps = 3


@pytest.mark.parametrize("seed", [0, 4])
def test_demo(seed: int) -> None:
    config = demo_config(seed)
    assert config.seed == seed
    assert (config.training.steps, config.algorithm.num_generations) == (130, 16)
    assert config.sampling.max_tokens == 3
    assert [rule.name for rule in config.dataflow.rules] == ["all", "edf"]


def test_demo_refuses_a_bad_seed() -> None:
    with pytest.raises(ConfigError, match="seed: -1 is out of range"):
        demo_config(-1)


def test_import_is_quick_and_brings_no_torch() -> None:
    """Measured by what pydantic alone takes: machines differ."""

    def fastest_s(module: str) -> float:
        code = (
            f"import sys, time; import {module}; "
            "print(time.process_time(), [m for m in ('torch', 'transformers') if m in sys.modules])"
        )
        runs = [
            subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
            for _ in range(3)
        ]
        seconds, heavy = zip(*(run.stdout.strip().split(" ", 1) for run in runs), strict=True)
        assert set(heavy) == {"[]"}
        return min(map(float, seconds))

    assert fastest_s("penstock.config") < 15 * fastest_s("pydantic"), "about 8 times"
