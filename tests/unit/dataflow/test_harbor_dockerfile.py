# SPDX-License-Identifier: Apache-2.0
"""Dockerfiles of Harbor tasks: what is honoured, and what is refused by its name and line."""

from __future__ import annotations

import pytest

from penstock.dataflow.sources.harbor_dockerfile import DEFAULT_PATH, Image, parse_dockerfile
from penstock.errors import ConfigError


def parsed(*lines: str) -> Image:
    return parse_dockerfile("\n".join(("FROM debian:12", *lines)), "Dockerfile")


def test_all_that_is_honoured() -> None:
    image = parsed(
        "# a comment",
        "workdir /srv",
        "WORKDIR app/src",
        "ENV A=1",
        "ENV B='two words $A' \\",
        "# a comment inside",
        "",
        '    C="three \\"x\\" $A"',
        "ENV OLD the rest of it",
        "ENV PATH=/opt/bin:$PATH",
        "COPY --chmod=755 run.sh .",
        'COPY ["a b.txt", "/data/${A}/"]',
        "COPY one two /both",
        "RUN apt-get update && \\",
        "    apt-get install -y git",
        "RUN <<END",
        "USER nobody",
        "END",
    )
    assert (image.base, image.workdir) == ("debian:12", "/srv/app/src")
    assert image.env == {
        "A": "1",
        "B": "two words $A",
        "C": 'three "x" 1',
        "OLD": "the rest of it",
        "PATH": f"/opt/bin:{DEFAULT_PATH}",
    }
    assert [(copy.sources, copy.target, copy.mode) for copy in image.copies] == [
        (("run.sh",), "/srv/app/src/", 0o755),
        (("a b.txt",), "/data/1/", None),
        (("one", "two"), "/both/", None),
    ]
    assert image.run_lines == (15, 17)


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("USER nobody", "USER"),
        ("ADD https://example.org/x /x", "ADD"),
        ("ARG VERSION=1", "ARG"),
        ('ENTRYPOINT ["sh"]', "ENTRYPOINT"),
        ("HEALTHCHECK NONE", "HEALTHCHECK"),
        ("VOLUME /data", "VOLUME"),
        ('SHELL ["bash"]', "SHELL"),
        ("ONBUILD RUN x", "ONBUILD"),
        ("FROM other", "several stages"),
        ("COPY --from=build /x /x", "--from=build"),
        ("COPY --chown=1:1 x /x", "--chown=1:1"),
        ("COPY ../x /app/x", "../x"),
        ("COPY x", "target"),
        ('COPY ["x"', "JSON"),
        ("COPY <<END /app/x\nhello\nEND", "<<END"),
        ("ENV LONE", "LONE"),
        ("ENV A=$MISSING", "$MISSING"),
        ("ENV A=${B:-c}", "${B:-c}"),
        ("ENV A='open", "not closed"),
        ("ENV 1A=x", "1A"),
        ("ENV A=" + "$X" * 5_000, "4,096 characters"),
        ("WORKDIR", "argument"),
        ("WORKDIR ../x", "`..`"),
    ],
)
def test_anything_else_is_refused_by_name_and_line(line: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parsed("WORKDIR /app", "ENV X=1", line)
    assert str(refused.value).startswith("Dockerfile:4: ")
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "no FROM"),
        ("WORKDIR /app", "before FROM"),
        ("FROM a AS b", "several stages"),
        ("FROM --platform=linux/arm64 a", "--platform"),
        ("FROM $BASE", "$BASE"),
        ("# escape=`\nFROM a", "escape="),
        ("FROM a\nRUN <<END\nx", "<<END has no end"),
        ("FROM a\n" + "# x\n" * 20_000, "65,536"),
    ],
)
def test_a_file_needs_one_plain_from(text: str, named: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_dockerfile(text, "Dockerfile")
    assert named in str(refused.value)
