"""Which results of ``cache.update`` go to attention, and nowhere else."""

from __future__ import annotations

import ast
import textwrap

import pytest

from liteboost_adaptor.engine.handed_on import is_handed_on

BODY = """
def forward(self, states, mask=None, cache=None, **kwargs):
    query, key, value = self.projected(states)
    if cache is not None:
        key, value = cache.update(key, value, self.layer_idx, kwargs=kwargs)
    attention: Callable = REGISTRY.get_interface(self.config._attn_implementation, eager)
    found, weights = attention(self, query, key, value, mask, dropout=0.0, scaling=self.scaling, **kwargs)
    found = found.reshape(*states.shape).contiguous()
    return self.o_proj(found), weights
"""
#: (what is changed in the body, into what)
SAME = {
    "as it is": ("", ""),
    "without an annotation": ("attention: Callable = ", "attention = "),
    "always updated": ("    if cache is not None:\n        key,", "    key,"),
    "another layer": ("self.layer_idx", "self.layer_idx + offset"),
}
OTHER = {
    "changed before": ("    attention:", "    key = key * 2\n    attention:"),
    "looked at before": ("    attention:", "    self.note(key)\n    attention:"),
    "something else before": ("    attention:", "    self.note()\n    attention:"),
    "used behind": ("return self", "self.seen = key\n    return self"),
    "keywords used behind": ("return self", "self.seen = kwargs\n    return self"),
    "exchanged": ("query, key, value, mask", "query, value, key, mask"),
    "twice": ("mask, dropout", "key, dropout"),
    "in a keyword, too": ("dropout=0.0", "dropout=key"),
    "of another module": ("attention(self,", "attention(other,"),
    "without keywords": (", **kwargs)\n    found =", ")\n    found ="),
    "other keywords": (", **kwargs)\n    found =", ", **others)\n    found ="),
    "other names": ("        key, value = cache", "        keys, values = cache"),
    "other arguments": ("update(key, value,", "update(key.float(), value,"),
    "one more argument": ("kwargs=kwargs)\n", "1, kwargs=kwargs)\n"),
    "no keywords": (", kwargs=kwargs)", ")"),
    "one name": ("key, value = cache", "both = cache"),
    "more in the branch": ("kwargs=kwargs)\n", "kwargs=kwargs)\n        self.note()\n"),
    "another branch": ("kwargs=kwargs)\n", "kwargs=kwargs)\n    else:\n        self.note()\n"),
    "another implementation": ("self.config._attn_implementation", "self.implementation"),
    "another function": ("REGISTRY.get_interface", "REGISTRY.pop"),
    "a function of its own": ("weights = attention(", "weights = self.attention("),
    "in a loop": (
        "    query, key, value = self",
        "    for i in range(2):\n        pass\n    query, key, value = self",
    ),
    "read by a function": ("return self", "note = lambda: None\n    return self"),
}


def answer(body: str) -> bool:
    function = ast.parse(textwrap.dedent(body)).body[0]
    assert isinstance(function, ast.FunctionDef)
    (call,) = (
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "update"
    )
    return is_handed_on(function, call.lineno, call.col_offset, "self")


@pytest.mark.parametrize("change", SAME)
def test_what_attention_alone_reads(change: str) -> None:
    before, after = SAME[change]
    assert before in BODY
    assert answer(BODY.replace(before, after, 1) if before else BODY)


@pytest.mark.parametrize("change", OTHER)
def test_what_others_read_or_might(change: str) -> None:
    before, after = OTHER[change]
    assert before in BODY
    assert not answer(BODY.replace(before, after, 1))
