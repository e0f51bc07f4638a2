import functools
import importlib.metadata
import subprocess
import sys
from pathlib import Path

import pytest

from burnish.ref import Ref, RefError, check_signature

ROOT = Path(__file__).parents[2]

IDEAS = '''\
"""Parts of a user."""
from pathlib import Path

LIMIT = 3

def soft_gate(logp_cur, logp_gen, adv, *, temperature: float):
    return (logp_cur - logp_gen) * adv / temperature

class Guess:
    def __init__(self, high=10):
        self.high = high
'''


@pytest.fixture
def here(tmp_path, monkeypatch):
    """A folder with the user's files, which is the current one. Its modules are forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_ideas.py").write_text(IDEAS)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def refused(ref: Ref, **kwargs) -> str:
    with pytest.raises(RefError) as caught:
        ref.bind(**kwargs)
    return str(caught.value)


# --- parse, of, dump

def test_parse_and_dump_are_inverse():
    for raw in ("ppo_clip", "my:f", {"ref": "my.py:f", "x": [1, {"y": None}]}):
        assert Ref.parse(raw).dump() == raw
    assert Ref.parse({"ref": "a"}).dump() == "a"
    assert Ref.parse(Ref("a")) == Ref("a")
    assert Ref.parse(check_signature) == Ref("burnish.ref:check_signature")


@pytest.mark.parametrize(("raw", "told"), [
    ({"length": 3}, "needs the key `ref`"), ({"ref": 3}, "needs the key `ref`"),
    (3, "expected an import path"), (None, "expected an import path"),
    ("", "an empty text is no import path"), ("  ", "an empty text is no import path"), (["a"], "expected an import path"),
])
def test_parse_refuses(raw, told):
    with pytest.raises(ValueError, match=told):
        Ref.parse(raw)


def test_values_cannot_hide_the_path():
    with pytest.raises(ValueError, match="cannot be a value's name"):
        Ref("a:b", {"ref": "c:d"})


def test_of_a_function_comes_back_as_that_function():
    assert Ref.of(check_signature).load() is check_signature
    partial = functools.partial(check_signature, provided=("a",))
    assert Ref.of(partial, path="p") == Ref("burnish.ref:check_signature", {"provided": ("a",), "path": "p"})


def test_of_refuses_what_cannot_be_named():
    def nested():
        pass

    for fn in (nested, lambda: 1, Ref.load):
        with pytest.raises(ValueError, match="is nested"):
            Ref.of(fn)
    with pytest.raises(ValueError, match="is an object, not a function"):
        Ref.of(Ref("a"))
    with pytest.raises(ValueError, match="give them by name"):
        Ref.of(functools.partial(check_signature, "path"))


def test_of_a_function_that_came_from_a_file_names_the_file(here):
    fn = Ref("my_ideas.py:soft_gate").load()
    assert Ref.of(fn) == Ref(f"{here / 'my_ideas.py'}:soft_gate")
    assert Ref.of(fn).load() is fn


# --- load

def test_load_by_module_by_file_and_by_room(here):
    assert Ref("my_ideas:soft_gate").load().__module__ == "my_ideas"
    by_file = Ref("my_ideas.py:soft_gate").load()
    assert by_file is Ref(str(here / "my_ideas.py") + ":soft_gate").load()
    assert Ref("check_signature").load(room="burnish.ref") is check_signature
    assert Ref("my_ideas:Guess", {"high": 3}).bind()().high == 3


def test_files_of_one_name_in_different_folders_stay_apart(here):
    for folder, name, value in (("a", "b_c.py", 1), ("a_b", "c.py", 2), ("x", "same.py", 3), ("y", "same.py", 4)):
        (here / folder).mkdir(exist_ok=True)
        (here / folder / name).write_text(f"def f(): return {value}\n")
    assert [Ref(f"{p}:f").load()() for p in ("a/b_c.py", "a_b/c.py", "x/same.py", "y/same.py")] == [1, 2, 3, 4]


def test_a_file_finds_the_files_beside_it(here):
    (here / "sub").mkdir()
    (here / "sub" / "beside_it.py").write_text("VALUE = 7\n")
    (here / "sub" / "part.py").write_text("from beside_it import VALUE\ndef f(): return VALUE\n")
    assert Ref("sub/part.py:f").load()() == 7


def test_a_file_that_fails_once_is_read_again_when_it_is_mended(here):
    (here / "late.py").write_text("raise RuntimeError('not yet')\n")
    assert "not yet" in refused(Ref("late.py:f"))
    (here / "late.py").write_text("def f(): return 'mended at last'\n")
    assert Ref("late.py:f").load()() == "mended at last"


def test_the_running_script_is_not_imported_twice(here):
    script = here / "script.py"
    script.write_text(
        "from burnish.ref import Ref\n"
        "print('top of the script')\n"
        "def reward(rollout, task): return 1.0\n"
        "ref = Ref.of(reward)\n"
        "assert ref.path == __file__ + ':reward', ref\n"
        "assert ref.load() is reward\n"
    )
    ran = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True, env={"PYTHONPATH": str(ROOT)})
    assert ran.stdout == "top of the script\n"
    code = "from burnish.ref import Ref\ndef f(): pass\nRef.of(f)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert "put it in a file and import it" in ran.stderr


@pytest.mark.parametrize(("path", "told"), [
    ("my_ideas:soft_gat", "my_ideas:soft_gat: my_ideas has no 'soft_gat'; did you mean 'soft_gate'?"),
    ("my_ideas:zzz", "my_ideas:zzz: my_ideas has no 'zzz'; it has soft_gate, Guess"),
    ("my_ideas:LIMIT", "my_ideas:LIMIT is a int, not a function or class"),
    ("my_idea:f", "cannot import my_idea:f: ModuleNotFoundError: No module named 'my_idea'; did you mean my_ideas?"),
    ("nowhere_at_all:f", "No module named 'nowhere_at_all' (looked in "),
    ("my_idea.py:f", "my_idea.py; did you mean my_ideas.py?"),
    ("no/such/folder.py:f", "FileNotFoundError: no such file: "),
    (":f", "cannot import :f: ValueError"),
    ("soft_gate", "'soft_gate' is no import path; write module:name or file.py:name"),
])
def test_what_does_not_load(here, path, told):
    assert told in refused(Ref(path))


def test_a_file_here_that_another_module_hides(here):
    (here / "colorsys.py").write_text("def mine(): return 1\n")
    assert refused(Ref("colorsys:mine")).endswith("colorsys.py. For the file here write colorsys.py:mine")
    assert Ref("colorsys.py:mine").load()() == 1


def test_short_names_are_hinted_at(here):
    told = refused(Ref("check_signatur"), room="burnish.ref")
    assert told == "check_signatur: burnish.ref has no 'check_signatur'; did you mean 'check_signature'?"
    told = refused(Ref("my_ideas.soft_gate"), room="burnish.ref")
    assert "for a function of your own write my_ideas:soft_gate; shipped are " in told and "Path" not in told


@pytest.mark.parametrize(("code", "told"), [
    ("x = 1\nx = 1 / 0\n", "ZeroDivisionError: division by zero (broken.py:2)"),
    ("def f(:\n", "SyntaxError: invalid syntax (broken.py, line 1)"),
    ("import sys\n\nsys.exit('usage')\n", "SystemExit: usage (broken.py:3)"),
    ("import no_such_library\n", "No module named 'no_such_library' (broken.py:1)"),
])
@pytest.mark.parametrize("path", ["broken:f", "broken.py:f"])
def test_code_that_raises_while_it_is_imported(here, code, told, path):
    (here / "broken.py").write_text(code)
    assert told in refused(Ref(path)).replace(f"{here}/", "")


def test_a_part_of_an_installed_package_by_its_entry_point(here, monkeypatch):
    info = here / "other-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[burnish.parts]\ngate = my_ideas:soft_gate\ncheck_signature = my_ideas:soft_gate\n")
    monkeypatch.syspath_prepend(str(here))
    importlib.invalidate_caches()
    assert Ref("gate").load(room="burnish.ref").__name__ == "soft_gate"
    assert Ref("gate").load().__name__ == "soft_gate"
    assert Ref("check_signature").load(room="burnish.ref") is check_signature, "a shipped part is not replaced by installing a package"


# --- bind

COLUMNS = ("logp_cur", "logp_gen", "adv")


def test_bind_fills_in_the_values(here):
    fn = Ref("my_ideas:soft_gate", {"temperature": 2.0}).bind(provided=COLUMNS)
    assert fn(logp_cur=3.0, logp_gen=1.0, adv=4.0) == 4.0


@pytest.mark.parametrize(("values", "provided", "told"), [
    ({"temprature": 1.0}, COLUMNS,
     "takes no ['temprature']; it takes ['logp_cur', 'logp_gen', 'adv', 'temperature']; did you mean 'temperature'?"),
    ({}, COLUMNS, "needs ['temperature'], which neither the recipe nor this place provides"),
    ({"temperature": 1.0}, ("logp_cur",), "needs ['logp_gen', 'adv']"),
    ({"temperature": 1.0, "adv": 3}, COLUMNS, "['adv'] are passed by the caller"),
])
def test_bind_checks_names(here, values, provided, told):
    assert told in refused(Ref("my_ideas:soft_gate", values), provided=provided)


def test_signatures_of_every_kind():
    def any_names(a, **rest): ...
    def positional(a, b, /): ...
    def with_default(a, b=1, *rest): ...

    check_signature("p", any_names, {"x": 1, "y": 2}, ["a"])
    check_signature("p", with_default, {}, ["a"])
    check_signature("p", positional, {}, ["a", "b"])
    with pytest.raises(RefError, match="by position only"):
        check_signature("p", positional, {"b": 1}, ["a"])
    with pytest.raises(RefError, match=r"takes no \['rest'\]"):
        check_signature("p", with_default, {"rest": 1}, ["a"])
    with pytest.raises(RefError, match=r"needs \['a'\]"):
        check_signature("p", any_names, {}, [])
    with pytest.raises(RefError, match="does not tell which arguments it takes"):
        check_signature("p", dict, {}, [])
