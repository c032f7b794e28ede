"""Test edits: anchors match by syntax and exactly once, and an error names the anchor that does not fit."""

import pytest

from vllm_kv_checksum.edits import AnchorError, Module, assign

SOURCE = '''"""A module."""
import os
from sys import (
    argv,
)


# Boxes.
class Box:
    """Holds."""

    size: int = 1
    """How much."""

    @property
    def full(self):
        # why
        if self.size > 1:
            self.size = wide(
                k=1,
            )  # trailing
        for x in argv:
            print(x)
        size = make(a=1)
        size = make(a=1, b=2)
        return False

    def twice(self):
        a = 1
        a = 1


import late
'''


def edit(make) -> str:
    module = Module("m.py")
    make(module)
    return module.apply(SOURCE)


def in_full(kind, *args, **kwargs):
    def make(module):
        with module.function("Box.full") as f:
            getattr(f, kind)(*args, **kwargs)

    return make


def test_a_keyword_argument_joins_the_one_call():
    got = edit(in_full("keyword", "wide", "b=2"))
    assert (
        "                k=1,\n                b=2,\n            )  # trailing" in got
    )
    with pytest.raises(AnchorError, match="0 calls"):
        edit(in_full("keyword", "nobody", "b=2"))


def test_definitions_stand_in_front_of_another_and_its_comment():
    got = edit(lambda m: m.define("Box", "class New:\n    pass"))
    assert ")\n\n\nclass New:\n    pass\n\n\n# Boxes.\nclass Box:" in got


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (in_full("before", "return False", "new()"), "new()\n        return False"),
        (
            in_full("before", "return False", "if a:\n    b()"),
            "if a:\n            b()\n",
        ),
        (
            in_full("after", assign("self.size"), "new()"),
            "# trailing\n            new()\n        for",
        ),
        (
            in_full("after", "if self.size > 1:", "new()"),
            "# trailing\n        new()\n        for",
        ),
        (
            in_full("after", assign("size", keyword="b"), "new()"),
            "b=2)\n        new()\n        return",
        ),
        (
            in_full("before", "for x in argv:", "new()"),
            "new()\n        for x in argv:",
        ),
        (in_full("prepend", "new()"), "new()\n        # why\n        if self.size"),
        (
            in_full("before", "if self.size > 1:", "new()"),
            "new()\n        # why\n        if self.size",
        ),
        (
            in_full("before", "return False", "\n        new()\n\n        "),
            "new()\n\n        return",
        ),
        (lambda m: m.imports("import json"), "import json\nimport os\nfrom sys"),
    ],
)
def test_places(make, expected):
    assert expected in edit(make)


def test_class_bodies_and_docstrings():
    def make(module):
        with module.cls("Box") as c:
            c.after(assign("size"), "other = 2", past_docstring=True)
            c.prepend("first = 0")

    edited = edit(make)
    assert '"""How much."""\n    other = 2\n' in edited
    assert '"""Holds."""\n\n    first = 0\n    size' in edited


def test_a_method_stands_last_in_its_class_behind_a_blank_line():
    def make(module):
        with module.cls("Box") as c:
            c.method("""
                def thrice(self):
                    return 3

                """)
            c.method("def more(self): ...")

    expected = (
        "        a = 1\n\n    def thrice(self):\n        return 3\n\n"
        "    def more(self): ...\n\n\nimport late\n"
    )
    assert edit(make).endswith(expected)


def test_edits_at_one_place_keep_their_order():
    def make(module):
        with module.function("Box.full") as f:
            f.before("return False", "one()")
            f.before("return False", "two()")

    assert "one()\n        two()\n        return" in edit(make)


@pytest.mark.parametrize(
    ("scope", "anchor", "number"),
    [
        ("Box.full", "return True", "0"),
        ("Box.twice", "a = 1", "2"),
        ("Box.full", assign("size"), "2"),
        ("Box.full", assign("size", keyword="c"), "0"),
    ],
)
def test_an_anchor_must_match_once(scope, anchor, number):
    def make(module):
        with module.function(scope) as f:
            f.before(anchor, "new()")

    with pytest.raises(AnchorError) as error:
        edit(make)
    for part in ("m.py", scope, anchor, f"{number} statements", "0.33.0"):
        assert part in str(error.value)


@pytest.mark.parametrize(
    ("version", "made"),
    [
        ("0.31.2", "below"),
        ("0.32.0+cpu", "below"),
        ("0.33.0rc1", "since"),
        ("0.33.0", "since"),
        ("0.100", "since"),
        ("unknown", "since"),
    ],
)
def test_an_edit_may_depend_on_the_version(version, made):
    module = Module("m.py")
    with module.function("Box.full", since="0.33.0") as f:
        f.before("return False", "since()")
    with module.function("Box.full", below="0.33.0") as f:
        f.before("return False", "below()")
    edited = module.apply(SOURCE, version)
    assert [n for n in ("since", "below") if f"{n}()" in edited] == [made]


def test_a_scope_must_exist():
    def make(module):
        with module.function("Box.absent") as f:
            f.prepend("new()")

    with pytest.raises(AnchorError, match="Box.absent is defined 0 times"):
        edit(make)


def test_a_result_that_does_not_compile_is_refused():
    with pytest.raises(SyntaxError):
        edit(in_full("before", "return False", "if:"))


def test_inner_after_comes_before_outer_before():
    source = "def f():\n    if a:\n        b()\n    c()\n"
    module = Module("m.py")
    with module.function("f") as f:
        f.before("c()", "outer()")
        f.after("b()", "inner()")
    expected = (
        "def f():\n    if a:\n        b()\n        inner()\n    outer()\n    c()\n"
    )
    assert module.apply(source) == expected


def test_files_without_imports_async_scopes_and_form_feeds():
    module = Module("m.py")
    with module.function("f") as f:
        f.before("b()", "new()")
    source = 'x = """\x0c"""\nasync def f():\n    b()'
    assert module.apply(source) == 'x = """\x0c"""\nasync def f():\n    new()\n    b()'
