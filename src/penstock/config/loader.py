# SPDX-License-Identifier: Apache-2.0
"""Reads a run file: YAML and overrides in, `RunConfig` or a complete list of mistakes out.

Owns files, lines, interpolation and dotted overrides. Holds no schema and no defaults; every
mistake becomes one line of a `ConfigError`: `FILE:LINE: path.to.key: what; fix`."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, cast

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import ValidationError

from penstock.config.base import leaves
from penstock.config.error_messages import ConfigProblem, path_text, problems_of
from penstock.config.resolved import put_back, set_aside
from penstock.config.run import RunConfig
from penstock.config.yaml_positions import MAX_PROBLEMS, KeyPositions, locate_keys
from penstock.durable import open_regular
from penstock.errors import ConfigError
from penstock.options import KeyPath
from penstock.plugins import did_you_mean

MAX_FILE_BYTES = 1 << 20
_OVERRIDE_KEY = re.compile(r"[A-Za-z_][\w-]*(\.[\w-]+|\[[0-9]+\])*", re.ASCII)
_NO_INTERPOLATION = "${} is for run files and their overrides; write the value itself"
"""A value of the environment would go wherever the file says, such as to a server."""
_PARSE_ERRORS = (OmegaConfBaseException, yaml.YAMLError, ValueError, OverflowError, RecursionError)
"""What OmegaConf raises for invalid text: its own errors, PyYAML's, and number parsing."""
_OVERRIDE_ERRORS = (OmegaConfBaseException, ValueError, IndexError, TypeError)
"""What OmegaConf raises for a dotted key that does not fit the tree."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Override:
    text: str
    path: tuple[str, ...]

    def is_below(self, section: KeyPath) -> bool:
        return self.path[: len(section)] == tuple(map(str, section))

    def covers(self, path: KeyPath) -> bool:
        return self.path == tuple(map(str, path[: len(self.path)]))


@dataclass(slots=True)
class _ErrorReport:
    """Mistakes, each with its position."""

    origin: str
    positions: KeyPositions
    given: Sequence[str]
    """Overrides as the user wrote them."""
    overrides: list[_Override] = field(default_factory=list[_Override])
    """Overrides that were applied, in order."""
    lines: list[tuple[int, str]] = field(default_factory=list[tuple[int, str]])
    """Messages with their sort key: file lines first, then overrides in order."""

    def add_file_error(self, line: int, path: KeyPath, text: str) -> None:
        where = f"{path_text(path)}: " if path else ""
        self.lines.append((line, _one_line(f"{self.origin}:{line}: {where}{text}")))

    def add_override_error(self, override: str, text: str) -> None:
        after_the_file = 1_000_000_000 + self.given.index(override)
        self.lines.append((after_the_file, _one_line(f'override "{override}": {text}')))

    def add(self, problem: ConfigProblem) -> None:
        """Point at the override that wrote one of the keys, else at the first key in the file."""
        for path in problem.keys:
            override = self._override_for(path, is_missing=problem.is_missing)
            if override is not None:
                self.add_override_error(override.text, f"{path_text(path)}: {problem.text}")
                return
        written = (path for path in problem.keys if path in self.positions.lines)
        path = next(written, problem.keys[0])
        self.add_file_error(self.positions.line_of(path), path, problem.text)

    def _override_for(self, path: KeyPath, *, is_missing: bool) -> _Override | None:
        """The last override that wrote this key, or created the section that has or lacks it."""
        section = path[:-1] if is_missing else path
        is_from_override = bool(section) and section not in self.positions.lines
        for override in reversed(self.overrides):
            if override.covers(path) or (is_from_override and override.is_below(section)):
                return override
        return None

    def is_written(self, path: KeyPath) -> bool:
        """Whether the file or an override has this key."""
        return path in self.positions.lines or any(o.covers(path) for o in self.overrides)

    def fail(self) -> NoReturn:
        ordered = sorted(self.lines, key=lambda line: line[0])
        unique = [*dict.fromkeys(text for _, text in ordered)]
        if len(unique) > MAX_PROBLEMS:
            unique[MAX_PROBLEMS:] = [f"and {len(unique) - MAX_PROBLEMS} more mistakes"]
        raise ConfigError("\n".join(unique)) from None


def load(path: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a run file, apply `a.b=c` overrides in order, and validate the result."""
    return parse(_read(path), origin=str(path), overrides=overrides)


def load_stored(
    path: Path, overrides: Sequence[str] = (), *, by_another: bool = False
) -> RunConfig:
    """As `load`, for the config of a run folder. Its values are written out: it takes nothing from
    the environment, since the folder may belong to another user. Overrides may, unless they are
    `by_another`, such as the agent that operates a run."""
    text, origin = _read(path, is_stored=True), str(path)
    return parse(text, origin=origin, overrides=overrides, is_stored=True, by_another=by_another)


def demo_config(seed: int, overrides: Sequence[str] = ()) -> RunConfig:
    """The built-in demo: a tiny model learns to reverse three letters on a CPU."""
    text = resources.files("penstock.config").joinpath("demo.yaml").read_text(encoding="utf-8")
    return parse(text, origin="demo.yaml", overrides=[f"seed={seed}", *overrides])


def parse(
    text: str,
    *,
    origin: str,
    overrides: Sequence[str] = (),
    is_stored: bool = False,
    by_another: bool = False,
) -> RunConfig:
    """As `load`, for text; `origin` is its name in messages. `is_stored` and `by_another`: as
    `load_stored`."""
    positions = locate_keys(text)
    report = _ErrorReport(origin, positions, overrides)
    for problem in positions.problems:
        report.add_file_error(problem.line, problem.path, problem.text)
    if positions.is_empty:
        report.add_file_error(
            1, (), "the file is empty; `penstock init DIR` writes one to start from"
        )
    elif not positions.problems and not positions.is_mapping:
        report.add_file_error(
            1, (), "the top level must be a mapping, starting like `name: my-run`"
        )
    if is_stored:
        for path in positions.interpolations:
            report.add_file_error(positions.line_of(path), path, _NO_INTERPOLATION)
    if report.lines:
        report.fail()
    plain = _plain_values(text, report)
    if is_stored and not overrides:
        values = put_back(set_aside(plain))
    else:
        tree = OmegaConf.create(set_aside(plain) if is_stored else plain)
        for override in overrides:
            _apply(override, tree, report, by_another=by_another)
        values = put_back(_resolve_interpolation(tree, report))
    config = _validate(values, report)
    if config is None or report.lines:
        report.fail()
    return config


def _read(path: Path, *, is_stored: bool = False) -> str:
    try:
        with open_regular(path) if is_stored else path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
        if len(content) > MAX_FILE_BYTES:
            raise ValueError(f"longer than {MAX_FILE_BYTES} bytes")
        return content.decode("utf-8-sig")
    except FileNotFoundError:
        others = [entry.name for entry in path.parent.glob("*.y*ml")]
        closest = did_you_mean(path.name, others)
        fix = "`penstock init DIR` writes one to start from"
        if closest:
            fix = f'did you mean "{path.with_name(closest)}"?'
        raise ConfigError(f"{path}: no such file; {fix}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{path}: not UTF-8 text (byte {error.start}); save it as UTF-8"
        ) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        raise ConfigError(f"{path}: cannot be read: {reason}; give a readable file") from None


def _plain_values(text: str, report: _ErrorReport) -> dict[str, Any]:
    """The values as the text has them, numbers as OmegaConf reads them."""
    try:
        return cast(dict[str, Any], _restore_on_key(OmegaConf.to_container(OmegaConf.create(text))))
    except _PARSE_ERRORS as error:
        path = _path_of(error)
        report.add_file_error(report.positions.line_of(path), path, _reason(error))
        report.fail()


def _restore_on_key(value: Any) -> Any:
    """The tree with the key `on` as text; no other boolean passes the scan as a key."""
    if isinstance(value, dict):
        entries = cast(dict[Any, Any], value).items()
        return {"on" if key is True else key: _restore_on_key(child) for key, child in entries}
    if isinstance(value, list):
        return [_restore_on_key(child) for child in cast(list[Any], value)]
    return value


def _apply(text: str, tree: DictConfig, report: _ErrorReport, *, by_another: bool) -> None:
    key, sign, value_text = text.partition("=")
    key = key.strip()
    if not sign or not _OVERRIDE_KEY.fullmatch(key):
        report.add_override_error(
            text, "cannot be parsed; write a dotted key, = and a value: a.b=c"
        )
        return
    found = locate_keys(value_text)
    if found.problems or (by_another and found.interpolations):
        why = found.problems[0].text if found.problems else _NO_INTERPOLATION
        report.add_override_error(text, f"{key}: {why}")
        return
    try:
        parsed = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={value_text}"]))
    except _PARSE_ERRORS as error:
        report.add_override_error(text, f"{key}: {_reason(error)}")
        return
    value = _restore_on_key(cast(dict[str, Any], parsed)["value"])
    try:
        OmegaConf.update(
            tree, key, set_aside(value) if by_another else value, merge=False, force_add=True
        )
    except _OVERRIDE_ERRORS as error:
        report.add_override_error(text, f"{key}: no such key in the file ({_reason(error)})")
        return
    path = tuple(re.findall(r"[^.\[\]]+", key))
    report.overrides.append(_Override(text=text, path=path))


def _resolve_interpolation(tree: DictConfig, report: _ErrorReport) -> Any:
    """The plain values with every `${}` resolved; fails with all that cannot be."""
    num_before = len(report.lines)
    for path, leaf in leaves(OmegaConf.to_container(tree)):
        if leaf == "???":
            report.add(ConfigProblem(keys=(path,), text="??? marks a missing value; set one"))
        elif isinstance(leaf, str) and "${" in leaf:
            try:
                node: Any = tree
                for part in path:
                    node = node[part]
            except (OmegaConfBaseException, RecursionError) as error:
                report.add(ConfigProblem(keys=(path,), text=_reason(error)))
    if len(report.lines) > num_before:
        report.fail()
    try:
        return OmegaConf.to_container(tree, resolve=True, throw_on_missing=True)
    except (OmegaConfBaseException, RecursionError) as error:
        path = _path_of(error)
        report.add_file_error(report.positions.line_of(path), path, _reason(error))
        report.fail()


def _validate(values: Any, report: _ErrorReport) -> RunConfig | None:
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        problems = problems_of(error)
        reported = {path for problem in problems for path in problem.keys}
        for problem in problems:
            if not _is_repeated(problem, reported, report):
                report.add(problem)
        return None


def _is_repeated(problem: ConfigProblem, reported: set[KeyPath], report: _ErrorReport) -> bool:
    """A mistake of a shared section that a policy inherits."""
    for path in problem.keys:
        is_own = len(path) > 3 and path[0] == "models" and path[2] in ("algorithm", "training")
        if not is_own or path[2:] not in reported or report.is_written(path):
            return False
    return True


def _one_line(text: str) -> str:
    """Escape line ends and control characters of keys and overrides."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _path_of(error: BaseException) -> KeyPath:
    key = getattr(error, "full_key", None)
    parts = re.findall(r"\[([0-9]+)\]|([^.\[\]]+)", key) if isinstance(key, str) else []
    return tuple(int(index) if index else word for index, word in parts)


def _reason(error: BaseException) -> str:
    """The first line of an error of OmegaConf, with a fix."""
    if isinstance(error, RecursionError):
        return "refers to itself, or is too deep; write the value out"
    what = str(error).partition("\n")[0] or type(error).__name__
    if isinstance(error, OmegaConfBaseException):
        return f"{what}; check the ${{...}} in it, or write \\${{...}} for the text itself"
    return f"{what}; put quotes around it if it is text"
