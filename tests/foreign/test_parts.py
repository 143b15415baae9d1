"""The comparison sees what it is there to see; what PEFT's tests load is there to be loaded."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import ClassVar

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from foreign import compare, sources, stand_ins, table
from foreign.check import check
from foreign.compare import RERUNS, differences, settle
from foreign.run import Broken, Result, Run, read, run
from foreign.suites import Suite


def run_of(level, **outcomes):
    return Run(level, {test: Result(outcome, f"why {test}") for test, outcome in outcomes.items()})


class TestDifferences:
    def test_failures_in_both_are_not_ours(self):
        assert differences(run_of(None, a="failed", b="passed"), run_of(2, a="failed", b="passed")) == []

    def test_a_new_failure_is(self):
        assert differences(run_of(None, a="passed"), run_of(2, a="failed")) == ["a"]

    def test_a_test_that_fails_where_it_was_skipped_is(self):
        assert differences(run_of(None, a="skipped"), run_of(2, a="failed")) == ["a"]

    def test_a_test_that_no_longer_runs_is(self):
        assert differences(run_of(None, a="passed", b="passed"), run_of(2, a="skipped")) == ["a", "b"]

    def test_a_failure_that_we_remove_is_not(self):
        assert differences(run_of(None, a="failed"), run_of(2, a="passed")) == []


class TestVerdicts:
    @staticmethod
    def verdict(fails):
        """The verdict on a test that fails where ``fails(level, seed)``."""

        def again(level, seed, tests):
            return run_of(level, **{test: "failed" if fails(level, seed) else "passed" for test in tests})

        (verdict,) = settle(run_of(None, a="passed"), run_of(1, a="failed"), again)
        return verdict

    def test_a_failure_with_every_seed_is_ours(self):
        verdict = self.verdict(lambda level, seed: level == 1)
        assert (verdict.without, verdict.with_us, verdict.is_ours) == (0, RERUNS, True)

    def test_a_failure_that_does_not_come_back_is_still_ours(self):
        assert self.verdict(lambda level, seed: False).is_ours

    def test_a_failure_with_some_seeds_both_ways_is_not(self):
        assert not self.verdict(lambda level, seed: seed % 2 == 0).is_ours

    def test_a_failure_that_is_rare_without_us_is_ours(self):
        assert self.verdict(lambda level, seed: level == 1 or seed == 1).is_ours

    def test_the_document_names_it(self):
        verdict = self.verdict(lambda level, seed: level == 1)
        runs = {None: run_of(None, a="passed"), 1: run_of(1, a="failed")}
        entry = table.Entry("suite", "here", runs=runs, verdicts={1: [verdict]})
        assert f"at level 1: **ours**; of {RERUNS} more runs 0 did not pass" in table.document([entry])
        assert "| **all** | level 1 | 1 | 0 | 1 | 0 | 1 | 0 | 0 |" in table.document([entry])


class TestRecord:
    DONE: ClassVar = {"test": "a", "outcome": "passed", "reason": "", "served": 3}

    @staticmethod
    def lines(*entries):
        return [json.dumps(entry) for entry in entries]

    def test_a_crash_fails_the_test_it_hit(self):
        crashed = read(self.lines({"started": "a"}, self.DONE, {"started": "b"}), 2, -11)
        assert crashed.failures == {"b"}
        assert "status -11" in crashed.results["b"].reason

    def test_an_end_between_tests_is_no_run(self):
        with pytest.raises(Broken, match="status 3"):
            read(self.lines({"started": "a"}, self.DONE), 2, 3)

    @pytest.mark.parametrize(("level", "imported"), [(None, True), (1, False)])
    def test_the_package_is_there_only_when_asked_for(self, level, imported):
        with pytest.raises(Broken, match="imported"):
            read(self.lines({"finished": 0, "served": {}, "imported": imported}), level, 0)


TESTS = """
import sys
import unittest
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

NAME = "trl-internal-testing/tiny-random-LlamaForCausalLM"

def test_runs_a_hub_model():
    model = AutoModelForCausalLM.from_pretrained(NAME)
    with torch.no_grad():
        assert model(torch.arange(5)[None]).logits.shape[-1] == model.config.vocab_size

def test_fails():
    assert torch.rand(()) > 1

def test_finds_the_packages_of_the_checkout():
    import comes_with_the_checkout

def test_does_not_like_us():
    assert "liteboost_adaptor" not in sys.modules

@pytest.mark.skip(reason="not today")
def test_is_skipped():
    pass

class SubTests(unittest.TestCase):
    def test_one_of_several(self):
        for i in range(3):
            with self.subTest(i=i):
                self.assertNotEqual(i, 1)
"""


@pytest.fixture
def work(tmp_path, monkeypatch):
    """A work folder of its own, with the stand-in that `TESTS` loads."""
    monkeypatch.setattr(sources, "WORK", tmp_path)
    monkeypatch.setattr(compare, "RERUNS", 1)
    name = "trl-internal-testing/tiny-random-LlamaForCausalLM"
    monkeypatch.setattr(stand_ins, "MODELS", {name: stand_ins.MODELS[name]})
    return tmp_path


@pytest.mark.full
def test_a_whole_run(work):
    (work / "tree" / "tests").mkdir(parents=True)
    (work / "tree" / "tests" / "test_them.py").write_text(TESTS)
    packages = work / "packages"
    packages.mkdir()
    (packages / "comes_with_the_checkout.py").touch()
    suite = Suite("planted", lambda: sources.Tree(work / "tree", "here", packages), ("tests",))
    entry = check(suite, [2])
    name = "tests/test_them.py::"
    without, with_us = entry.runs[None], entry.runs[2]
    assert {t.removeprefix(name): r.outcome for t, r in without.results.items()} == {
        "test_runs_a_hub_model": "passed",
        "test_fails": "failed",
        "test_finds_the_packages_of_the_checkout": "passed",
        "test_does_not_like_us": "passed",
        "test_is_skipped": "skipped",
        "SubTests::test_one_of_several": "failed",
    }
    assert not without.served
    assert with_us.results[f"{name}test_runs_a_hub_model"].served > 0
    assert with_us.code == sources.code_under_test()
    assert [verdict.test for _, verdict in entry.ours] == [f"{name}test_does_not_like_us"]
    assert run(suite, suite.tree(), 2, reuse=True).results == with_us.results


def test_the_document_says_which_code_was_run():
    old, new = Run(1, {}, code="commit a"), Run(2, {}, code="commit b")
    entries = [table.Entry("one", runs={None: run_of(None), 2: new}), table.Entry("two", runs={2: new})]
    assert "\nThis package: commit b.\n" in table.document(entries)
    entries[1].runs[1] = old
    text = table.document(entries)
    assert "\nThis package: commit b for one level 2, two level 2.\n" in text
    assert "\nThis package: commit a for two level 1.\nNot run yet: one level 1, two without.\n" in text


def test_stand_ins_are_what_their_names_say(tmp_path, monkeypatch):
    monkeypatch.setattr(stand_ins, "MODELS", {"facebook/opt-125m": "opt"})
    cache = stand_ins.make_cache(tmp_path)
    model = AutoModelForCausalLM.from_pretrained("facebook/opt-125m", cache_dir=cache)
    tokenizer = AutoTokenizer.from_pretrained("facebook/opt-125m", cache_dir=cache)
    assert model.config.model_type == "opt"
    assert tokenizer.decode(tokenizer("two words").input_ids) == "two words"
    said = tokenizer.apply_chat_template([{"role": "user", "content": "two words"}], tokenize=False)
    assert said == "user: two words\n"
    assert len(tokenizer) <= model.config.vocab_size


def test_stand_ins_of_an_earlier_version_are_made_anew(work):
    (name,) = stand_ins.MODELS
    main = stand_ins.make_cache(work / "hub") / f"models--{name.replace('/', '--')}" / "refs" / "main"
    made = main.read_text()
    written = main.stat().st_mtime_ns
    stand_ins.make_cache(work / "hub")
    assert main.stat().st_mtime_ns == written
    main.write_text("an earlier one")
    stand_ins.make_cache(work / "hub")
    assert main.read_text() == made


class TestSources:
    def test_a_checkout_without_tests_is_refused(self, tmp_path, monkeypatch):
        monkeypatch.setenv(sources.CHECKOUT_VARIABLE, str(tmp_path))
        with pytest.raises(sources.Unavailable, match="has no tests"):
            sources.transformers_model_tests()

    def test_a_checkout_of_another_version_has_its_own_packages(self, work, monkeypatch):
        checkout = work / "checkout"
        files = ("tests/causal_lm_tester.py", "utils/a.py", "src/transformers/__init__.py", "conftest.py")
        for name in files:
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_text('__version__ = "4.99.0"')
        installed: list[str] = []

        def pip(command: list[str], what: str) -> subprocess.CompletedProcess[str]:
            assert (Path(command[-1]) / "src/transformers/__init__.py").exists()
            Path(command[-1], "build").mkdir()  # as pip does
            installed.append(command[-1])
            Path(command[command.index("--target") + 1]).mkdir()
            return subprocess.CompletedProcess(command, len(installed) > 2, "", "no such release\n")

        monkeypatch.setenv(sources.CHECKOUT_VARIABLE, str(checkout))
        monkeypatch.setattr(sources, "_run", pip)
        sources.transformers_model_tests.cache_clear()
        tree = sources.transformers_model_tests()
        assert (tree.folder / "src/transformers/__init__.py").exists() and tree.packages.is_dir()
        assert tree.origin == "checkout of 4.99.0 (commit unknown), run in its own transformers"
        sources.transformers_model_tests.cache_clear()
        sources.transformers_model_tests()  # of no known commit: it may be another
        assert len(installed) == 2 and not (checkout / "build").exists()
        sources.transformers_model_tests.cache_clear()
        with pytest.raises(sources.Unavailable, match="said: no such release"):
            sources.transformers_model_tests()
        sources.transformers_model_tests.cache_clear()

    def test_what_was_tried_is_said(self, work, monkeypatch):
        monkeypatch.delenv(sources.CHECKOUT_VARIABLE, raising=False)
        monkeypatch.setattr(sources, "REPOSITORY", str(work / "nowhere"))
        entry = check(Suite("models", sources.transformers_model_tests, ()), [1])
        assert "TRANSFORMERS_SOURCE is not set" in entry.unavailable
        assert "not run, no checkout" in table.document([entry])

    def test_a_stub_stands_for_mixins_and_skips_users(self, tmp_path):
        names: dict = {"__name__": "left_out"}
        exec(sources.STUB, names)
        assert issubclass(type("Tests", (names["__getattr__"]("AnyMixin"),), {}), object)
        with pytest.raises(Exception, match="run_distributed is not in the source distribution"):
            names["__getattr__"]("run_distributed")()

    def test_the_code_is_named_by_the_commit_that_changed_it(self, tmp_path, monkeypatch):
        def git(*command: str) -> str:
            settings = ["-c", "user.name=a", "-c", "user.email=b@c", "-c", "commit.gpgsign=false"]
            done = subprocess.run(
                ["git", "-C", str(tmp_path), *settings, *command], check=True, capture_output=True, text=True
            )
            return done.stdout.strip()

        def commit(name: str) -> None:
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text("")
            git("add", ".")
            git("commit", "--quiet", "--message", name)

        monkeypatch.setattr(sources, "ROOT", tmp_path)
        git("init", "--quiet")
        assert sources.code_under_test() == "commit unknown"
        commit("kernels/code.cpp")
        named = f"commit {git('rev-parse', 'HEAD')[:12]}"
        commit("docs/result.md")
        assert sources.code_under_test() == named
        (tmp_path / "kernels/code.cpp").write_text("changed")
        assert sources.code_under_test() == f"{named} with local changes"
