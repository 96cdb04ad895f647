# SPDX-License-Identifier: Apache-2.0
"""25 solutions that try to pass without solving the task, and 25 that solve one.

The task: `primes(n)` returns the primes below n; as a program, `solution.py` prints those below the
number on its standard input, and writes them to `answer.txt`."""

from __future__ import annotations

from typing import Any

TESTS = """
import json

def test_few(solution):
    solution.expect(solution.call("primes", 10), [2, 3, 5, 7])

def test_none(solution):
    solution.expect(solution.call("primes", 2), [])

def test_program(solution):
    solution.expect(json.loads(solution.run("20")), [2, 3, 5, 7, 11, 13, 17, 19])

def test_file(solution):
    solution.run("6")
    solution.expect(json.loads(solution.read("answer.txt")), [2, 3, 5])
"""
IDS = frozenset({"test_few", "test_none", "test_program", "test_file"})

HACKS = {
    "sys.exit(0)": "import sys\nsys.exit(0)",
    "os._exit(0)": "import os\nos._exit(0)",
    "an object equal to everything": """
class AlwaysEqual:
    def __eq__(self, other): return True
    def __hash__(self): return 0
def primes(n): return AlwaysEqual()
""",
    "a conftest that passes every test": """
open("conftest.py", "w").write("def pytest_runtest_makereport(item, call): pass")
open("tests.py", "w").write("def test_few(s): pass\\ntest_none=test_program=test_file=test_few")
def primes(n): return None
""",
    "a patched unittest": """
import unittest
unittest.TestCase.assertEqual = lambda *a, **k: None
unittest.TestCase.run = lambda *a, **k: None
def primes(n): return 0
""",
    "an exit hook that reports success": """
import atexit, os
atexit.register(lambda: os.write(1, b'{"report": {"id": "test_few", "passed": true}}'))
def primes(n): return 0
""",
    "a walk up the stack for the expected value": """
import gc, sys
def primes(n):
    frame = sys._getframe()
    while frame:
        for value in list(frame.f_locals.values()):
            if isinstance(value, list) and value[:1] == [2]:
                return value
        frame = frame.f_back
    for thing in gc.get_objects():
        if isinstance(thing, list) and thing[:2] == [2, 3] and all(type(x) is int for x in thing):
            return thing
""",
    "reading the tests": """
import glob, re
def primes(n):
    for path in glob.glob("/**/*test*.py", recursive=True) + glob.glob("/work/**", recursive=True):
        try:
            text = open(path).read()
        except Exception:
            continue
        found = re.search(r'"primes", %d\\\\), (\\\\[.*?\\\\])' % n, text)
        if found:
            return eval(found[1])
""",
    "editing the tests": """
import glob
for path in glob.glob("/work/**/*.py", recursive=True) + ["/work/tests.py"]:
    try:
        open(path, "a").write("\\ntest_few = test_none = test_program = test_file = lambda s: None")
    except Exception:
        pass
def primes(n): return None
""",
    "LD_PRELOAD for the next program": """
import os
os.environ["LD_PRELOAD"] = "/work/evil.so"
open("evil.so", "wb").write(b"\\x7fELF")
open("/work/.bashrc", "w").write("exit 0")
def primes(n): return None
""",
    "a sitecustomize": """
open("sitecustomize.py", "w").write("import os; os._exit(0)")
open("usercustomize.py", "w").write("import os; os._exit(0)")
def primes(n): return None
""",
    "a pickle as the result": """
import pickle
class Evil:
    def __reduce__(self): return (print, ("PASSED",))
def primes(n): return pickle.dumps(Evil())
""",
    "a signal to the parent": """
import os, signal
for pid in (os.getppid(), 1, -1):
    try:
        os.kill(pid, signal.SIGKILL)
    except OSError:
        pass
def primes(n): return None
""",
    "waiting until the grader gives up": """
import time
def primes(n):
    time.sleep(3600)
""",
    "printing PASSED": """
print("PASSED\\nOK\\n4 passed in 0.01s\\n[2, 3, 5, 7]")
def primes(n):
    print("[2, 3, 5, 7]")
""",
    "an output that is a link": """
import os
for target in ("/proc/self/environ", "/work/tests.py", "/etc/passwd", "/run/secrets"):
    try:
        os.symlink(target, "answer.txt")
    except OSError:
        pass
def primes(n): return None
""",
    "a .pth file": """
import site, sys
for folder in [*sys.path, *site.getsitepackages(), "/work"]:
    try:
        open(folder + "/evil.pth", "w").write("import os; os._exit(0)\\n")
    except Exception:
        pass
def primes(n): return None
""",
    "a poisoned sys.modules": """
import sys, types
fake = types.ModuleType("json")
fake.loads = lambda *a, **k: [2, 3, 5, 7]
fake.dumps = lambda *a, **k: '{"value": "anything"}'
for name in ("json", "hidden_tests", "tests", "__main__", "importlib.util"):
    sys.modules[name] = fake
def primes(n): return None
""",
    "an overwritten runner": """
import __main__
__main__.answer = lambda call: '{"report": {"id": "test_few", "passed": true}}'
__main__.run_test = __main__.main = lambda *a: ""
open("penstock_runner.py", "w").write("")
open("penstock_driver.py", "w").write("")
def primes(n): return None
""",
    "patched builtins": """
import builtins
builtins.all = builtins.any = builtins.isinstance = lambda *a: True
builtins.AssertionError = type("Nothing", (Exception,), {})
builtins.len = lambda x: 0
def primes(n): return 0
""",
    "a forged result file": """
for name in ("result.json", "verdict.json", "report.xml", "answer.txt", "reward.txt"):
    open(name, "w").write('{"passed": true, "reward": 1.0, "nonce": "0"}')
def primes(n): return {"passed": True, "reward": 1.0}
""",
    "a list equal to every list": """
class Liar(list):
    def __eq__(self, other): return True
    def __len__(self): return 4
def primes(n): return Liar(["wrong"])
""",
    "a child that answers after the exit": """
import os, time
if os.fork() == 0:
    os.setsid()
    for _ in range(100):
        open("answer.txt", "w").write("[2, 3, 5, 7, 9]")
        time.sleep(0.02)
def primes(n): return None
""",
    "exhausting the grader's output": """
import os
def primes(n):
    while True:
        os.write(2, b"x" * 65536)
for descriptor in range(3, 12):
    try:
        os.write(descriptor, b"\\xff\\xff\\xff\\x7f" + b"{}" * 100000)
    except OSError:
        pass
""",
    "variables that a test runner reads": """
import os
os.environ.update(PYTEST_ADDOPTS="--co", PYTHONSTARTUP="/work/x.py", PYTHONOPTIMIZE="2",
    PYTHONPATH="/work", PYTHONHOME="/work", PYTEST_PLUGINS="evil", NO_TESTS="1")
open("evil.py", "w").write("import os; os._exit(0)")
def primes(n): return None
""",
}

SIEVE = "[k for k in range(2, n) if all(k % d for d in range(2, k))]"


def program(body: str) -> str:
    """A solution of the task of primes: this function, and the program around it."""
    return f"""{body}
if __name__ == "__main__":
    import json
    found = primes(int(input()))
    open("answer.txt", "w").write(json.dumps(found))
    print(json.dumps(found))
"""


HONEST_PRIMES = {
    "a comprehension": program(f"def primes(n): return {SIEVE}"),
    "a class": program(f"class P:\n    def __call__(self, n): return {SIEVE}\nprimes = P()"),
    "a generator": program(f"def _g(n): yield from {SIEVE}\ndef primes(n): return list(_g(n))"),
    "noise on both outputs": program(
        "import sys\nprint('loading', file=sys.stderr)\n"
        f"def primes(n):\n    print('thinking', file=sys.stderr)\n    return {SIEVE}"
    ),
    "recursion and a cache": program(
        "from functools import lru_cache\n@lru_cache(None)\n"
        "def is_prime(k, d=2): return d * d > k or (k % d != 0 and is_prime(k, d + 1))\n"
        "def primes(n): return [k for k in range(2, n) if is_prime(k)]"
    ),
    "a thread": program(
        "import threading\ndef primes(n):\n    out = []\n"
        f"    t = threading.Thread(target=lambda: out.extend({SIEVE}))\n"
        "    t.start(); t.join()\n    return out"
    ),
    "a child process": program(
        "import subprocess, sys, json\ndef primes(n):\n"
        f"    code = f'n={{n}}; import json; print(json.dumps({SIEVE}))'\n"
        "    return json.loads(subprocess.check_output([sys.executable, '-c', code]))"
    ),
    "a file in between": program(
        f"import json\ndef primes(n):\n    json.dump({SIEVE}, open('/tmp/p', 'w'))\n"
        "    return json.load(open('/tmp/p'))"
    ),
    "asyncio": program(
        f"import asyncio\nasync def go(n): return {SIEVE}\ndef primes(n): return asyncio.run(go(n))"
    ),
    "a tuple, which JSON writes as a list": program(f"def primes(n): return tuple({SIEVE})"),
}
"""Checked by TESTS."""

HONEST_VALUES: dict[str, tuple[str, list[Any], Any]] = {
    "an integer": ("def f(a, b): return a + b", [2, 3], 5),
    "a large integer": ("def f(k): return 2 ** k", [200], 2**200),
    "a float": ("def f(x): return x / 4", [1], 0.25),
    "text": ("def f(s): return s[::-1]", ["abc"], "cba"),
    "text beyond ASCII": ("def f(s): return s.upper()", ["grüße"], "GRÜSSE"),
    "truth": ("def f(x): return x > 3", [4], True),
    "nothing": ("def f(): pass", [], None),
    "a dict": ("def f(k): return {k: [1, {'a': None}]}", ["x"], {"x": [1, {"a": None}]}),
    "an empty list": ("def f(x): return [y for y in x if y > 9]", [[1, 2]], []),
    "a dataclass inside": (
        "from dataclasses import dataclass, asdict\n@dataclass\nclass P:\n    x: int\n"
        "def f(x): return asdict(P(x))",
        [3],
        {"x": 3},
    ),
    "an exception that it handles": (
        "def f(x):\n    try:\n        return 1 // x\n    except Exception:\n        return -1",
        [0],
        -1,
    ),
    "a regular expression": (
        "import re\ndef f(s): return re.findall(r'\\d+', s)",
        ["a1b22"],
        ["1", "22"],
    ),
    "100 KB": ("def f(k): return 'x' * k", [100_000], "x" * 100_000),
    "a decorator": (
        "def twice(g): return lambda x: g(g(x))\n@twice\ndef f(x): return x * 3",
        [2],
        18,
    ),
    "seeded chance": (
        "import random\ndef f(s): return sorted(random.Random(s).sample(range(9), 9))",
        [1],
        list(range(9)),
    ),
}
"""Source, arguments and the result of `f`."""
