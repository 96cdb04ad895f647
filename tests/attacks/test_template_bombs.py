# SPDX-License-Identifier: Apache-2.0
"""A chat template of somebody else's model: a hundred characters must not fill the memory of every
node that serves it. What templates do is as before."""

from __future__ import annotations

import pytest
from jinja2 import TemplateError

from penstock.gateway import bounded_template
from penstock.gateway.bounded_template import BoundedTemplate

ROOM = 1 << 20
MANY = 50_000_000
DOUBLED = (
    "{% set ns = namespace(x=START) %}{% for i in range(17) %}{% set ns.x = MORE %}{% endfor %}"
)


def doubled(start: str, more: str, end: str = "{{ ns.x | length }}") -> str:
    return DOUBLED.replace("START", start).replace("MORE", more) + end


BOMBS = {
    "percent": f"{{{{ '%{MANY}s' % messages }}}}",
    "percent with a star": f"{{{{ '%*s' % ({MANY}, 'x') }}}}",
    "percent, many times": "{{ ('%(a)s' * 2000) % {'a': 'x' * 2000} }}",
    "filter format": f"{{{{ '%.{MANY}f' | format(1.0) }}}}",
    "format": f"{{{{ '{{:>{MANY}}}'.format('x') }}}}",
    "format, width of an argument": f"{{{{ '{{:>{{}}}}'.format('x', {MANY}) }}}}",
    "format, many times": "{{ ('{0}' * 2000).format('x' * 2000) }}",
    "ljust": f"{{{{ 'x'.ljust({MANY}) }}}}",
    "zfill": f"{{{{ 'x'.zfill({MANY}) }}}}",
    "center": f"{{{{ 'x' | center({MANY}) }}}}",
    "constant center": f"{{{{ 'x' | center({MANY}) | length }}}}",
    "indent": f"{{{{ 'x\\ny' | indent({MANY}) }}}}",
    "indent with text": "{{ ('x\\n' * 2000) | indent('y' * 2000) }}",
    "expandtabs": f"{{{{ ('\\t' * 2000).expandtabs({MANY}) }}}}",
    "tojson": "{{ [[1]] | tojson(indent=20000000) }}",
    "batch": f"{{{{ [1] | batch({MANY}, 'x') | list | length }}}}",
    "replace": "{{ ('x' * 2000).replace('x', 'y' * 2000) | length }}",
    "filter replace": "{{ ('x' * 2000) | replace('x', 'y' * 2000) | length }}",
    "join": "{{ ('y' * 2000).join(['x'] * 2000) | length }}",
    "filter join": "{{ (['x'] * 2000) | join('y' * 2000) | length }}",
    "join of what comes one by one": "{{ (['x'] * 2000) | map('upper') | join('y' * 2000) }}",
    "translate": "{{ ('x' * 2000).translate({120: 'y' * 2000}) | length }}",
    "plus": doubled("'x' * 64", "ns.x + ns.x"),
    "plus of lists": doubled("[1]", "ns.x + ns.x"),
    "tilde": doubled("'x' * 64", "ns.x ~ ns.x"),
    "nested lists": doubled("'x' * 64", "[ns.x, ns.x]", "{{ (ns.x | string) | length }}"),
    "nested lists, written": doubled("'x' * 64", "[ns.x, ns.x]", "{{ ns.x }}"),
    "nested lists, with tilde": doubled("'x' * 64", "[ns.x, ns.x]", "{{ ns.x ~ '' }}"),
    "nested lists, as JSON": doubled("'x' * 64", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | tojson }}"),
    "written again and again": "{% set x = 'x' * 2000 %}"
    "{% for i in range(2000) %}{{ x }}{% endfor %}",
    "in a macro": "{% macro m() %}{% for i in range(2000) %}"
    + "x" * 2000
    + "{% endfor %}{% endmacro %}{{ m() | length }}",
    "lorem ipsum": f"{{{{ lipsum({MANY}) }}}}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_makes_little(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded_template, "MAX_MADE_BYTES", ROOM)
    template = BoundedTemplate(BOMBS[name])
    with pytest.raises(TemplateError, match=r"the template|a chat template|undefined"):
        template.render(messages=[])


def test_what_templates_do_is_as_before() -> None:
    source = (
        "{%- set ns = namespace(text='', n=0) -%}"
        "{%- for m in messages -%}{%- set ns.text = ns.text + '<' ~ m.role ~ '>' -%}"
        "{%- set ns.n = ns.n + 1 -%}"
        "{{ m.content.replace('a', 'b').split('|') | join('/') }}"
        "{{ '%s %5.2f %d' % (m.role, 1.5, ns.n) }}{{ '{:>3} {{}}'.format(ns.n) }}"
        "{{ m | tojson }}{{ m.role.upper() | indent(2) }}{{ 'x' | center(5) }}"
        "{%- endfor -%}{{ ns.text }}{{ ['u', 'v'] | join }}{{ 'a' ~ 1 ~ [1, 'b'] }}"
        "{{ 20261119 % 7 }}"
    )
    message = {"role": "user", "content": "a|a"}
    made = BoundedTemplate(source).render(messages=[message] * 2)
    one = 'b/buser  1.50 {}  {} {{}}{{"role": "user", "content": "a|a"}}USER  x  '
    wanted = (
        "".join(one.format(n, n) for n in (1, 2)) + "<user><user>uva1[1, 'b']" + str(20261119 % 7)
    )
    assert made == wanted


def test_a_long_conversation_fits() -> None:
    """Also with a template that adds up its text: the same characters are copied for each turn."""
    source = (
        "{% set ns = namespace(t='') %}{% for m in messages %}{% set ns.t = ns.t + m %}{% endfor %}"
    )
    messages = ["x" * 500] * 1_000
    assert BoundedTemplate(source + "{{ ns.t }}").render(messages=messages) == "".join(messages)
