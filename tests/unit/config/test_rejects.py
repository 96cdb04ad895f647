# SPDX-License-Identifier: Apache-2.0
"""Broken run files: each is refused with the key, the line and the cure.

A case replaces one part of the design's file; `#@` marks the line that must be named."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from penstock.config import RunConfig
from penstock.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One broken file."""

    old: str
    """Text of the good file that is replaced."""
    new: str
    """What stands there instead, `#@` at the end of the line to be named."""
    key: str
    """Path that the message names."""
    expected_text: str
    """Words of the message: what is wrong, or the cure."""


def case(old: str, new: str, key: str, expected_text: str) -> Case:
    return Case(old=old, new=new, key=key, expected_text=expected_text)


POLICY = "  policy: {init: builtin:tiny-qwen3, engine: hf, replicas: 2}"
SOURCE = "  - {name: train, task: penstock.tasks.reverse, weight: 1.0}"
ALGORITHM = (
    "algorithm: {name: grpo, num_generations: 16, epsilon: 0.2, entropy_coef: 0.01, beta: 0.0}"
)
RULES = "  rules: [{admit: reward-spread}, {select: edf}]"


def policy(inside: str) -> str:
    return f"  policy: {{init: builtin:tiny-qwen3, {inside}}} #@"


def source(inside: str) -> str:
    return f"  - {{{inside}}} #@"


def algorithm(inside: str) -> str:
    return f"algorithm: {{{inside}}} #@"


def rules(inside: str) -> str:
    return f"  rules: [{inside}] #@"


UNKNOWN = [
    case("max_staleness: 1", "max_stalenes: 1 #@", "training.max_stalenes",
         'did you mean "max_staleness"?'),
    case("seed: 0", "sead: 0 #@", "sead", 'did you mean "seed"?'),
    case("seed: 0", "max_staleness: 0 #@", "max_staleness",
         'did you mean "training.max_staleness"?'),
    case("seed: 0", "lr: 0.1 #@", "lr", 'did you mean "training.learning_rate"?'),
    case("epochs: 1", "num_iterations: 1 #@", "training.num_iterations",
         'did you mean "training.epochs"?'),
    case("epochs: 1", "zzz: 1 #@", "training.zzz", "known here: steps, learning_rate"),
    case("  lease: {ttl_s: 12}", "  lease: {ttl: 12} #@", "dataflow.lease.ttl",
         'did you mean "ttl_s"?'),
    case("  lease: {ttl_s: 12}", "  lease:\n    max_attempts: 2\n    max-attempts: 2 #@",
         "dataflow.lease.max-attempts", 'did you mean "max_attempts"?'),
    case(POLICY, policy("replica: 2"), "models.policy.replica", 'did you mean "replicas"?'),
    case(POLICY, policy("algorithm: {epsilo: 0.1}"), "models.policy.algorithm.epsilo",
         'did you mean "epsilon"?'),
    case(POLICY, policy("dataflow: {rule: []}"), "models.policy.dataflow.rule",
         'did you mean "rules"?'),
    case(POLICY, policy("dataflow: {store: sqlite}"), "models.policy.dataflow.store",
         "unknown key"),
    case(SOURCE, source("name: a, task: b, weigth_: 2"), "sources[0].weigth_",
         'did you mean "weight"?'),
    case(RULES, rules("{admitt: all}"), "dataflow.rules[0].admitt", 'did you mean "admit"?'),
    case("training:", "trainingg: #@", "trainingg", 'did you mean "training"?'),
    case("workflow: single_turn", "workflow: {commnd_: [a]} #@", "workflow.commnd_",
         'did you mean "command"?'),
    case("closing: complete", "closing: {survivor: {min: 2}} #@", "dataflow.closing.survivor",
         'did you mean "survivors"?'),
]  # fmt: skip

MISSING = [
    case("name: reverse\n", "", "name", 'missing required key "name" (Names the run'),
    case("  steps: 80\n", "", "training.steps", "(Batches to train on"),
    case(POLICY, "  policy: {engine: hf} #@", "models.policy.init", 'missing required key "init"'),
    case(SOURCE, source("name: train"), "sources[0]", "needs exactly one of task:"),
    case(SOURCE, source("task: a.b"), "sources[0].name", 'missing required key "name"'),
    case("workflow: single_turn", "workflow: {} #@", "workflow.command",
         "(The program and its arguments"),
    case("closing: complete", "closing: {survivors: {}} #@", "dataflow.closing.survivors.min",
         'missing required key "min"'),
    case("name: reverse", "name: ??? #@", "name", "??? marks a missing value; set one"),
]  # fmt: skip

TYPES = [
    case("seed: 0", 'seed: "0" #@', "seed", 'integer, got text ("0"); remove the quotes'),
    case("seed: 0", "seed: 1.5 #@", "seed", "expected an integer, got a number (1.5)"),
    case("seed: 0", "seed: true #@", "seed", "expected an integer, got a boolean (true)"),
    case("seed: 0", "seed: #@", "seed", "expected an integer, got null"),
    case("name: reverse", "name: 7 #@", "name", "got an integer (7); put quotes around it"),
    case("epochs: 1", "epochs: [1] #@", "training.epochs", "got a list ([1])"),
    case("  lease: {ttl_s: 12}", "  lease: 12 #@", "dataflow.lease",
         "expected a mapping of keys"),
    case(POLICY, "  policy: builtin:tiny-qwen3 #@", "models.policy", "expected a mapping of keys"),
    case("workflow: single_turn", "workflow: {command: ls} #@", "workflow.command",
         'expected a list, got text ("ls"); write [ls]'),
    case("workflow: single_turn", "workflow: {command: [ls, 1]} #@", "workflow.command[1]",
         "; put quotes around it"),
    case("workflow: single_turn", "workflow: 3 #@", "workflow", "expected text"),
    case("workflow: single_turn", "workflow: {command: []} #@", "workflow.command",
         "give at least one entry"),
    case("learning_rate: 2.0e-3", "learning_rate: .nan #@", "training.learning_rate",
         "expected a finite number"),
    case(f"sources:\n{SOURCE}", "sources: {name: train} #@", "sources", "expected a list"),
    case("  closing: complete", "  closing: 4 #@", "dataflow.closing", "complete"),
]  # fmt: skip

RANGES = [
    case("seed: 0", "seed: -1 #@", "seed", "must be at least 0"),
    case("seed: 0", "seed: 4294967296 #@", "seed", "must be at most 4294967295"),
    case("steps: 80", "steps: 0 #@", "training.steps", "must be greater than 0"),
    case("learning_rate: 2.0e-3", "learning_rate: -1e-3 #@", "training.learning_rate",
         "must be at least 0"),
    case("  lease: {ttl_s: 12}", "  lease: {ttl_s: 0} #@", "dataflow.lease.ttl_s",
         "must be greater than 0"),
    case(ALGORITHM, algorithm("epsilon: 1.5"), "algorithm.epsilon", "must be at most 1"),
    case("seed: 0", "sampling: {top_p: 1.1} #@", "sampling.top_p", "must be at most 1"),
    case("seed: 0", "sampling: {max_tokens: 0} #@", "sampling.max_tokens",
         "must be greater than 0"),
    case(SOURCE, source("name: a, task: b, weight: 0"), "sources[0].weight",
         "must be greater than 0"),
    case(SOURCE, source("name: a, task: b, limit: 0"), "sources[0].limit",
         "must be greater than 0"),
    case(f"sources:\n{SOURCE}", "sources: [] #@", "sources", "give at least one entry"),
    case(f"models:\n{POLICY}", "models: {} #@", "models", "give at least one entry"),
]  # fmt: skip

CHOICES = [
    case("name: reverse", "name: ../escape #@", "name", "it names the run folder"),
    case("name: reverse", "name: a/b #@", "name", "use up to 100 letters"),
    case("output_dir: outputs", "output_dir: '' #@", "output_dir", "is empty; give a value"),
    case("launcher: local", "launcher: locl #@", "launcher", 'did you mean "local"?'),
    case(POLICY, "  a.b: {init: x} #@", "models.a.b", "use up to 64 letters"),
    case(POLICY, "  policy: {init: builtin:tiny-qwen} #@", "models.policy.init",
         'did you mean "builtin:tiny-qwen3"?'),
    case(POLICY, policy("engine: hff"), "models.policy.engine", 'did you mean "hf"?'),
    case(POLICY, policy("engine: vllm, engines: 2, vllm: {url: 'http://h:1'}"),
         "models.policy.vllm.url", "1 replicas × 2 engines need 2, one each; list 2 urls"),
    case("seed: 0", "hosts: {'gpu[0-1': {memory_gb: 80}} #@", "hosts.gpu[0-1",
         "write a name, or a range like gpu[0-7]"),
    case(POLICY, policy("engine: sglang"), "models.policy", "set sglang: {url: ...}"),
    case(SOURCE, source("name: a, task: 'b:c'"), "sources[0].task", "name the module alone: b"),
    case(SOURCE, source("name: a, task: b/c.txt"), "sources[0].task", "a path ending in .jsonl"),
    case("workflow: single_turn", "workflow: single_trun #@", "workflow",
         'did you mean "single_turn"?'),
    case("workflow: single_turn", "workflow: mine.py #@", "workflow",
         "| planner | module:function | {command: [...]}"),
    case("reward: penstock.tasks.reverse:reward", "reward: penstock.tasks.reverse #@", "reward",
         "write module:function"),
    case("store: sqlite", "store: sqlit #@", "dataflow.store", 'did you mean "sqlite"?'),
    case("closing: complete", "closing: completed #@", "dataflow.closing",
         'did you mean "complete"?'),
    case("closing: complete", "closing: survivors #@", "dataflow.closing", "survivors(4)"),
    case(RULES, rules("{admit: reward_spread}"), "dataflow.rules[0].admit",
         'did you mean "reward-spread"?'),
    case(RULES, rules("{select: lifo}"), "dataflow.rules[0].select", 'did you mean "fifo"?'),
    case(ALGORITHM, algorithm("name: trpo"), "algorithm.name", 'did you mean "grpo"?'),
    case("max_staleness: 1", "mode: on_policy #@", "training.mode", "use sync | one_step | async"),
]  # fmt: skip

NOT_SUPPORTED = [
    case("launcher: local", "launcher: slurm #@", "launcher", "use local, ray or ssh"),
    case("eval: null", "eval: {every: 10} #@", "eval.suites", "required"),
    case("eval: null", "eval: {every: 5, suites: [a, a]} #@", "eval.suites", "called a"),
    case("eval: null", "eval: {every: 5, suites: [a], best: b} #@", "eval.best", "use one"),
    case("eval: null", "eval: {every: 5, suites: [a], policy: b} #@", "eval.policy", "unknown"),
    case("eval: null", "eval: {every: 5, suites: [a], temperature: 0.0001} #@",
         "eval.temperature", "use 0"),
    case("report_to: []", "report_to: [wandbb] #@", "report_to[0]", 'did you mean "wandb"?'),
    case("report_to: []", "report_to: wandb #@", "report_to", "list"),
    case(SOURCE, source("name: a, task: d.parquet"), "sources[0].task", "under data: d.parquet"),
    case(SOURCE, source("name: a, task: 'hf://a/b'"), "sources[0].task", "under data: a/b"),
    case(SOURCE, source("name: a, data: gsm8k"), "sources[0].data.path", "OWNER/gsm8k"),
    case(SOURCE, source("name: a, data: ./b.json"), "sources[0].data.path", "convert it to one of"),
    case(SOURCE, source("name: a, data: 'hf://datasets/a/b'"), "sources[0].data.path", "write a/b"),
    case(SOURCE, source("name: a, data: {split: train}"), "sources[0].data.path",
         'missing required key "path"'),
    case(SOURCE, source("name: a, data: {path: b/c, limit: 0}"), "sources[0].data.limit",
         "greater than 0"),
    case(SOURCE, source("name: a, data: {path: b/c, colums: {}}"), "sources[0].data.colums",
         'did you mean "columns"?'),
]  # fmt: skip

CONTRADICTIONS = [
    case(POLICY, policy("engine: vllm, vllm: {url: [a, a]}"), "models.policy.vllm.url",
         "names a server twice"),
    case(POLICY, policy("engine: vllm, vllm: {url: a, devices: [0]}"),
         "models.policy.vllm.devices", "on its own devices"),
    case("seed: 0", "hosts: {'gpu[3-1]': {memory_gb: 80}} #@", "hosts.gpu[3-1]", "a range goes up"),
    case("seed: 0", "hosts: {'g[0-2]': {memory_gb: 80}, g1: {memory_gb: 80}} #@", "hosts.g1",
         "host g1 is in g[0-2] and in g1"),
    case("seed: 0", "hosts: {'g[0-2]': {memory_gb: 80, address: '10.0.0.[1-2]'}} #@",
         "hosts.g[0-2].address", "are 3 hosts and 10.0.0.[1-2] 2 addresses"),
    case("  steps: 80", "  steps: 80\n  hosts: [gpu0] #@", "training.hosts",
         "unknown host \"gpu0\"; declare it under hosts"),
    case(POLICY, policy("frozen: true"), "models.policy.frozen", "there is nothing to train"),
    case(ALGORITHM, algorithm("name: reinforce, agents: siblings"), "algorithm.agents",
         "compares inside a group, which reinforce does not"),
    case(ALGORITHM, algorithm("num_generations: 1"), "algorithm.num_generations",
         "set num_generations >= 2"),
    case(ALGORITHM, algorithm("epsilon: 0.2, epsilon_high: 0.1"), "algorithm.epsilon_high",
         "set epsilon_high >= epsilon"),
    case("minibatches: 1", "minibatches: 65 #@", "training.minibatches",
         "set minibatches <= 64 or groups_per_batch >= 65"),
    case("epochs: 1", "warmup_steps: 500 #@", "training.warmup_steps", "set warmup_steps <= "),
    case("epochs: 1", "precision: float16 #@", "training.precision", "float32 | bfloat16"),
    case("epochs: 1", "lr_scheduler_type: cosin #@", "training.lr_scheduler_type",
         'did you mean "cosine"?'),
    case("epochs: 1", "micro_batch_tokens: 0 #@", "training.micro_batch_tokens",
         "must be greater than 0"),
    case("closing: complete", "closing: survivors(17) #@", "dataflow.closing",
         "set min <= 16 or raise num_generations"),
    case("closing: complete", "closing:\n    survivors:\n      min: 17 #@",
         "dataflow.closing.survivors.min", "set min <= 16"),
    case("closing: complete", "closing: survivors(1) #@", "dataflow.closing.survivors.min",
         "must be at least 2"),
    case(RULES, rules("{}"), "dataflow.rules[0]", "names exactly one hook, here none"),
    case(RULES, rules("{admit: all, select: edf}"), "dataflow.rules[0]", "here admit, select"),
    case(RULES, rules("{select: edf}, {select: fifo}"), "dataflow.rules[1]", "keep one of them"),
    case(RULES, rules("{admit: all}, {admit: all}"), "dataflow.rules[1]", "delete this entry"),
    case(SOURCE, SOURCE + "\n  - name: train #@\n    task: a.b", "sources[1].name",
         "names must be unique"),
    case("seed: 0", "sampling: {temperature: 0} #@", "sampling.temperature",
         "set temperature > 0"),
    case(POLICY, policy("dataflow: {rules: [{mix: weights}]}"), "models.policy.dataflow.rules[0]",
         "move this entry to dataflow.rules"),
    case(POLICY, policy("training: {minibatches: 100}"), "models.policy.training.minibatches",
         "set minibatches <= 64"),
    case(POLICY, policy("algorithm: {num_generations: 1}"),
         "models.policy.algorithm.num_generations", "set num_generations >= 2"),
    case(POLICY, policy("lora: {rank: 0}"), "models.policy.lora.rank", "must be greater than 0"),
    case(POLICY, policy("lora: {r: 8}"), "models.policy.lora.r", "unknown key"),
    case(POLICY, policy("lora: {targets: []}"), "models.policy.lora.targets",
         "give at least one entry"),
    case(POLICY, policy("lora: {targets: [self_attn.q_proj]}"), "models.policy.lora.targets[0]",
         "the last part of a module's name, like q_proj"),
    case(POLICY, policy("engine: sglang, sglang: {url: 'http://h:1'}, lora: {}"),
         "models.policy.engine", "does not support adapters yet; use hf or vllm"),
    case(POLICY, policy("engine: sglang, sglang: {url: 'http://h:1'}, kv: keep"),
         "models.policy.kv", "cannot keep keys and values across versions; set kv: drop"),
    case(POLICY, policy("engine: vllm, lora: {}, kv: keep"), "models.policy.kv", "remove kv"),
    case(POLICY, policy("kv: keep") + "\ntrust: {accept_untrusted: true}", "models.policy.kv",
         "set kv: drop, or accept_untrusted: false"),
    case(POLICY, policy("training: {parallel: {dp: 6, replicas: 4}}"),
         "models.policy.training.parallel.replicas", "2 left over; set replicas to a divisor of 6"),
    case(POLICY, policy("engine: hf, training: {parallel: {dp: 4, ep: 3}}"),
         "models.policy.training.parallel.ep", "set ep to a divisor of 4"),
    case(POLICY, policy("engine: hf, training: {parallel: {dp: 4, tp: 2, ep: 2}}"),
         "models.policy.training.parallel.ep", "set tp: 1 and raise dp"),
    case(POLICY, policy("engine: hf, training: {router_replay: true, parallel: {cp: 2}}"),
         "models.policy.training.router_replay", "set cp: 1 and raise dp"),
    case(POLICY, policy("engine: scripted, training: {router_replay: true}"),
         "models.policy.training.router_replay", "use hf or vllm"),
]  # fmt: skip

RULE_OPTIONS = [
    case(RULES, rules("{replay: newest, ratoi: 0.3}"), "dataflow.rules[0].ratoi",
         'did you mean "ratio"?'),
    case(RULES, rules("{select: edf, parts: 2}"), "dataflow.rules[0].parts",
         'unknown option "parts" of edf; remove it'),
    case(RULES, rules("{admit: dedup, zzz: 2}"), "dataflow.rules[0].zzz", "of dedup; use window"),
    case(RULES, rules("{admit: 3}"), "dataflow.rules[0].admit", "expected text"),
    case(RULES, rules("{replay: newst}"), "dataflow.rules[0].replay", 'did you mean "newest"?'),
    case(RULES, rules("{replay: ratio}"), "dataflow.rules[0].replay",
         "use newest | prioritised | uniform | module:Class"),
    case(RULES, rules("{replay: newest, ratio: 1.0}"), "dataflow.rules[0].ratio",
         "must be less than 1"),
    case(RULES, rules("{replay: newest, max_uses: 1}"), "dataflow.rules[0].max_uses",
         "must be at least 2"),
    case(RULES, rules("{replay: newest, max_staleness: 0}"), "dataflow.rules[0].max_staleness",
         "set max_staleness >= 1, or null"),
    case(RULES, rules("{curate: greso, delta: x}"), "dataflow.rules[0].delta",
         "expected a number"),
    case(RULES, rules("{curate: greso, p_min: 0.6}"), "dataflow.rules[0].p_min",
         "set p_min <= p <= p_max"),
    case(RULES, rules("{curate: greso, hard_to: 0.6}"), "dataflow.rules[0].hard_to",
         "set hard_to <= easy_from"),
    case(RULES, rules("{curate: solved-filter, revisit: 0}"), "dataflow.rules[0].revisit",
         "must be greater than 0"),
    case(RULES, rules("{admit: reward-range}"), "dataflow.rules[0]", "set one of them"),
    case(RULES, rules("{admit: reward-range, low: 2, high: 1}"), "dataflow.rules[0].low",
         "set low <= high"),
    case(RULES, rules("{admit: outcome, allow: [failed]}"), "dataflow.rules[0].allow[0]",
         "use completed | truncated"),
    case(RULES, rules("{admit: outcome, allow: []}"), "dataflow.rules[0].allow",
         "give at least one entry"),
    case(RULES, rules("{select: priority, by: spreads}"), "dataflow.rules[0].by",
         'did you mean "spread"?'),
    case(RULES, rules("{route: by-role}"), "dataflow.rules[0].roles",
         'missing required key "roles"'),
    case(RULES, rules("{route: by-role, roles: {policy: solver}}"),
         "dataflow.rules[0].roles.policy", 'got text ("solver"); write [solver]'),
    case(RULES, rules("{route: by-role, roles: {polici: [a]}}"),
         "dataflow.rules[0].roles.polici", 'did you mean "policy"?'),
    case(RULES, rules("{route: shared, turns_of: {policy: [teacher]}}"),
         "dataflow.rules[0].turns_of.policy[0]", 'unknown policy "teacher"; use policy'),
    case(RULES, rules("{mix: curriculum, difficulty: {trains: 1}}"),
         "dataflow.rules[0].difficulty.trains", 'did you mean "train"?'),
    case(RULES, rules("{replay: newest}, {replay: uniform}"), "dataflow.rules[1]",
         "keep one of them"),
    case(RULES, rules("{route: by-policy}, {route: by-policy}"), "dataflow.rules[1]",
         "delete this entry"),
]  # fmt: skip


def dataflow(inside: str) -> Callable[[str, str], Case]:
    return lambda key, expected_text: case(
        "  store: sqlite", f"{inside} #@", f"dataflow.{key}", expected_text
    )


def stages(*entries: str) -> Callable[[str, str], Case]:
    return dataflow(f"  stages: [{', '.join(f'{{{entry}}}' for entry in entries)}]")


SCORE = "name: score, reads: [turns], writes: [scores]"
DATAFLOW = [
    dataflow("  store: postgres://h/d")("store", "write postgresql://host/database"),
    dataflow("  store: postgresql://h")("store", "does not name a database"),
    dataflow("  store: postgresql://[h/d")("store", "does not name a database"),
    dataflow("  store: mysql://h/d")("store", "use sqlite | postgresql://host/database"),
    dataflow("  store: postgresql://db.lab/d")("store", "set payload to s3://bucket/prefix"),
    dataflow("  payload: s3://bucket/x")("payload", "set store to postgresql://host/database"),
    dataflow("  payload: segment")("payload", 'did you mean "segments"?'),
    dataflow("  payload: s3://")("payload", "does not name a store"),
    dataflow("  payload: ftp://h/x")("payload", "does not name a store"),
    dataflow("  payload: 3")("payload", "use segments | memory"),
    dataflow("  pace: policyy")("pace", 'did you mean "policy"?'),
    dataflow("  pace: 3")("pace", "expected text"),
    dataflow("  max_partner_lag: 2")("max_partner_lag", "this run trains one policy; remove it"),
    dataflow("  max_partner_lag: -1")("max_partner_lag", "must be at least 0"),
    dataflow("  partitions: 0")("partitions", "must be greater than 0"),
    dataflow("  keep: windows")("keep", 'did you mean "window"?'),
    dataflow("  keep: sample(10%)")("keep", 'did you mean "sample(0.1)"?'),
    dataflow("  keep: sample(0)")("keep", "the share is above 0 and at most 1; use sample(0.1)"),
    dataflow("  keep: sample(1.2.3)")("keep", "the share is above 0 and at most 1"),
    dataflow("  keep: 0.5")("keep", "use all | sample(0.1) | window"),
    dataflow("  keep_mb: 0")("keep_mb", "must be greater than 0"),
    dataflow("  retain_batches: 0")("retain_batches", "must be greater than 0"),
    dataflow("  bounds: {disk_free_mb: 64}")("bounds.disk_free_mb", "set it lower"),
    dataflow("  bounds: {memory: 64}")("bounds.memory", 'did you mean "memory_mb"?'),
    dataflow("  spaces: [{name: a}, {name: a}]")("spaces[1].name", "names must be unique"),
    dataflow("  spaces: [{name: a b}]")("spaces[0].name", "use up to 64 letters"),
    dataflow("  spaces: [{name: a, quota_mb: 0}]")("spaces[0].quota_mb", "greater than 0"),
    case("  lease: {ttl_s: 12}", "  lease: {schedule_to_close_s: 0} #@",
         "dataflow.lease.schedule_to_close_s", "must be greater than 0"),
    stages("name: a, reads: [turns]")("stages[0].writes", "missing required key"),
    stages(SCORE, SCORE)("stages[1].name", "names of stages must be unique"),
    stages(SCORE, "name: b, reads: [turns], writes: [scores]")(
        "stages[1].writes[0]", "stages score and b both write scores"),
    stages("name: a, reads: [turns], writes: [turns]")(
        "stages[0].writes[0]", "every row has turns on delivery"),
    stages("name: a, reads: [score], writes: [x]", SCORE)(
        "stages[0].reads[0]", 'did you mean "scores"?'),
    stages("name: a, reads: [logits], writes: [x]")(
        "stages[0].reads[0]", "add a stage that writes it"),
    stages("name: a, reads: [turns], writes: [x], on: admittd")(
        "stages[0].on", 'did you mean "admitted"?'),
    stages(f"{SCORE}, on: admitted", "name: b, reads: [scores], writes: [x]")(
        "stages[1].reads[0]", "set on: admitted"),
    stages("name: a, reads: [x], writes: [y]", "name: b, reads: [y], writes: [x]")(
        "stages[0].reads", "stages form a cycle: "),
    stages("name: a, reads: [turns], writes: [reward]")(
        "stages[0].writes", "set reward: null"),
    stages("name: a, reads: [turns], writes: [a/b]")(
        "stages[0].writes[0]", "use up to 64 letters"),
    stages("name: a, reads: [], writes: [b]")("stages[0].reads", "give at least one entry"),
]  # fmt: skip

YAML = [
    case("seed: 0", "seed: 0\nseed: 1 #@", "seed", "duplicate key"),
    case("epochs: 1", "epochs: 1\n  epochs: 1 #@", "training.epochs", "keep one of them"),
    case("seed: 0", "1: 0 #@", "", "put quotes around the key"),
    case("seed: 0", "seed: !!int 0 #@", "", "delete it"),
    case("seed: 0", "seed: !!python/name:os.system #@", "", "is not allowed"),
    case("seed: 0", "seed: 'a\nzzz: 1' b #@", "", "not YAML"),
    case("seed: 0", "seed: &s [*s] #@", "seed[0]", "refers to itself"),
    case("seed: 0", "seed: ${sead} #@", "seed", "'sead' not found"),
    case("seed: 0", "seed: ${seed} #@", "seed", "Recursive interpolation"),
    case("seed: 0", "seed: ${ #@", "seed", "check the ${...}"),
    case("seed: 0", "seed: ${oc.env:PENSTOCK_SURELY_UNSET} #@", "seed", "not found"),
    case("seed: 0", f"seed: {'[' * 50} #@", "", "too deep"),
]  # fmt: skip

VALUES = UNKNOWN + MISSING + TYPES + RANGES + CHOICES + NOT_SUPPORTED + CONTRADICTIONS
ALL = VALUES + RULE_OPTIONS + DATAFLOW + YAML


def expected_line(text: str, key: str) -> int:
    """The marked line, else the line of the parent section of a key that was taken out."""
    lines = text.splitlines()
    marked = [number for number, line in enumerate(lines, 1) if "#@" in line]
    if marked:
        return marked[0]
    parent = key.rpartition(".")[0]
    return next((n for n, line in enumerate(lines, 1) if line.startswith(f"{parent}:")), 1)


@pytest.mark.parametrize("broken", ALL, ids=[f"{c.key or 'file'}-{c.new[:30]!r}" for c in ALL])
def test_names_line_key_and_cure(
    broken: Case, example: str, load_text: Callable[[str], RunConfig]
) -> None:
    text = example.replace(broken.old, broken.new, 1)
    assert text != example
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    where = f"{broken.key}: " if broken.key else ""
    message = str(caught.value)
    assert message.startswith(f"run.yaml:{expected_line(text, broken.key)}: {where}"), message
    assert broken.expected_text in message
    assert len(message.splitlines()) == 1, message


def test_there_are_many_cases() -> None:
    assert len(ALL) >= 40


def test_every_problem_is_listed_in_order_of_lines(
    example: str, load_text: Callable[[str], RunConfig]
) -> None:
    text = example.replace("seed: 0", "seed: x").replace("store: sqlite", "stor: sqlite")
    text = text.replace("steps: 80", "steps: 0").replace("name: reverse", "name: a b")
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[:2] for line in lines] == [
        ["run.yaml:1", "name"],
        ["run.yaml:4", "seed"],
        ["run.yaml:12", "dataflow.stor"],
        ["run.yaml:22", "training.steps"],
    ]


def test_two_contradictions_of_one_section_are_both_listed(
    example: str, load_text: Callable[[str], RunConfig]
) -> None:
    text = example.replace(ALGORITHM, algorithm("epsilon_high: 0.1, delta: 1.05"))
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    assert len(str(caught.value).splitlines()) == 2


def test_a_shared_mistake_is_told_once(example: str, load_text: Callable[[str], RunConfig]) -> None:
    text = example.replace(POLICY, policy("training: {epochs: 2}").removesuffix(" #@"))
    text = text.replace("  steps: 80\n", "").replace("max_staleness: 1", "max_staleness: -1")
    with pytest.raises(ConfigError) as caught:
        load_text(text)
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[1] for line in lines] == ["training.steps", "training.max_staleness"]
