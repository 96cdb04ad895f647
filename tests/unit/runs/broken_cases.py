# SPDX-License-Identifier: Apache-2.0
"""Broken configs and broken modules, with what `penstock check` says of each.

The tests check every entry. The tables in docs/how-to/check.md are made from them:
`python -m tests.unit.runs.broken_cases` writes them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

BASE = """\
name: broken
output_dir: outputs
models:
  policy: {init: builtin:tiny-qwen3}
sources:
  - {name: train, task: penstock.tasks.reverse}
reward: penstock.tasks.reverse:reward
sampling: {max_tokens: 3}
algorithm: {name: grpo, num_generations: 4}
training: {steps: 2, groups_per_batch: 2}
"""
"""A config without a fault."""


@dataclass(frozen=True, slots=True)
class BrokenConfig:
    problem: str
    lines: str
    """Replace the section of this name, or add it; `name:~` leaves it out."""
    key: str
    says: str
    """Part of the message: what is wrong."""
    fix: str
    """Part of the message: what to do."""

    def text(self) -> str:
        """The run file with this fault."""
        return edited(self.lines)


@dataclass(frozen=True, slots=True)
class BrokenModule:
    problem: str
    code: str
    """Replaces the good parts of the user's module that it defines again."""
    key: str
    says: str
    fix: str
    config: str = ""
    """Sections that name the code; by default source, reward and workflow."""
    at: str = ""
    """Text of the line of the module that the message names; empty: it names none."""
    tags: frozenset[str] = field(default_factory=frozenset[str])
    """`blocks`, `exits`: needs a process; `torch`: found on the way to the loss."""


def edited(*sections: str) -> str:
    """The base with these sections in place of its own."""
    found = {part.partition(":")[0]: part for part in _sections(BASE)}
    for lines in sections:
        key = lines.partition(":")[0]
        found.pop(key, None)
        if not lines.endswith(":~"):
            found[key] = lines + "\n"
    return "".join(found.values())


def _sections(text: str) -> list[str]:
    parts: list[str] = []
    for line in text.splitlines(keepends=True):
        if line.startswith(" "):
            parts[-1] += line
        else:
            parts.append(line)
    return parts


GOOD_MODULE = """\
def make_task(ordinal, seed):
    return {"prompt": "ab>", "answer": "ba"}


def reward(completions, answer, **columns):
    return [float(text == truth) for text, truth in zip(completions, answer)]


async def run(task, ctx):
    answer = await ctx.policy().chat([{"role": "user", "content": task.payload["prompt"]}])
    return answer.text
"""
"""The user's module without a fault; a broken one is appended to it and wins."""

RULE = 'dataflow:\n  rules: [{admit: "MODULE:Mine", window: 5}]'
STAGES = (
    "pipeline:\n  stages:\n"
    '    - {id: credit, type: compute, role: advantage, fn: "MODULE:credit", '
    "reads: [turns, reward], writes: [advantage]}\n"
    "    - {id: learn, type: train, role: actor, reads: [turns, advantage], writes: []}"
)
LOSS = (
    "pipeline:\n  stages:\n"
    "    - {id: credit, type: compute, role: advantage, reads: [turns, reward], "
    "writes: [advantage]}\n"
    '    - {id: learn, type: train, role: actor, fn: "MODULE:loss", '
    "reads: [turns, advantage], writes: []}"
)
ENGINE = 'models:\n  policy: {init: builtin:tiny-qwen3, engine: "MODULE:Mine"}'
BLOCKS, EXITS, TORCH = frozenset({"blocks"}), frozenset({"exits"}), frozenset({"torch"})

BROKEN_CONFIGS: tuple[BrokenConfig, ...] = (
    BrokenConfig(
        "a misspelt top-level key",
        "trainning: {steps: 2}",
        key="trainning",
        says="unknown key",
        fix='did you mean "training"?',
    ),
    BrokenConfig(
        "a missing section",
        "training:~",
        key="training",
        says='missing required key "training"',
        fix="add it here",
    ),
    BrokenConfig(
        "no sources",
        "sources: []",
        key="sources",
        says="is empty",
        fix="give at least one entry",
    ),
    BrokenConfig(
        "no models",
        "models: {}",
        key="models",
        says="is empty",
        fix="give at least one entry",
    ),
    BrokenConfig(
        "a section that is not a mapping",
        "training: 5",
        key="training",
        says="got an integer (5)",
        fix="expected a mapping of keys",
    ),
    BrokenConfig(
        "a duplicate key",
        "training: {steps: 2, steps: 3}",
        key="training.steps",
        says='duplicate key "steps", first on line 10',
        fix="keep one of them",
    ),
    BrokenConfig(
        "a tab or bad indentation",
        "training:\n  steps: 2\n   groups_per_batch: 2",
        key="",
        says="not YAML: mapping values are not allowed",
        fix="check indentation, quotes and brackets around this line",
    ),
    BrokenConfig(
        "an unclosed bracket",
        "training: {steps: 2",
        key="",
        says="not YAML: while parsing a flow mapping",
        fix="check indentation, quotes and brackets",
    ),
    BrokenConfig(
        "a YAML tag",
        "seed: !!python/object:os.system 0",
        key="",
        says="is not allowed",
        fix="delete it",
    ),
    BrokenConfig(
        "a key that is not text",
        "models: {1: {init: builtin:tiny-qwen3}}",
        key="models",
        says="1 is not text",
        fix="put quotes around the key",
    ),
    BrokenConfig(
        "a missing value (???)",
        "name: ???",
        key="name",
        says="??? marks a missing value",
        fix="set one",
    ),
    BrokenConfig(
        "an interpolation of an unknown key",
        "name: ${nope}",
        key="name",
        says="Interpolation key 'nope' not found",
        fix="check the ${...} in it, or write \\${...} for the text itself",
    ),
    BrokenConfig(
        "a run name with a slash",
        "name: a/b",
        key="name",
        says='"a/b" is not a valid run name',
        fix="use up to 100 letters, digits, _, - and single dots",
    ),
    BrokenConfig(
        "a negative seed",
        "seed: -1",
        key="seed",
        says="-1 is out of range",
        fix="must be at least 0",
    ),
    BrokenConfig(
        "text where a number belongs",
        "seed: many",
        key="seed",
        says='got text ("many")',
        fix="expected an integer",
    ),
    BrokenConfig(
        "a fraction where an integer belongs",
        "training: {steps: 2.5}",
        key="training.steps",
        says="got a number (2.5)",
        fix="expected an integer",
    ),
    BrokenConfig(
        "zero steps",
        "training: {steps: 0}",
        key="training.steps",
        says="0 is out of range",
        fix="must be greater than 0",
    ),
    BrokenConfig(
        "a misspelt key of a section",
        "training: {steps: 2, lerning_rate: 0.1}",
        key="training.lerning_rate",
        says="unknown key",
        fix='did you mean "learning_rate"?',
    ),
    BrokenConfig(
        "a negative learning rate",
        "training: {steps: 2, learning_rate: -1.0}",
        key="training.learning_rate",
        says="-1.0 is out of range",
        fix="must be at least 0.0",
    ),
    BrokenConfig(
        "a number with a stray letter",
        "training: {steps: 2, learning_rate: 1e-6x}",
        key="training.learning_rate",
        says='got text ("1e-6x")',
        fix="expected a number",
    ),
    BrokenConfig(
        "an unknown schedule",
        "training: {steps: 2, lr_scheduler_type: cosin}",
        key="training.lr_scheduler_type",
        says='"cosin" is not one of constant | linear | cosine',
        fix='did you mean "cosine"?',
    ),
    BrokenConfig(
        "more warm-up than steps",
        "training: {steps: 2, warmup_steps: 5}",
        key="training.warmup_steps",
        says="5 warmup_steps do not fit into 2 steps",
        fix="set warmup_steps <= 2",
    ),
    BrokenConfig(
        "more minibatches than groups",
        "training: {steps: 2, groups_per_batch: 2, minibatches: 4}",
        key="training.minibatches",
        says="2 groups cannot be cut into 4 minibatches",
        fix="set minibatches <= 2 or groups_per_batch >= 4",
    ),
    BrokenConfig(
        "a mode and another staleness",
        "training: {steps: 2, mode: sync, max_staleness: 3}",
        key="training.max_staleness",
        says="mode sync means max_staleness 0, not 3",
        fix="remove one of the two",
    ),
    BrokenConfig(
        "an unknown mode",
        "training: {steps: 2, mode: asynch}",
        key="training.mode",
        says='"asynch" is not one of sync | one_step | async',
        fix='did you mean "async"?',
    ),
    BrokenConfig(
        "an unknown precision",
        "training: {steps: 2, precision: float16}",
        key="training.precision",
        says='"float16" is not one of float32 | bfloat16',
        fix='did you mean "bfloat16"?',
    ),
    BrokenConfig(
        "zero ranks",
        "training: {steps: 2, parallel: {dp: 0}}",
        key="training.parallel.dp",
        says="0 is out of range",
        fix="must be greater than 0",
    ),
    BrokenConfig(
        "an unknown algorithm",
        "algorithm: {name: grop}",
        key="algorithm.name",
        says='"grop" is not one of',
        fix='did you mean "grpo"?',
    ),
    BrokenConfig(
        "an unknown option of the algorithm",
        "algorithm: {name: grpo, epsilom: 0.2}",
        key="algorithm.epsilom",
        says="unknown key",
        fix='did you mean "epsilon"?',
    ),
    BrokenConfig(
        "a group of one",
        "algorithm: {name: grpo, num_generations: 1}",
        key="algorithm.num_generations",
        says="grpo needs at least two generations per group, got 1",
        fix="set num_generations >= 2",
    ),
    BrokenConfig(
        "a negative KL coefficient",
        "algorithm: {name: grpo, num_generations: 4, beta: -0.1}",
        key="algorithm.beta",
        says="-0.1 is out of range",
        fix="must be at least 0.0",
    ),
    BrokenConfig(
        "distillation without a teacher",
        "algorithm: {name: opd}",
        key="algorithm.name",
        says="opd needs teacher",
        fix="set it",
    ),
    BrokenConfig(
        "temperature 0",
        "sampling: {temperature: 0, max_tokens: 3}",
        key="sampling.temperature",
        says="with 0 all members of a group would be the same answer",
        fix="set temperature > 0",
    ),
    BrokenConfig(
        "top_p above 1",
        "sampling: {top_p: 1.5, max_tokens: 3}",
        key="sampling.top_p",
        says="1.5 is out of range",
        fix="must be at most 1.0",
    ),
    BrokenConfig(
        "no tokens",
        "sampling: {max_tokens: 0}",
        key="sampling.max_tokens",
        says="0 is out of range",
        fix="must be greater than 0",
    ),
    BrokenConfig(
        "an unknown engine",
        "models:\n  policy: {init: builtin:tiny-qwen3, engine: vlm}",
        key="models.policy.engine",
        says='unknown engine "vlm"',
        fix='did you mean "vllm"?',
    ),
    BrokenConfig(
        "an unknown built-in model",
        "models:\n  policy: {init: builtin:tiny-qwen}",
        key="models.policy.init",
        says='unknown built-in model "builtin:tiny-qwen"',
        fix='did you mean "builtin:tiny-qwen3"?',
    ),
    BrokenConfig(
        "an empty init",
        "models:\n  policy: {init: ''}",
        key="models.policy.init",
        says="is empty",
        fix="give a value",
    ),
    BrokenConfig(
        "no init",
        "models:\n  policy: {engine: hf}",
        key="models.policy.init",
        says='missing required key "init"',
        fix="add it here",
    ),
    BrokenConfig(
        "a policy's name with a space",
        "models:\n  my policy: {init: builtin:tiny-qwen3}",
        key="models.my policy",
        says='"my policy" is not valid here',
        fix="use up to 64 letters, digits, _ or -",
    ),
    BrokenConfig(
        "sglang without a server",
        "models:\n  policy: {init: builtin:tiny-qwen3, engine: sglang}",
        key="models.policy",
        says="engine sglang needs a running server",
        fix="set sglang: {url: ...}",
    ),
    BrokenConfig(
        "an adapter of rank 0",
        "models:\n  policy: {init: builtin:tiny-qwen3, lora: {rank: 0}}",
        key="models.policy.lora.rank",
        says="0 is out of range",
        fix="must be greater than 0",
    ),
    BrokenConfig(
        "no policy but a frozen one",
        "models:\n  policy: {init: builtin:tiny-qwen3, frozen: true}",
        key="models.policy.frozen",
        says="every policy is frozen",
        fix="remove frozen from one",
    ),
    BrokenConfig(
        "a source without a task",
        "sources:\n  - {name: train}",
        key="sources[0]",
        says="source train needs exactly one of task:",
        fix="data: (a data set)",
    ),
    BrokenConfig(
        "a source without a name",
        "sources:\n  - {task: penstock.tasks.reverse}",
        key="sources[0].name",
        says='missing required key "name"',
        fix="add it here",
    ),
    BrokenConfig(
        "two sources of one name",
        "sources:\n  - {name: train, task: penstock.tasks.reverse}\n"
        "  - {name: train, task: penstock.tasks.reverse}",
        key="sources[1].name",
        says='duplicate source name "train"',
        fix="names must be unique",
    ),
    BrokenConfig(
        "a function where a module belongs",
        'sources:\n  - {name: train, task: "task:make_task"}',
        key="sources[0].task",
        says='"task:make_task" is not a task source',
        fix="name the module alone: task",
    ),
    BrokenConfig(
        "a weight of 0",
        "sources:\n  - {name: train, task: penstock.tasks.reverse, weight: 0}",
        key="sources[0].weight",
        says="0 is out of range",
        fix="must be greater than 0.0",
    ),
    BrokenConfig(
        "a limit of 0",
        "sources:\n  - {name: train, task: penstock.tasks.reverse, limit: 0}",
        key="sources[0].limit",
        says="0 is out of range",
        fix="must be greater than 0",
    ),
    BrokenConfig(
        "a reward that names no function",
        "reward: task.reward",
        key="reward",
        says='"task.reward" is not valid here',
        fix="write module:function, like my_task:reward",
    ),
    BrokenConfig(
        "an unknown workflow",
        "workflow: multi_turn",
        key="workflow",
        says='unknown workflow "multi_turn"',
        fix="use single_turn | tool_loop | env_loop | solver_verifier | planner | module:function",
    ),
    BrokenConfig(
        "an option that a workflow does not have",
        "workflow: {name: tool_loop, max_turn: 3}",
        key="workflow.max_turn",
        says='unknown option "max_turn" of tool_loop',
        fix='did you mean "max_turns"?',
    ),
    BrokenConfig(
        "a prompt template that does not exist",
        "prompts: {solver: prompts/solver.txt}",
        key="prompts.solver",
        says="prompts/solver.txt cannot be read",
        fix="write the template there, or correct the path",
    ),
    BrokenConfig(
        "a command without a program",
        "workflow: {command: []}",
        key="workflow.command",
        says="is empty",
        fix="give at least one entry",
    ),
    BrokenConfig(
        "an unknown rule",
        "dataflow:\n  rules: [{admit: al}]",
        key="dataflow.rules[0].admit",
        says='unknown admit rule "al"',
        fix='did you mean "all"?',
    ),
    BrokenConfig(
        "an unknown hook",
        "dataflow:\n  rules: [{admitt: all}]",
        key="dataflow.rules[0].admitt",
        says="unknown key",
        fix='did you mean "admit"?',
    ),
    BrokenConfig(
        "an unknown option of a rule",
        "dataflow:\n  rules: [{admit: dedup, windw: 5}]",
        key="dataflow.rules[0].windw",
        says='unknown option "windw" of dedup',
        fix='did you mean "window"?',
    ),
    BrokenConfig(
        "two rules where one is allowed",
        "dataflow:\n  rules: [{select: edf}, {select: fifo}]",
        key="dataflow.rules[1]",
        says="select takes one rule and already has one",
        fix="keep one of them",
    ),
    BrokenConfig(
        "a negative lease",
        "dataflow:\n  lease: {ttl_s: -1}",
        key="dataflow.lease.ttl_s",
        says="-1 is out of range",
        fix="must be greater than 0.0",
    ),
    BrokenConfig(
        "an unknown store",
        "dataflow:\n  store: mysql",
        key="dataflow.store",
        says='"mysql" is not one of',
        fix="use sqlite | postgresql://host/database",
    ),
    BrokenConfig(
        "an unknown launcher",
        "launcher: slurm",
        key="launcher",
        says='"slurm" is not a launcher',
        fix="use local, ray or ssh",
    ),
    BrokenConfig(
        "a stage that reads an unknown column",
        "pipeline:\n  stages:\n"
        "    - {id: a, type: compute, role: advantage, reads: [rewards], "
        "writes: [advantage]}\n"
        "    - {id: t, type: train, role: actor, reads: [turns, advantage], writes: []}",
        key="pipeline.stages[0].reads[0]",
        says="stage a reads rewards, which no stage writes: ? ─[rewards]─► a",
        fix='did you mean "reward"?',
    ),
    BrokenConfig(
        "a graph without training",
        "pipeline:\n  stages:\n"
        "    - {id: a, type: compute, role: advantage, reads: [turns, reward], "
        "writes: [advantage]}",
        key="pipeline.stages",
        says="no stage trains policy policy",
        fix="add one with type: train and role: actor",
    ),
    BrokenConfig(
        "answers longer than the gateway allows",
        "sampling: {max_tokens: 100000}",
        key="sampling.max_tokens",
        says="100,000 tokens per answer, and the gateway accepts at most 32,768",
        fix="lower max_tokens",
    ),
    BrokenConfig(
        "answers longer than the context window",
        "sampling: {max_tokens: 512}",
        key="sampling.max_tokens",
        says="512 tokens per answer leave no room for a prompt in the context window of 512",
        fix="lower max_tokens",
    ),
    BrokenConfig(
        "more ranks than this machine has cores",
        "training: {steps: 2, parallel: {dp: 4096, tp: 2}}",
        key="training.parallel",
        says="the trainer of policy has 8192 ranks and this machine",
        fix="lower dp × tp",
    ),
    BrokenConfig(
        "a model folder that does not exist",
        "models:\n  policy: {init: no/such/model/folder}",
        key="models.policy.init",
        says="no config.json and *.safetensors in no/such/model/folder",
        fix="",
    ),
    BrokenConfig(
        "a model larger than memory and disk",
        "models:\n  policy: {init: ./huge}",
        key="models.policy.init",
        says="training policy needs 16 TB of memory",
        fix="choose a smaller model, train an adapter",
    ),
    BrokenConfig(
        "an adapter on layers that do not exist",
        "models:\n  policy: {init: builtin:tiny-qwen3, lora: {targets: [qkv]}}",
        key="models.policy.lora.targets",
        says="qkv: no matrix of builtin:tiny-qwen3 has such a name",
        fix="name linear layers like q_proj, or leave targets out for all of them",
    ),
    BrokenConfig(
        "a program that is not installed",
        "workflow: {command: [no-such-program]}",
        key="workflow.command",
        says="program 'no-such-program' not found",
        fix="install it or use its full path",
    ),
    BrokenConfig(
        "an output folder below a file",
        "output_dir: run.yaml/outputs",
        key="output_dir",
        says="cannot write to",
        fix="set output_dir to a writable folder",
    ),
    BrokenConfig(
        "vLLM without an environment",
        "models:\n  policy: {init: builtin:tiny-qwen3, engine: vllm, "
        "vllm: {environment: /no/such/venv}}",
        key="models.policy.engine",
        says="is vllm, but /no/such/venv/bin/vllm does not exist",
        fix="`penstock doctor` shows how to install it",
    ),
)

BROKEN_MODULES: tuple[BrokenModule, ...] = (
    # --- sources
    BrokenModule(
        "a task function with the wrong arguments",
        "def make_task(): return {}",
        key="sources[0].task",
        says="raised TypeError: make_task() takes 0 positional arguments but 2 were given",
        fix="write it as make_task(ordinal, seed)",
        at="def make_task(): return {}",
    ),
    BrokenModule(
        "a task function that raises",
        "def make_task(ordinal, seed):\n    return {}['x']",
        key="sources[0].task",
        says="raised KeyError: 'x'",
        fix="mend make_task",
        at="return {}['x']",
    ),
    BrokenModule(
        "a task function that returns None",
        "def make_task(ordinal, seed): pass",
        key="sources[0].task",
        says="make_task(0, 0) returned None",
        fix="return a dict",
        at="def make_task(ordinal, seed): pass",
    ),
    BrokenModule(
        "a task that cannot be stored",
        "def make_task(ordinal, seed): return {'prompt': 'a', 'x': object()}",
        key="sources[0].task",
        says="raised",
        fix="mend make_task",
        at="def make_task(ordinal, seed): return {'prompt'",
    ),
    BrokenModule(
        "tasks that differ on each call",
        "from random import random\n"
        "def make_task(ordinal, seed): return {'prompt': str(random()), 'answer': ''}",
        key="sources[0].task",
        says="returned different tasks",
        fix="derive all randomness from the seed",
        at="def make_task(ordinal, seed): return {'prompt': str",
    ),
    BrokenModule(
        "a task without a prompt, for the workflow that needs one",
        "def make_task(ordinal, seed): return {'question': 'a', 'n': 1}",
        key="sources[0].task",
        says='make_task has neither text nor messages under "prompt"',
        fix="add it, or set another workflow (keys: question, n)",
        at="def make_task(ordinal, seed): return {'question'",
        config="workflow: single_turn",
    ),
    BrokenModule(
        "no function make_task",
        "del make_task",
        key="sources[0].task",
        says="has no make_task(ordinal, seed)",
        fix="see penstock.tasks.reverse",
    ),
    BrokenModule(
        "a module that raises on import",
        "raise ValueError('mine')",
        key="sources[0].task",
        says="ValueError: mine",
        fix="install it here or put its folder on PYTHONPATH",
        at="raise ValueError('mine')",
    ),
    BrokenModule(
        "a syntax error",
        "def broken(:",
        key="sources[0].task",
        says="SyntaxError",
        fix="install it here or put its folder on PYTHONPATH",
        at="def broken(:",
    ),
    BrokenModule(
        "an import of a missing package",
        "import no_such_package",
        key="sources[0].task",
        says="No module named 'no_such_package'",
        fix="install it here",
        at="import no_such_package",
    ),
    BrokenModule(
        "a module that hangs on import",
        "while True: pass",
        key="sources[0].task",
        says="source train took longer than",
        fix="--deadline",
        at="while True: pass",
        tags=BLOCKS,
    ),
    BrokenModule(
        "a loop in compiled code that never lets go of the interpreter",
        "import re\nre.match('(a+)+$', 'a' * 99 + 'b')",
        key="sources[0].task",
        says="source train took longer than",
        fix="--deadline",
        at="re.match(",
        tags=BLOCKS,
    ),
    BrokenModule(
        "a module that ends its process",
        "import os\nos._exit(3)",
        key="sources[0].task",
        says="ended its process (exit code 3)",
        fix="remove calls such as sys.exit()",
        tags=EXITS,
    ),
    # --- rewards
    BrokenModule(
        "a reward with the wrong arguments",
        "def reward(): return []",
        key="reward",
        says="reward() got an unexpected keyword argument 'completions'",
        fix="write it as reward(completions, **columns)",
        at="def reward(): return []",
    ),
    BrokenModule(
        "a reward that needs a column which tasks lack",
        "def reward(completions, solution): return [0.0 for _ in completions]",
        key="reward",
        says="missing 1 required positional argument: 'solution'",
        fix="write it as reward(completions, **columns)",
        at="def reward(completions, solution)",
    ),
    BrokenModule(
        "a reward that raises",
        "def reward(completions, **columns):\n    return [1 / 0]",
        key="reward",
        says="ZeroDivisionError: division by zero",
        fix="one number per completion",
        at="return [1 / 0]",
    ),
    BrokenModule(
        "a reward that fails on an empty completion",
        "def reward(completions, **columns):\n    return [float(ord(c[0])) for c in completions]",
        key="reward",
        says="IndexError: string index out of range",
        fix="one number per completion",
        at="float(ord(c[0]))",
    ),
    BrokenModule(
        "a reward that returns None",
        "def reward(completions, **columns): pass",
        key="reward",
        says="returned None instead of a list of numbers",
        fix="one number per completion",
        at="def reward(completions, **columns): pass",
    ),
    BrokenModule(
        "a reward that returns one number for all",
        "def reward(completions, **columns): return [1.0]",
        key="reward",
        says="returned 1 values for 2 completions",
        fix="return one number per completion",
        at="def reward(completions, **columns): return [1.0]",
    ),
    BrokenModule(
        "a reward that returns text",
        "def reward(completions, **columns): return ['good' for _ in completions]",
        key="reward",
        says="'good' (str) for two completions",
        fix="return one finite number per completion",
        at="return ['good'",
    ),
    BrokenModule(
        "a reward that is not finite",
        "def reward(completions, **columns): return [float('nan') for _ in completions]",
        key="reward",
        says="'nan' (float) for two completions",
        fix="return one finite number per completion",
        at="return [float('nan')",
    ),
    BrokenModule(
        "a reward that hangs",
        "import time\ndef reward(completions, **columns):\n    time.sleep(3600)",
        key="reward",
        says="took longer than",
        fix="--deadline",
        at="time.sleep(3600)",
        tags=BLOCKS,
    ),
    BrokenModule(
        "no such reward",
        "rewrd = reward\ndel reward",
        key="reward",
        says="has no function 'reward'",
        fix='did you mean "rewrd"?',
    ),
    # --- workflows
    BrokenModule(
        "a workflow with the wrong arguments",
        "async def run(task): return ''",
        key="workflow",
        says="run() takes 1 positional argument but 2 were given",
        fix="write `async def run(task, ctx)`",
        at="async def run(task): return",
    ),
    BrokenModule(
        "a workflow that is not async",
        "def run(task, ctx): return ''",
        key="workflow",
        says="is not an async function",
        fix="write `async def run(task, ctx)`",
        at="def run(task, ctx): return ''",
    ),
    BrokenModule(
        "a workflow that raises at once",
        "async def run(task, ctx):\n    return task['prompt']",
        key="workflow",
        says="TypeError: 'Task' object is not subscriptable",
        fix="every attempt would fail",
        at="return task['prompt']",
    ),
    BrokenModule(
        "a workflow that misuses the answer",
        "async def run(task, ctx):\n"
        "    answer = await ctx.policy().chat([{'role': 'user', 'content': 'ab>'}])\n"
        "    return answer['text']",
        key="workflow",
        says="TypeError: 'Answer' object is not subscriptable",
        fix="every attempt would fail",
        at="return answer['text']",
    ),
    BrokenModule(
        "a workflow that never calls the model",
        "async def run(task, ctx): return 'ba'",
        key="workflow",
        says="the workflow ended without a model answer",
        fix="await ctx.policy().chat(messages)",
        at="async def run(task, ctx): return 'ba'",
    ),
    BrokenModule(
        "a workflow that returns another type",
        "async def run(task, ctx):\n"
        "    await ctx.policy().chat([{'role': 'user', 'content': 'ab>'}])\n"
        "    return {'text': 'ba'}",
        key="workflow",
        says="the workflow returned a dict",
        fix="return the completion as text",
        at="async def run(task, ctx):",
    ),
    BrokenModule(
        "a workflow that calls an unknown policy",
        "async def run(task, ctx):\n"
        "    await ctx.policy('judge').chat([{'role': 'user', 'content': 'ab>'}])",
        key="workflow",
        says="unknown model 'judge'",
        fix="this session has: policy",
        at="ctx.policy('judge')",
    ),
    BrokenModule(
        "a workflow that waits without end",
        "import asyncio\nasync def run(task, ctx):\n    await asyncio.Event().wait()",
        key="workflow",
        says="did not end within",
        fix="--deadline",
        at="await asyncio.Event().wait()",
        tags=BLOCKS,
    ),
    BrokenModule(
        "a workflow that blocks the event loop",
        "import time\nasync def run(task, ctx):\n    time.sleep(3600)",
        key="workflow",
        says="took longer than",
        fix="--deadline",
        at="time.sleep(3600)",
        tags=BLOCKS,
    ),
    # --- rules and engines
    BrokenModule(
        "a misspelt rule class",
        "class Mien:\n    pass",
        key="dataflow.rules[0]",
        says="has no class 'Mine'",
        fix='did you mean "Mien"?',
        config=RULE,
    ),
    BrokenModule(
        "a misspelt option of a rule",
        "class Mine:\n"
        "    def __init__(self, state, *, windw=1): pass\n"
        "    def judge(self, group): return True",
        key="dataflow.rules[0]",
        says='unknown option "window" of Mine',
        fix='did you mean "windw"?',
        config=RULE,
        at="class Mine:",
    ),
    BrokenModule(
        "a rule without its method",
        "class Mine:\n    def __init__(self, state, *, window=1): pass",
        key="dataflow.rules[0]",
        says="Mine needs `def judge(self, group)`",
        fix="like every admit rule",
        config=RULE,
        at="class Mine:",
    ),
    BrokenModule(
        "a rule that raises when it is built",
        "class Mine:\n"
        "    def __init__(self, state, *, window=1): raise RuntimeError('mine')\n"
        "    def judge(self, group): return True",
        key="dataflow.rules[0]",
        says="raised RuntimeError: mine",
        fix="change the options or the rule",
        config=RULE,
        at="raise RuntimeError('mine')",
    ),
    BrokenModule(
        "an engine with the wrong arguments",
        "class Mine:\n    def __init__(self): pass",
        key="models.policy.engine",
        says="does not take one argument",
        fix="write it as `def __init__(self, settings)`",
        config=ENGINE,
        at="class Mine:",
    ),
    # --- stages and losses
    BrokenModule(
        "a stage that takes no columns",
        "def credit() -> dict: return {}",
        key="pipeline.stages[0].fn",
        says="takes no layout",
        fix="write it as fn(layout, *, …)",
        config=STAGES,
        at="def credit() -> dict",
    ),
    BrokenModule(
        "a stage without a column it reads",
        "def credit(layout) -> dict: return {}",
        key="pipeline.stages[0].fn",
        says="has no keyword reward for the column of that name",
        fix="add it, or rename or drop the column",
        config=STAGES,
        at="def credit(layout) -> dict",
    ),
    BrokenModule(
        "a stage that raises",
        "def credit(layout, *, reward) -> dict:\n    return {'advantage': reward[99]}",
        key="pipeline.stages[0].fn",
        says="raised IndexError",
        fix="mend it, or its options",
        config=STAGES,
        at="reward[99]",
        tags=TORCH,
    ),
    BrokenModule(
        "a stage that returns the wrong shape",
        "def credit(layout, *, reward) -> dict:\n    return {'advantage': reward}",
        key="pipeline.stages[0].fn",
        says="column advantage is a token column and has shape (4,)",
        fix="layout.by_token(values_R)",
        config=STAGES,
        at="def credit(layout, *, reward)",
        tags=TORCH,
    ),
    BrokenModule(
        "a loss that returns a mean",
        "def loss(tokens): return tokens.logprobs_K.mean()",
        key="pipeline.stages[1].fn",
        says="the loss returned a Tensor",
        fix="return TokenLoss(loss_K=",
        config=LOSS,
        at="def loss(tokens)",
        tags=TORCH,
    ),
    BrokenModule(
        "a loss that is not finite",
        "def loss(tokens):\n"
        "    from penstock.trainer.losses.tokens import TokenLoss\n"
        "    return TokenLoss(loss_K=tokens.logprobs_K * float('nan'), metrics={})",
        key="pipeline.stages[1].fn",
        says="policy policy learns nothing from a tiny batch: non_finite_gradient",
        fix="returns finite numbers",
        config=LOSS,
        at="def loss(tokens)",
        tags=TORCH,
    ),
)


# --- the tables of the docs -----------------------------------------------------------------------

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "check.md"
MARKER = "<!-- broken {kind}: made by tests/unit/runs/broken_cases.py -->"


def table(cases: tuple[BrokenConfig, ...] | tuple[BrokenModule, ...]) -> str:
    """A Markdown table of what `check` says."""
    rows = [
        f"| {case.problem} | {_span(case.key)} | {_span(case.says)} | {_span(case.fix)} |"
        for case in cases
    ]
    return "\n".join(
        ["| what is wrong | key | the message says | how to fix it |", "|---|---|---|---|", *rows]
    )


def _span(text: str) -> str:
    """A code span inside a table."""
    if not text:
        return ""
    quotes = "``" if "`" in text else "`"
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{quotes}{pad}{text}{pad}{quotes}".replace("|", "\\|")


def with_tables(page: str) -> str:
    """The page with both tables up to date."""
    for kind, cases in (("configs", BROKEN_CONFIGS), ("modules", BROKEN_MODULES)):
        marker = MARKER.format(kind=kind)
        before, _, rest = page.partition(f"{marker}\n")
        _, _, after = rest.partition(f"\n{marker}")
        page = f"{before}{marker}\n\n{table(cases)}\n\n{marker}{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
