"""Test that a file of finished cases is used only for the same evaluation."""

from __future__ import annotations

import dataclasses
import functools
import json
import subprocess
import sys
import warnings

import pytest
import torch

import lens_mix as lm
from lens_mix._care import identity
from lens_mix._care.state import all_modules
from lens_mix.evaluation import Case, Importance
from tests import tiny_models
from tests._care.test_users_hooks import Noting, containing_itself, with_a_noting_module
from tests.evaluation.test_leaderboard import OCCLUSION, prompts
from tests.matrix import build_or_skip
from tests.source_tree import ROOT

SENTENCE = r"resume: expected .*; give another path, or delete the file to start again$"


@pytest.fixture
def own():
    """Return a model that the test may change."""
    return build_or_skip(tiny_models.gpt2_like)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "board.jsonl"


def evaluated(model, path, **changes):
    asked = {
        "task": Importance(prompts(model, 3), OCCLUSION),
        "methods": "attention",
        "aggregations": ["mean"],
        **changes,
    }
    return lm.evaluate(
        model, asked.pop("task"), asked.pop("methods"), asked.pop("aggregations"), resume=path, **asked
    )


def no_more_cases(monkeypatch):
    def scores(self, model, case, candidates, **options):
        raise AssertionError("a case was computed again")

    monkeypatch.setattr(Importance, "scores", scores)


def test_the_same_evaluation_is_read(own, path, monkeypatch):
    whole = evaluated(own, path)
    no_more_cases(monkeypatch)
    assert evaluated(own, path).records == whole.records
    # In another process the model's weights have other addresses.
    assert evaluated(tiny_models.gpt2_like(), path, max_memory=10**9).records == whole.records


# ------------------------------------------------------------------ another evaluation


def one_weight(model):
    with torch.no_grad():
        next(iter(model.parameters())).view(-1)[-1] += 1e-7


def one_weight_by_data(model):
    list(model.parameters())[-1].data[0] += 1


def one_buffer(model):
    module = next(iter(model.modules()))
    module.register_buffer("further", torch.ones(1))


def a_setting(model):
    norm = next(module for module in model.modules() if isinstance(getattr(module, "eps", None), float))
    norm.eps *= 2


def a_hook(model):
    name = next(name for name in model.hook_dict if name.endswith(("hook_v", "v.hook_out")))
    model.add_hook(name, lambda tensor, hook: tensor * 0.5)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (one_weight, "weights"),
        (one_weight_by_data, "weights"),
        (one_buffer, "weights"),
        (lambda model: model.to(torch.float32), "dtype, weights"),
        (a_setting, "settings"),
        (a_hook, "hooks"),
    ],
)
def test_another_model_of_that_name_is_refused(own, path, change, named):
    own.to(torch.float64)
    evaluated(own, path)
    before = path.read_text()
    change(own)
    with pytest.raises(ValueError, match=SENTENCE) as refused:
        evaluated(own, path)
    for name in named.split(", "):
        assert name in str(refused.value)
    assert path.read_text() == before


def test_hooks_that_differ_in_what_they_hold_are_told_apart(own, path):
    def scaling(factor):
        return lambda tensor, hook: tensor * factor

    name = next(name for name in own.hook_dict if name.endswith(("hook_v", "v.hook_out")))
    own.add_hook(name, scaling(0.5))
    evaluated(own, path)
    own.reset_hooks()
    own.add_hook(name, scaling(0.25))
    with pytest.raises(ValueError, match="differs in hooks"):
        evaluated(own, path)
    own.reset_hooks()
    own.add_hook(name, scaling(0.5))
    evaluated(own, path)


def test_the_place_of_a_hook_counts(own, path):
    def halved(module, arguments, output):
        return output * 0.5

    modules = [module for module in own.modules() if isinstance(module, torch.nn.LayerNorm | torch.nn.Linear)]
    modules = modules or list(own.blocks)
    hook = modules[0].register_forward_hook(halved)
    evaluated(own, path)
    hook.remove()
    hook = modules[-1].register_forward_hook(halved)
    with pytest.raises(ValueError, match="differs in hooks"):
        evaluated(own, path)
    hook.remove()
    hook = modules[0].register_forward_hook(halved)
    evaluated(own, path)


def test_hooks_on_gradients_count(own, path):
    evaluated(own, path)
    with_hook = list(own.modules())[-1]
    hook = with_hook.register_full_backward_hook(lambda module, given, output: None)
    with pytest.raises(ValueError, match="differs in hooks"):
        evaluated(own, path)
    hook.remove()
    evaluated(own, path)


@pytest.mark.parametrize("name", ["disabled", "_disabled"])
def test_a_switch_in_a_module_of_the_users_counts(name):
    """Adapters of peft keep such a setting in `_disable_adapters`."""
    model = with_a_noting_module([containing_itself(), {"a", "b"}])
    module = next(module for module in all_modules(model) if isinstance(module, Noting))
    found = []
    for value in (False, True, False):
        setattr(module, name, value)
        found.append(identity.identity_of_model(model)["settings"])
    assert found[0] == found[2] != found[1]


@pytest.mark.parametrize("version", ["lens_mix", "transformer_lens", "torch", "transformers"])
def test_other_versions_are_refused_and_named(own, path, version, monkeypatch):
    evaluated(own, path)
    monkeypatch.setitem(identity._VERSIONS, version, "0.0.1")
    with pytest.raises(ValueError, match=f'{version}: ".*" there, "0.0.1" here') as refused:
        evaluated(own, path)
    assert "differs in versions" in str(refused.value)


def far_tokens(last):
    """Return a long prompt in a list with another. torch prints only the ends of such a prompt."""
    return torch.tensor([*[3] * 600, last, *[3] * 600])


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"methods": lm.methods.ValueZeroing(metric="euclidean")}, "methods"),
        ({"aggregations": ["rollout"]}, "aggregations"),
        ({"randomised_model": True}, "randomised_model: false there, true here"),
        ({"attention_mask": torch.tensor([1, 1, 1, 1, 1, 1, 0])}, "options"),
        ({"task": Importance([torch.tensor([1, 2, 3])], OCCLUSION)}, "cases"),
        ({"task": Importance([torch.tensor([1, 2, 3])], lm.methods.Occlusion(replacements=[9]))}, "task"),
    ],
)
def test_another_question_is_refused(own, path, changes, named):
    evaluated(own, path)
    with pytest.raises(ValueError, match=SENTENCE) as refused:
        evaluated(own, path, **changes)
    assert named in str(refused.value)


def test_the_middle_of_long_prompts_the_row_the_cues_and_the_target_count():
    def digest(**changes):
        return identity.digest_identity(dataclasses.replace(Case(far_tokens(5), -1, (2,)), **changes))

    changes = [{}, {"prompt": far_tokens(6)}, {"query": -2}, {"relevant": (3,)}]
    changes += [{"target": lm.targets.token(5)}, {"target": lm.targets.token(6)}]
    assert len({digest(**change) for change in changes}) == len(changes)
    assert digest() == digest()


# ------------------------------------------------------------------ functions and classes of the user's

FACTOR = 2.0


def scaled(m):
    return lm.layer_mean(m).replace(scores=lm.layer_mean(m).scores * FACTOR)


def test_functions_are_told_apart_by_what_they_do(monkeypatch):
    def powered(power):
        return lambda m: m.scores**power

    functions = [scaled, powered(2), powered(3), lambda m: m.scores + 1, lambda m: m.scores + 2]
    functions += [functools.partial(lm.rollout, residual=0.25), functools.partial(lm.rollout, residual=0.5)]
    found = [identity.digest_identity(function) for function in functions]
    assert len(set(found)) == len(functions)
    assert identity.digest_identity(powered(2)) == found[1]
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert identity.digest_identity(scaled) != found[0]


def test_methods_of_the_users_are_told_apart_by_their_code():
    def made(body):
        names = {"Method": lm.method.Method, "__name__": "__main__"}
        exec(f"class Own(Method):\n    name = 'own'\n    def __call__(self, block):\n        {body}", names)
        return identity.digest_identity(names["Own"]())

    assert made("return 1") == made("return 1") != made("return 2")


def test_a_function_has_the_same_identity_in_another_process():
    code = (
        "from tests.evaluation.test_finished import *; print(identity.digest_identity([scaled, {'a', 'b'}]))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == identity.digest_identity([scaled, {"a", "b"}])


def test_what_has_no_identity_is_refused(own, path):
    calls = iter([1, 2])
    with pytest.raises(
        ValueError, match=r"resume: expected values that can be compared in another run .*leave out"
    ):
        evaluated(own, path, aggregations={"odd": lambda m: next(calls) and lm.layer_mean(m)})
    assert not path.exists()
    meta = torch.empty(2, device="meta")
    with pytest.raises(ValueError, match="offloaded"):
        identity.digest_identity(meta)


# ------------------------------------------------------------------ broken files


def test_a_file_that_is_written_anew_is_the_same_file(own, path):
    """A link stays a link, with the permissions of its target, and other files beside it stay unchanged."""
    whole = evaluated(own, path)
    text, target, beside = path.read_text(), path.with_name("target"), path.with_name(f"{path.name}.new")
    path.unlink()
    target.write_text(text[:-3])
    target.chmod(0o640)
    path.symlink_to(target.name)
    beside.write_text("another file")
    assert evaluated(own, path).records == whole.records
    assert path.is_symlink()
    assert target.read_text() == text
    assert target.stat().st_mode & 0o777 == 0o640
    assert beside.read_text() == "another file"


def test_a_file_that_is_empty_or_cut_within_its_header_is_begun_anew(own, path):
    whole = evaluated(own, path)
    text = path.read_text()
    header = text.split("\n")[0]
    for start in ("", "\n", header[:1], header[:10], header[:40], header[:-1], header[:-1] + "\n", header):
        path.write_text(start)
        assert evaluated(own, path).records == whole.records
        assert path.read_text() == text


@pytest.mark.parametrize(
    "start",
    ["no header", "[1, 2]", '{"model": "gpt2"}', "5", '{"lens_mix.evaluate": 3}', "[" * 100_000],
)
def test_a_file_of_something_else_is_refused_and_kept(own, path, start):
    path.write_text(f"{start}\nanother line\n")
    with pytest.raises(ValueError, match=SENTENCE):
        evaluated(own, path)
    assert path.read_text() == f"{start}\nanother line\n"


def test_a_broken_header_above_cases_is_refused(own, path):
    evaluated(own, path)
    first, *lines = path.read_text().split("\n")
    path.write_text("\n".join([first[:30], *lines]))
    with pytest.raises(ValueError, match=SENTENCE):
        evaluated(own, path)


def test_bytes_and_folders_are_refused(own, path):
    path.write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(ValueError, match=SENTENCE):
        evaluated(own, path)
    with pytest.raises(ValueError, match="expected a file, got the folder"):
        evaluated(own, path.parent)
    with pytest.raises(TypeError, match="resume: expected the path of a file"):
        evaluated(own, 3)


@pytest.mark.parametrize("cut", [1, 20, -1])
def test_a_last_line_that_is_cut_is_computed_again(own, path, cut):
    """The next case is not written on the same line."""
    whole = evaluated(own, path)
    text = path.read_text()
    lines = text.split("\n")
    path.write_text("\n".join([*lines[:2], lines[2][:cut]]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluated(own, path).records == whole.records
    assert path.read_text() == text


@pytest.mark.parametrize(
    "line",
    [
        "broken",
        "{}",
        "[]",
        "null",
        '{"case": 1}',
        '{"case": 1, "records": 5}',
        '{"case": 1, "records": []}',
        '{"case": 1, "records": [5]}',
        '{"case": 1, "records": [{"case": 1}]}',
        '{"case": true, "records": []}',
        '{"case": 7, "records": []}',
        '{"case": "1", "records": []}',
        '{"refused": []}',
    ],
)
def test_lines_that_are_no_records_are_computed_again(own, path, line):
    whole = evaluated(own, path)
    lines = path.read_text().split("\n")
    lines[2] = line
    path.write_text("\n".join(lines))
    with pytest.warns(UserWarning, match="resume: 1 lines of .* are broken or are not records"):
        assert evaluated(own, path).records == whole.records
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert evaluated(own, path).records == whole.records


def test_records_of_other_scores_are_computed_again(own, path):
    whole = evaluated(own, path)
    lines = path.read_text().split("\n")
    for broken in ({"spearman": "1"}, {"case": 2}, {"method": None}, {"further": 1}):
        entry = json.loads(lines[2])
        entry["records"][0] |= broken
        path.write_text("\n".join([*lines[:2], json.dumps(entry), *lines[3:]]))
        with pytest.warns(UserWarning, match="1 lines"):
            assert evaluated(own, path).records == whole.records
