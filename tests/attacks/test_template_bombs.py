# SPDX-License-Identifier: Apache-2.0
"""A chat template of somebody else's model: a hundred characters must not fill the memory of every
node that serves it, nor keep it busy. What templates do is as before."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from jinja2 import TemplateError

from penstock.errors import WeightsError
from penstock.gateway import template_process
from penstock.gateway.template_process import TemplateProcess

MAX_S = 0.3
"""Of processor time: a slow machine does not change what ends a template."""
ROOM = 1 << 20
MEMORY = 100 << 20
MANY = 500_000_000
DOUBLED = (
    "{% set ns = namespace(x=START, y=START) %}"
    "{% for i in range(30) %}{% set ns.x = MORE %}{% endfor %}"
)
TWICE = DOUBLED.replace("{% endfor %}", "{% set ns.y = [ns.y, ns.y] %}{% endfor %}")
HELD = "{% set ns = namespace(l=[]) %}{% for i in range(1500) %}{% set ns.l = [ns.l, MORE] %}"


def doubled(start: str, more: str, end: str = "{{ ns.x | length }}", loop: str = DOUBLED) -> str:
    return loop.replace("START", start).replace("MORE", more) + end


def held(before: str, more: str) -> str:
    return before + HELD.replace("MORE", more) + "{% endfor %}ok"


BOMBS = {
    "percent": f"{{{{ '%{MANY}s' % messages }}}}",
    "percent with a star": f"{{{{ '%*s' % ({MANY}, 'x') }}}}",
    "percent, many times": "{{ ('%(a)s' * 20000) % {'a': 'x' * 20000} }}",
    "filter format": f"{{{{ '%.{MANY}f' | format(1.0) }}}}",
    "format": f"{{{{ '{{:>{MANY}}}'.format('x') }}}}",
    "format, width of an argument": f"{{{{ '{{:>{{}}}}'.format('x', {MANY}) }}}}",
    "format, many times": "{{ ('{0}' * 20000).format('x' * 20000) }}",
    "ljust": f"{{{{ 'x'.ljust({MANY}) }}}}",
    "zfill": f"{{{{ 'x'.zfill({MANY}) }}}}",
    "center": f"{{{{ 'x' | center({MANY}) }}}}",
    "constant center": f"{{{{ 'x' | center({MANY}) | length }}}}",
    "indent": f"{{{{ 'x\\ny' | indent({MANY}) }}}}",
    "indent with text": "{{ ('x\\n' * 20000) | indent('y' * 20000) }}",
    "expandtabs": f"{{{{ ('\\t' * 2000).expandtabs({MANY}) }}}}",
    "tojson": f"{{{{ [[1]] | tojson(indent={MANY}) }}}}",
    "batch": f"{{{{ [1] | batch({MANY}, 'x') | list | length }}}}",
    "replace": "{{ ('x' * 20000).replace('x', 'y' * 20000) | length }}",
    "filter replace": "{{ ('x' * 20000) | replace('x', 'y' * 20000) | length }}",
    "join": "{{ ('y' * 20000).join(['x'] * 20000) | length }}",
    "filter join": "{{ (['x'] * 20000) | join('y' * 20000) | length }}",
    "join of what comes one by one": "{{ (['x'] * 20000) | map('upper') | join('y' * 20000) }}",
    "translate": "{{ ('x' * 20000).translate({120: 'y' * 20000}) | length }}",
    "plus": doubled("'x' * 64", "ns.x + ns.x"),
    "plus of lists": doubled("[1]", "ns.x + ns.x"),
    "tilde": doubled("'x' * 64", "ns.x ~ ns.x"),
    "nested lists": doubled("'x' * 64", "[ns.x, ns.x]", "{{ (ns.x | string) | length }}"),
    "nested lists, written": doubled("'x' * 64", "[ns.x, ns.x]", "{{ ns.x }}"),
    "nested lists, with tilde": doubled("'x' * 64", "[ns.x, ns.x]", "{{ ns.x ~ '' }}"),
    "nested lists, as JSON": doubled("'x' * 64", "{'a': ns.x, 'b': ns.x}", "{{ ns.x | tojson }}"),
    "nested lists, in values": doubled("'x'", "[ns.x, ns.x]", "{{ {'k': ns.x}.values() ~ '' }}"),
    "nested lists, in items": doubled("'x'", "[ns.x, ns.x]", "{{ {'k': ns.x}.items() }}"),
    "nested lists, in a namespace": doubled(
        "'x'", "[ns.x, ns.x]", "{% set m = namespace(x=ns.x) %}{{ (m ~ '') | length }}"
    ),
    "nested lists, compared": doubled("['a']", "[ns.x, ns.x]", "{{ ns.x == ns.y }}", TWICE),
    "written again and again": "{% set x = 'x' * 2000 %}"
    "{% for i in range(2000) %}{{ x }}{% endfor %}",
    "in a macro": "{% macro m() %}{% for i in range(99999) %}"
    + "x" * 2000
    + "{% endfor %}{% endmacro %}{{ m() | length }}",
    "products, kept": held("", "[i] * 1048576"),
    "texts, kept": held("{% set n = 1048575 %}", "'x' * (n + i % 2)"),
    "lists of a text, kept": held("{% set s = 'x' * 1048575 %}", "s | list"),
    "splits, kept": held("{% set s = 'x ' * 500000 %}", "s.split()"),
    "upper, kept": held("{% set s = 'x' * 1048575 %}", "s.upper()"),
    "slices, kept": held("{% set s = [0] * 1048575 %}", "s[1:]"),
    "work without a loop": "{% set l = [1] * 1000000 %}" + "{{ l | sum }}" * 1000,
    "keys of percent": "{{ ('%(' * 300000) % 'x' }}",
    "specs of format": "{{ ('{' ~ ':' * 300000).format('x') }}",
    "lorem ipsum": f"{{{{ lipsum({MANY}) }}}}",
    "deep": "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "very deep": "{{ " + "[" * 100_000 + "]" * 100_000 + " }}",
    "many operators": "{{ " + "- " * 30_000 + "1 }}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_template_does_little(name: str) -> None:
    """And that in its process: nothing is made here."""
    template = TemplateProcess(BOMBS[name], max_s=MAX_S, max_bytes=ROOM, memory_bytes=MEMORY)
    before = peak_bytes()
    with pytest.raises((TemplateError, WeightsError)) as caught:
        template.render(messages=[])
    assert len(str(caught.value)) < 5_000
    assert peak_bytes() < before + 16 * ROOM
    template.close()


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def test_each_prompt_that_takes_too_long_is_refused() -> None:
    """None is held against the template: whoever has a key could end it for all, with tools or
    messages that a good template takes long for."""
    template = TemplateProcess(
        "{% for one in range(n) %}{% for two in range(n) %}{% endfor %}{% endfor %}{{ n }}",
        max_s=MAX_S,
    )
    for _ in range(5):
        with pytest.raises(TemplateError, match=r"ran for more than 0\.3 s of processor time"):
            template.render(n=99_999)
        assert template.pid is None
    assert template.render(n=1) == "1"
    template.close()


def test_a_failure_leaves_the_process() -> None:
    template = TemplateProcess("{{ 1 // n }}", max_s=MAX_S)
    assert template.render(n=1) == "1"
    pid = template.pid
    for _ in range(20):
        with pytest.raises(TemplateError, match="division"):
            template.render(n=0)
    assert template.render(n=1) == "1" and template.pid == pid
    template.close()


def test_a_process_that_somebody_kills_is_replaced() -> None:
    template = TemplateProcess("{{ n }}")
    pids: set[int] = set()
    for n in range(5):
        assert template.render(n=n) == str(n)
        pids.add(kill(template))
    assert len(pids) == 5


def kill(template: TemplateProcess) -> int:
    pid = template.pid
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    wait_until_gone(pid)
    return pid


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 300
    while is_running(pid):
        assert time.monotonic() < deadline, f"{pid} still runs"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def test_the_process_knows_no_secret_and_can_open_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_SECRET", "of the node")
    monkeypatch.setenv("TZ", "UTC")
    template = TemplateProcess("{{ strftime_now('%d %b %Y') }}")
    assert template.render().endswith(str(datetime.now(UTC).year))
    folder = Path(f"/proc/{template.pid}")
    assert (folder / "environ").read_bytes() == b"TZ=UTC\0"
    assert b"of the node" not in (folder / "cmdline").read_bytes()
    limits = (folder / "limits").read_text()
    for name in ("open files", "processes", "file size", "core file size"):
        assert f"Max {name}".ljust(26) + "0".ljust(21) + "0 " in limits, name
    [line] = [line for line in limits.splitlines() if line.startswith("Max address space")]
    soft, hard = map(int, line.split()[3:5])
    size = int((folder / "statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    assert soft == hard < size + 2 * template_process.MEMORY_BYTES
    assert {os.readlink(one).partition(":")[0] for one in (folder / "fd").iterdir()} == {
        "socket",
        "/dev/null",
    }
    template.close()


ENDLESS = "{% for i in range(n) %}{% for j in range(n) %}{% endfor %}{% endfor %}"
PARENT = f"""
import threading
from penstock.gateway.template_process import TemplateProcess
template = TemplateProcess({ENDLESS!r}, max_s=1.0)
template.render(n=0)
print(template.pid, flush=True)
template.render(n=WORK)
print("rendered", flush=True)
threading.Event().wait(600)
"""


@pytest.mark.parametrize("work", [0, 99_999])
def test_a_killed_parent_leaves_no_process(work: int) -> None:
    """Nor one that is busy with a template without end: the kernel ends it."""
    words = [sys.executable, "-c", PARENT.replace("WORK", str(work))]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        if not work:
            assert parent.stdout.readline() == "rendered\n"
        parent.kill()
    wait_until_gone(pid)


FORKED = """
import os
from penstock.gateway.template_process import TemplateProcess
template = TemplateProcess("{{ n }}")
assert template.render(n=1) == "1"
pid = template.pid
forked = os.fork()
for n in range(200):
    assert template.render(n=[n, forked]) == str([n, forked])
assert (template.pid == pid) == bool(forked)
if forked:
    assert os.waitpid(forked, 0)[1] == 0
    assert template.render(n=2) == "2" and template.pid == pid
"""


def test_a_forked_process_has_one_of_its_own() -> None:
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=500)


def test_threads_get_their_own_texts() -> None:
    template = TemplateProcess("{% for one in messages %}<{{ one }}>{% endfor %}")

    def render(number: int) -> bool:
        messages = [str(number)] * (number % 7 * 1_000)
        return template.render(messages=messages) == "".join(f"<{one}>" for one in messages)

    with ThreadPoolExecutor(8) as threads:
        assert all(threads.map(render, range(200)))
    template.close()


def test_no_process_starts_before_the_first_rendering() -> None:
    template = TemplateProcess("ok")
    assert template.pid is None
    template.render()
    assert template.pid is not None
    template.close()
    assert template.pid is None


def test_a_text_has_a_size() -> None:
    template = TemplateProcess("{{ 'é' * n }}", max_bytes=1_000)
    assert template.render(n=500) == "é" * 500
    with pytest.raises(TemplateError, match="makes more than 1000 bytes"):
        template.render(n=501)
    template.close()


def test_messages_too_deep_for_json_are_refused() -> None:
    template = TemplateProcess("{{ messages }}")
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(TemplateError, match="too deeply"):
        template.render(messages=deep)
    assert template.pid is None


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
    made = TemplateProcess(source).render(messages=[message] * 2)
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
    assert TemplateProcess(source + "{{ ns.t }}").render(messages=messages) == "".join(messages)


def test_the_process_imports_little() -> None:
    code = (
        "import sys; sys.path += sys.argv[1:]; import penstock.gateway.template_worker; "
        "print(*(name for name in sys.modules if name.split('.')[0] in ('penstock', 'torch')))"
    )
    words = [sys.executable, "-I", "-S", "-c", code, *sys.path]
    made = subprocess.run(words, check=True, capture_output=True, text=True, timeout=500).stdout
    assert made.split() == ["penstock", "penstock.gateway", "penstock.gateway.template_worker"]
